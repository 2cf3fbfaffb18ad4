"""Runner mixin for vLLM's Model Runner V2: where vToken's part of a step is called.

V2 keeps block tables and lengths on the device, and compares the batch's own lengths with prompt
lengths when it samples. So those are left alone: attention is given a buffer of vToken's, which
keeps its address, as full CUDA graphs need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vtoken.core.arrays import IntArray
from vtoken.kv.translation import on_device
from vtoken.vllm.batch import Batch, PreparedStep
from vtoken.vllm.runner_core import NO_STEP, VTokenRunnerCore


class BatchV2(Batch):
    """A V2 step's batch, and the lengths that attention gets in place of its own.

    Args:
        source: vLLM's `InputBatch`.
        table: its block table, int32 `[rows, blocks]`, on the device.
        slots: its slot mapping, int64 `[tokens]`, on the device.
        buffer: takes the lengths, int32 `[most rows]`, on the device.
    """

    def __init__(
        self, source: Any, table: torch.Tensor, slots: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        count = source.num_reqs
        self.source = source
        self.req_ids = source.req_ids
        self.starts = source.query_start_loc_np[: count + 1]
        self.upper_bound = source.seq_lens_cpu_upper_bound.clone()
        self.lengths = self.upper_bound.numpy()[:count]
        self.slots = slots[: source.num_tokens]
        self.positions = source.positions[: source.num_tokens]
        self.on_device = buffer[: len(source.seq_lens)]
        self._table = table

    def shorten(self, lag: IntArray) -> None:
        self.on_device[: len(lag)] -= on_device(lag, self.on_device.device)
        self.upper_bound[: len(lag)] -= torch.from_numpy(lag)

    def device_lengths(self) -> IntArray:
        found: IntArray = self.on_device[: len(self.req_ids)].cpu().numpy()
        return found

    def blocks(self, row: int, count: int | None = None) -> IntArray:
        found: IntArray = self._table[row, :count].cpu().numpy()
        return found


class VTokenRunnerV2Mixin(VTokenRunnerCore):
    """What vToken adds to a V2 model runner. Mixed in before the runner class."""

    # Provided by vLLM's runner, named here for readers and type checkers.
    block_tables: Any
    req_states: Any
    model_state: Any
    max_num_reqs: int

    _vtoken_lengths: torch.Tensor
    _vtoken_prepared: PreparedStep | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._vtoken_lengths = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)
        # vLLM has no factory for this object, which the model's class chooses; the subclass
        # adds methods only, so the class of the finished object can be changed.
        self.model_state.__class__ = with_corrected_lengths(type(self.model_state))
        self.model_state.vtoken_runner = self

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        # The first that V2 does in a step.
        self._begin_step(scheduler_output)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def _set_blocks(self, req_id: str, blocks: Sequence[int]) -> None:
        self.block_tables.append_block_ids(
            self.req_states.req_id_to_index[req_id], (list(blocks),), overwrite=True
        )

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        self._vtoken_prepared = None
        if self.vtoken_step is not NO_STEP:
            self._stage_lengths(input_batch)
            batch = BatchV2(input_batch, tables[0], slots[0], self._vtoken_lengths)
            self._vtoken_prepared = self._correct(batch)
        return tables, slots

    def _stage_lengths(self, input_batch: Any) -> torch.Tensor:
        """The batch's lengths in the buffer that attention reads, padding included."""
        staged = self._vtoken_lengths[: len(input_batch.seq_lens)]
        staged.copy_(input_batch.seq_lens)
        return staged

    def vtoken_lengths_of(self, input_batch: Any) -> tuple[Any, PreparedStep | None]:
        """The batch with the lengths that attention is to be given; and the step, unless it is
        a dummy run of vLLM's or nothing of it is vToken's."""
        prepared = self._vtoken_prepared
        if prepared is None or prepared.batch.source is not input_batch:
            return replace(input_batch, seq_lens=self._stage_lengths(input_batch)), None
        batch = prepared.batch
        given = replace(
            input_batch, seq_lens=batch.on_device, seq_lens_cpu_upper_bound=batch.upper_bound
        )
        return given, prepared

    def vtoken_complete(
        self, metadata: dict[str, Any], prepared: PreparedStep | None, *, replayed: bool
    ) -> None:
        if prepared is None:
            self._complete_dummy(metadata)
        else:
            self._complete(metadata, prepared, replayed=replayed)


@cache
def with_corrected_lengths(kind: Any) -> type:
    """A subclass of a model state's class that gives attention slots instead of tokens. Made from
    that class alone, or a finished object could not change to it."""

    class Corrected(kind):  # type: ignore[misc]
        vtoken_runner: VTokenRunnerV2Mixin

        def prepare_attn(
            self, input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any
        ) -> dict[str, Any]:
            given, prepared = self.vtoken_runner.vtoken_lengths_of(input_batch)
            metadata: dict[str, Any] = super().prepare_attn(given, cudagraph_mode, *args, **kwargs)
            replayed = cudagraph_mode == CUDAGraphMode.FULL
            self.vtoken_runner.vtoken_complete(metadata, prepared, replayed=replayed)
            return metadata

    Corrected.__name__ = Corrected.__qualname__ = f"VToken{kind.__name__}"
    return Corrected


class VTokenCPUModelRunnerV2(VTokenRunnerV2Mixin, CPUModelRunner):
    """vLLM's V2 runner on CPUs with vToken."""


class VTokenGPUModelRunnerV2(VTokenRunnerV2Mixin, GPUModelRunner):
    """vLLM's V2 runner on GPUs with vToken."""
