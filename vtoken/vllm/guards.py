"""What vToken refuses to start with: each refusal names the reason and the way out.

Exactness depends on properties of the attention and of the engine that some configurations do
not have. Those are refused here, at start, rather than served inexactly. The README lists what
is tested and what is merely not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedConfiguration
from vtoken.vllm import holes
from vtoken.vllm.engine_errors import MORE_MEMORY, refusal
from vtoken.vllm.overrides import changed_overrides
from vtoken.vllm.score_support import no_scores_for, why_no_scores
from vtoken.vllm.settings import settings_of
from vtoken.vllm.version import SUPPORTED_VLLM, check_version


@dataclass(frozen=True)
class Refusal:
    """One configuration that cannot be served exactly.

    Attributes:
        applies: whether a vLLM configuration has it.
        reason: what and why.
        way_out: what to do instead.
    """

    applies: Callable[[VllmConfig], bool]
    reason: str
    way_out: str


def _text_config(config: VllmConfig) -> Any:
    return config.model_config.hf_text_config


def _has_sliding_window(config: VllmConfig) -> bool:
    if config.model_config.disable_sliding_window:
        return False
    text = _text_config(config)
    if config.model_config.get_sliding_window() is not None:
        return True
    kinds = getattr(text, "layer_types", None) or ()
    return "sliding_attention" in kinds


def _has_alibi(config: VllmConfig) -> bool:
    """Models that say so; the others are found by their layers, in `check_layers`."""
    text = _text_config(config)
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "") == "alibi":
        return True
    attention = getattr(text, "attn_config", None)
    if isinstance(attention, dict):
        return bool(attention.get("alibi"))
    return bool(getattr(attention, "alibi", False))


def _quantised_per_head(config: VllmConfig) -> bool:
    return str(config.cache_config.cache_dtype).endswith("per_token_head")


_ALIBI = "ALiBi biases depend on the distance between slots, which relocation changes"
_ALIBI_WAY_OUT = "serve a model with rotary or learned positions"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.model_config.runner_type != "generate",
        "the model does not generate text, so there is no KV cache to evict from",
        "serve a decoder-only language model",
    ),
    Refusal(
        lambda c: bool(c.model_config.is_encoder_decoder),
        "encoder-decoder models attend across two caches",
        "serve a decoder-only language model",
    ),
    Refusal(
        lambda c: bool(c.model_config.is_attention_free or c.model_config.is_hybrid),
        "the model has layers with recurrent state (Mamba or linear attention), from which no "
        "single token can be evicted",
        "serve a model whose layers all use full attention",
    ),
    Refusal(
        lambda c: bool(c.model_config.use_mla),
        "MLA caches one compressed latent instead of K and V per head; no layout adapter exists",
        "serve a model with multi-head or grouped-query attention",
    ),
    Refusal(
        _has_sliding_window,
        "the model has sliding-window layers: a window counts physical slots, which relocation "
        "reorders",
        "serve a model with full attention only, or start with --disable-sliding-window if its "
        "quality allows",
    ),
    Refusal(
        lambda c: getattr(c.model_config, "attention_chunk_size", None) is not None,
        "the model has chunked local attention, which cuts the cache by position",
        "serve a model with full attention only",
    ),
    Refusal(
        _has_alibi,
        _ALIBI,
        _ALIBI_WAY_OUT,
    ),
    Refusal(
        lambda c: bool(getattr(c.model_config, "is_diffusion", False)),
        "diffusion language models rewrite tokens that are cached already",
        "serve an autoregressive model",
    ),
    Refusal(
        _quantised_per_head,
        "this KV cache dtype stores scales per token and head outside the K and V bytes, which "
        "a move would leave behind",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        lambda c: bool(c.cache_config.kv_sharing_fast_prefill),
        "layers that share another layer's KV cache may skip prompt tokens",
        "leave out --kv-sharing-fast-prefill",
    ),
    Refusal(
        lambda c: c.speculative_config is not None,
        "speculative decoding takes back tokens that the token table has registered",
        "leave out --speculative-config",
    ),
    Refusal(
        lambda c: c.kv_transfer_config is not None,
        "KV connectors and P/D disaggregation address blocks by logical position",
        "leave out --kv-transfer-config",
    ),
    Refusal(
        lambda c: c.ec_transfer_config is not None,
        "encoder-cache transfer splits a model over engines",
        "leave out --ec-transfer-config",
    ),
    Refusal(
        lambda c: getattr(c.cache_config, "kv_offloading_size", None) is not None,
        "KV offloading copies blocks by logical position",
        "leave out --kv-offloading-size",
    ),
    Refusal(
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "context parallelism (DCP, PCP) interleaves a block's tokens over ranks",
        "set --decode-context-parallel-size and --prefill-context-parallel-size to 1",
    ),
    Refusal(
        lambda c: bool(c.parallel_config.use_ubatching),
        "dual-batch overlap splits a step's metadata in a way that vToken does not follow",
        "leave out --enable-dbo and --ubatch-size",
    ),
)


def refuse(message: str) -> BaseException:
    """What to raise for a refusal: `UnsupportedConfiguration`, unless a server tells it."""
    return refusal(UnsupportedConfiguration(message))


def _view_refusals(config: VllmConfig, settings: VTokenConfig) -> Iterator[str]:
    """Holes before the physical end need a view that skips them."""
    if holes.has_view(config) or not holes.leaves_holes(config, settings):
        return
    cached = bool(config.cache_config.enable_prefix_caching)
    if settings.reclaim == "off":
        reason = "reclaim mode 'off' leaves holes in front of attention"
        way_out = "use --reclaim eager" + (" and --no-enable-prefix-caching" if cached else "")
    else:
        reason = "with prefix caching a shared block may keep holes in front of attention"
        way_out = "start with --no-enable-prefix-caching"
    yield (
        f"{reason}, and this backend has no view that skips them; {way_out}, or start with "
        "--attention-backend TRITON_ATTN, which gives it one"
    )


def _score_refusals(config: VllmConfig, settings: VTokenConfig) -> Iterator[str]:
    """Policies that ask for attention weights need the score tap; no others are looked at."""
    if settings.needs_scores:
        yield from filter(None, [no_scores_for(settings, why_no_scores(config))])


def check_config(config: VllmConfig) -> None:
    """Refuse a vLLM configuration that cannot be served exactly.

    Raises:
        UnsupportedConfiguration: every reason and its way out, in one line.
        Rejected: vToken's own options are out of range.
    """
    check_version()
    settings = settings_of(config)
    found = [f"{r.reason}; {r.way_out}" for r in REFUSALS if r.applies(config)]
    found += _view_refusals(config, settings)
    found += _score_refusals(config, settings)
    if found:
        raise refuse("vToken cannot serve this: " + "; also: ".join(found))


def check_engine(config: VllmConfig) -> None:
    """`check_config` plus what only a starting engine can tell.

    Raises:
        UnsupportedConfiguration: as above; or an overridden vLLM method has changed; or the
            worker class is not vToken's.
    """
    check_config(config)
    changed = changed_overrides()
    if changed:
        raise refuse(
            f"parts of vLLM differ from the ones vToken was written for: {', '.join(changed)}; "
            f"install an unmodified vllm=={SUPPORTED_VLLM}"
        )
    worker = config.parallel_config.worker_cls
    name = worker if isinstance(worker, str) else worker.__qualname__
    if "VToken" not in name:
        raise refuse(
            f"vToken's scheduler is on but the worker class is {name}; start with "
            "--worker-cls vtoken.vllm.worker.VTokenCPUWorker (CPU) or "
            "vtoken.vllm.worker.VTokenGPUWorker (GPU)"
        )


def check_pool(settings: VTokenConfig, config: VllmConfig, manager: Any) -> None:
    """Refuse a KV pool that cannot hold one request's budget.

    Raises:
        UnsupportedConfiguration
    """
    from vtoken.vllm.kv_manager import VTokenManager

    if not isinstance(manager, VTokenManager):
        raise refuse(
            f"vLLM manages the KV cache with {type(manager).__name__} instead of vToken's manager; "
            "start with vToken's worker class, and serve a model whose layers all use full "
            "attention"
        )
    blocks = manager.block_pool.num_gpu_blocks - 1  # the null block holds nothing
    tokens = blocks * manager.block_size
    if settings.headroom >= blocks:
        raise refuse(
            f"the KV pool holds {blocks} blocks, no more than the headroom of {settings.headroom}; "
            f"lower --headroom, or {MORE_MEMORY}"
        )
    if settings.budget is not None and settings.budget + settings.slack > tokens:
        slack = f" and a slack of {settings.slack}" if settings.slack else ""
        raise refuse(
            f"the KV pool holds {tokens} tokens ({blocks} blocks of {manager.block_size}), less "
            f"than the budget of {settings.budget}{slack}; lower --budget, or {MORE_MEMORY}"
        )


def check_layers(specs: Mapping[str, KVCacheSpec], layers: Mapping[str, Any]) -> None:
    """Refuse models with a layer that is not plain full attention.

    Args:
        specs: KV cache specs by layer name.
        layers: vLLM's layers by name, which know more than any configuration.

    Raises:
        UnsupportedConfiguration: names the first such layer.
    """
    if not specs:
        raise refuse("the model has no layer with a KV cache; serve a decoder-only language model")
    for name, spec in specs.items():
        if (
            type(spec) is not FullAttentionSpec
            or spec.sliding_window
            or spec.attention_chunk_size
            or spec.non_causal
        ):
            raise refuse(
                f"layer {name} has a {type(spec).__name__} KV cache; vToken needs full causal "
                "attention in every layer, so serve another model"
            )
    for name, layer in layers.items():
        if getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None:
            raise refuse(f"layer {name} uses ALiBi; {_ALIBI}; {_ALIBI_WAY_OUT}")
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise refuse(
                f"layer {name} shares another layer's KV cache, which vToken would move twice; "
                "serve a model whose layers have a cache each"
            )
