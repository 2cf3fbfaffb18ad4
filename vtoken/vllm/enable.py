"""One call that turns vToken on: keyword arguments for `vllm.LLM`, or flags for `vllm serve`."""

from __future__ import annotations

import json
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.vllm.request_options import announce
from vtoken.vllm.settings import KEY

REQUEST_GUARD = "vtoken.vllm.request_guard:RequestGuard"


def engine_kwargs(
    config: VTokenConfig | None = None, *, platform: str | None = None, **options: Any
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` (or `EngineArgs`) that turn vToken on.

    >>> from vllm import LLM
    >>> LLM(model, **engine_kwargs(policy="streaming-llm", budget=128))  # doctest: +SKIP

    Args:
        config: the configuration, or None to build it from `options`.
        platform: "cpu" or "gpu"; None asks vLLM which one it runs on.
        options: fields of `VTokenConfig`.

    Raises:
        Rejected: an option is unknown or out of range.
    """
    settings = config or VTokenConfig.from_mapping(options)
    cpu = _on_cpu() if platform is None else platform == "cpu"
    kwargs: dict[str, Any] = {
        # CPU engines run synchronously; on GPUs a plain Scheduler subclass would switch
        # async scheduling off.
        "scheduler_cls": "vtoken.vllm.scheduler."
        + ("VTokenScheduler" if cpu else "VTokenAsyncScheduler"),
        "worker_cls": "vtoken.vllm.worker." + ("VTokenCPUWorker" if cpu else "VTokenGPUWorker"),
        "additional_config": {KEY: settings.as_dict()},
    }
    if settings.policy != "none":
        announce(settings)
        kwargs["logits_processors"] = [REQUEST_GUARD]
    return kwargs


def engine_flags(config: VTokenConfig, *, platform: str | None = None) -> list[str]:
    """The same as command-line flags of vLLM's OpenAI server."""
    kwargs = engine_kwargs(config, platform=platform)
    flags = [
        "--scheduler-cls",
        kwargs["scheduler_cls"],
        "--worker-cls",
        kwargs["worker_cls"],
        "--additional-config",
        json.dumps(kwargs["additional_config"]),
    ]
    for processor in kwargs.get("logits_processors", ()):
        flags += ["--logits-processors", processor]
    return flags


def engine_defaults(config: VTokenConfig) -> dict[str, Any]:
    """Engine arguments of `vtoken run` and `vtoken serve` where a user gives none.

    On a CPU fp32, since bf16 is several times slower without AVX512; and vLLM's smallest block,
    since its default of 128 tokens is larger than many budgets. On a GPU the one attention backend
    that can skip holes and has a score tap, where a policy is on.
    """
    if _on_cpu():
        return {"dtype": "float32", "block_size": 32}
    return {} if config.policy == "none" else {"attention_backend": "TRITON_ATTN"}


def _on_cpu() -> bool:
    from vtoken.vllm.holes import on_cpu

    return on_cpu()
