"""The register of everything of vLLM that vToken overrides, in a form that start-up checks.

`REGISTER.md` says why and when each may go; this table says what is overridden and what it
looked like when the override was written. A changed signature refuses the start.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Override:
    """One overridden or relied-on callable.

    Attributes:
        target: `module:Class.method` of vLLM.
        parameters: its parameter names, in order, as of vLLM 0.32.0.
    """

    target: str
    parameters: tuple[str, ...]

    def current(self) -> tuple[str, ...] | None:
        """Parameter names found in the installed vLLM, None if the target is gone."""
        module, _, path = self.target.partition(":")
        try:
            found: object = import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            return None
        return tuple(inspect.signature(found).parameters)  # type: ignore[arg-type]


_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_POOL = "vllm.v1.core.block_pool:BlockPool"


def _of_schedulers(name: str, parameters: tuple[str, ...]) -> tuple[Override, Override]:
    """Of both: the asynchronous one may come to have its own."""
    return Override(f"{_SCHEDULER}.{name}", parameters), Override(f"{_ASYNC}.{name}", parameters)


OVERRIDES: tuple[Override, ...] = (
    Override(
        f"{_MANAGER}.get_num_blocks_to_allocate",
        (
            "self",
            "request_id",
            "num_tokens",
            "new_computed_blocks",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "num_tokens_main_model",
            "apply_admission_cap",
            "prefill_end",
        ),
    ),
    Override(
        f"{_MANAGER}.allocate_new_blocks",
        ("self", "request_id", "num_tokens", "num_tokens_main_model"),
    ),
    Override(
        f"{_MANAGER}.cache_blocks",
        ("self", "request", "num_tokens", "retention_interval", "replay_boundaries"),
    ),
    Override(f"{_MANAGER}.pop_blocks_for_free", ("self", "request_id")),
    Override("vllm.v1.kv_cache_interface:FullAttentionSpec.merge", ("specs",)),
    *_of_schedulers("schedule", ("self", "throttle_prefills")),
    *_of_schedulers("update_from_output", ("self", "scheduler_output", "model_runner_output")),
    *_of_schedulers("_free_request_blocks", ("self", "request")),
    *_of_schedulers("finish_requests", ("self", "request_ids", "finished_status")),
    *_of_schedulers("_update_request_as_session", ("self", "session", "update")),
    Override(f"{_RUNNER}.get_kv_cache_spec", ("self",)),
    Override(
        f"{_RUNNER}.initialize_kv_cache",
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    ),
    Override(f"{_RUNNER}.profile_run", ("self", "randomize_inputs")),
    Override(f"{_RUNNER}._update_states", ("self", "scheduler_output")),
    Override(f"{_RUNNER}.sample_tokens", ("self", "grammar_output")),
    Override(f"{_RUNNER}._prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens")),
    Override(
        f"{_RUNNER}._build_attention_metadata",
        (
            "self",
            "num_tokens",
            "num_reqs",
            "max_query_len",
            "num_tokens_padded",
            "num_reqs_padded",
            "ubatch_slices",
            "logits_indices",
            "max_num_sampled_tokens",
            "use_spec_decode",
            "for_cudagraph_capture",
            "num_scheduled_tokens",
            "slot_mappings",
        ),
    ),
    Override(f"{_RUNNER_V2}.get_kv_cache_spec", ("self",)),
    Override(
        f"{_RUNNER_V2}.initialize_kv_cache",
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    ),
    Override(f"{_RUNNER_V2}.profile_run", ("self", "randomize_inputs")),
    Override(f"{_RUNNER_V2}.load_model", ("self", "load_dummy_weights", "args", "model", "kwargs")),
    Override(f"{_RUNNER_V2}.finish_requests", ("self", "scheduler_output")),
    Override(f"{_RUNNER_V2}.prepare_attn", ("self", "input_batch")),
    Override(f"{_RUNNER_V2}.sample_tokens", ("self", "grammar_output")),
    Override(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        (
            "self",
            "input_batch",
            "cudagraph_mode",
            "block_tables",
            "slot_mappings",
            "attn_groups",
            "kv_cache_config",
            "for_capture",
            "ubatch_idx",
            "model_specific_attn_metadata",
        ),
    ),
    Override(
        "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        ("self", "req_index", "new_block_ids", "overwrite"),
    ),
    Override(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        (
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
    ),
    Override(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward",
        (
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
    ),
    Override("vllm.v1.outputs:AsyncModelRunnerOutput.get_output", ("self",)),
    Override("vllm.v1.worker.gpu_worker:Worker._make_model_runner", ("self",)),
    Override("vllm.v1.worker.cpu_worker:CPUWorker.init_device", ("self",)),
    Override(f"{_POOL}.free_blocks", ("self", "ordered_blocks")),
    Override(f"{_POOL}.evict_blocks", ("self", "block_ids")),
)


def changed_overrides() -> list[str]:
    """Targets whose signature differs from the register, with what was found."""
    changed = []
    for override in OVERRIDES:
        current = override.current()
        if current != override.parameters:
            changed.append(override.target.partition(":")[2])
    return changed
