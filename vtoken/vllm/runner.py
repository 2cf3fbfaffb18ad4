"""Runner mixin for vLLM's V1 model runners: where vToken's part of a step is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken.core.arrays import IntArray
from vtoken.kv.translation import on_device
from vtoken.vllm.batch import Batch, PreparedStep
from vtoken.vllm.runner_core import NO_STEP, VTokenRunnerCore


class BatchV1(Batch):
    """The V1 runner's persistent batch and buffers, after `_prepare_inputs`."""

    def __init__(self, runner: VTokenRunnerMixin, num_tokens: int) -> None:
        batch = runner.input_batch
        count = batch.num_reqs
        self.req_ids = batch.req_ids
        self.starts = runner.query_start_loc.np[: count + 1]
        self.lengths = runner.optimistic_seq_lens_cpu.numpy()[:count]
        self.slots = batch.block_table[0].slot_mapping.gpu[:num_tokens]
        self.positions = runner.positions[:num_tokens]
        self._runner = runner
        self._table = batch.block_table[0].block_table.np

    def shorten(self, lag: IntArray) -> None:
        runner = self._runner
        runner.seq_lens[: len(lag)] -= on_device(lag, runner.device)
        runner.optimistic_seq_lens_cpu[: len(lag)] -= torch.from_numpy(lag)

    def device_lengths(self) -> IntArray:
        found: IntArray = self._runner.seq_lens[: len(self.req_ids)].cpu().numpy()
        return found

    def blocks(self, row: int, count: int | None = None) -> IntArray:
        found: IntArray = self._table[row, :count]
        return found


class VTokenRunnerMixin(VTokenRunnerCore):
    """What vToken adds to a V1 model runner. Mixed in before the runner class."""

    # Provided by vLLM's runner, named here for readers and type checkers.
    requests: dict[str, Any]
    input_batch: Any
    positions: torch.Tensor
    seq_lens: torch.Tensor
    optimistic_seq_lens_cpu: torch.Tensor
    query_start_loc: Any

    _vtoken_prepared: PreparedStep | None = None

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self._begin_step(scheduler_output)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _set_blocks(self, req_id: str, blocks: Sequence[int]) -> None:
        # The batch row and the request's own list: a request that is not in the batch is
        # re-added from its list.
        self.requests[req_id].block_ids[0][:] = blocks
        row = self.input_batch.req_id_to_index.get(req_id)
        if row is not None:
            table = self.input_batch.block_table[0]
            table.clear_row(row)
            table.add_row(blocks, row)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        # After super: it compares logical lengths to decide which rows are sampled.
        self._vtoken_prepared = None
        if self.vtoken_step is not NO_STEP:
            batch = BatchV1(self, scheduler_output.total_num_scheduled_tokens)
            self._vtoken_prepared = self._correct(batch)
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        prepared = self._vtoken_prepared
        if kwargs.get("num_scheduled_tokens") is None:
            self._complete_dummy(metadata)
        else:
            # Only batches for full graphs are padded here.
            replayed = kwargs.get("num_tokens_padded") is not None
            self._complete(metadata, prepared, replayed=replayed)
        return metadata, common


class VTokenCPUModelRunner(VTokenRunnerMixin, CPUModelRunner):
    """vLLM's V1 runner on CPUs with vToken."""


class VTokenGPUModelRunner(VTokenRunnerMixin, GPUModelRunner):
    """vLLM's V1 runner on GPUs with vToken."""
