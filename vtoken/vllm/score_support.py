"""Where attention weights can be had, and why not where they cannot.

The score tap computes softmax(q K^T) beside the kernel, so it is there only where that is what the
kernel does. Rotary embedding, grouped queries, scales and soft caps of the logits are in it. What
is not is refused: at start for a policy of the server's own, per request for one that a request
names. Of what only the layers tell, the scheduler learns through the KV cache spec.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.torch_utils import is_quantized_kv_cache

from vtoken.config import VTokenConfig
from vtoken.vllm import holes
from vtoken.vllm.views import NO_TAP, capability_of

#: environment variable with the reason, for the front end's processes, which know no configuration
NO_SCORES = "VTOKEN_NO_SCORES"

_OTHER_POLICY = "choose a policy that needs no attention weights, such as streaming-llm"


def why_no_scores(config: VllmConfig) -> str:
    """Why a configuration has no score tap, with the way out; empty where it has one."""
    if why_not := _no_tap_in(config):
        return why_not
    if config.parallel_config.pipeline_parallel_size > 1:
        return (
            "each pipeline stage would have a part of them; set --pipeline-parallel-size to 1, or "
            + _OTHER_POLICY
        )
    dtype = str(config.cache_config.cache_dtype)
    if is_quantized_kv_cache(dtype):
        return (
            f"the score tap does not read quantised keys (KV cache dtype {dtype}); use "
            f"--kv-cache-dtype auto, or {_OTHER_POLICY}"
        )
    return ""


def _no_tap_in(config: VllmConfig) -> str:
    """On a GPU the backend has to be named: which one vLLM would choose is not known yet."""
    if holes.on_cpu():
        return ""
    named = config.attention_config.backend
    return NO_TAP if named is None else capability_of(named.name).why_no_scores


def why_no_scores_in(layers: Mapping[str, Any]) -> str:
    """Why the weights of these attention layers, by name, cannot be had; empty if they can."""
    counts = dict[int, str]()
    for name, layer in layers.items():
        impl, backend = layer.impl, getattr(layer, "attn_backend", None)
        if backend is not None and (why_not := capability_of(backend.get_name()).why_no_scores):
            return why_not
        if getattr(impl, "sinks", None) is not None:
            return (
                f"layer {name} has attention sinks, a share of the softmax that the score tap "
                f"leaves out; {_OTHER_POLICY}"
            )
        counts.setdefault(getattr(impl, "num_heads", 0), name)
    if len(counts) > 1:
        where = ", ".join(f"{heads} in {name}" for heads, name in counts.items())
        return f"layers differ in their number of query heads ({where}); {_OTHER_POLICY}"
    return ""


def no_scores_for(settings: VTokenConfig, why: str) -> str:
    """What to tell whoever wants this policy; empty where it can be served."""
    if not (why and settings.needs_scores):
        return ""
    return f"policy {settings.policy} asks for attention weights: {why}"


def announce_no_scores(why: str) -> None:
    """Leave the reason, or that there is none, for the front end's processes."""
    os.environ[NO_SCORES] = why


def announced() -> str:
    """The reason as far as a front end knows it; the scheduler knows all of it."""
    return os.environ.get(NO_SCORES, "")
