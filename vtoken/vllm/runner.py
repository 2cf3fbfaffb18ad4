"""Runner mixin for vLLM's V1 model runners: applies layout changes and corrects the inputs.

Positions are never touched: they stay logical. What changes is where vLLM looks: the slot of
each new token, the length of each sequence in slots, and the block list.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken.checks.worker import WorkerChecker
from vtoken.config import VTokenConfig
from vtoken.core.layout import LayoutChange, StepLayout
from vtoken.errors import InvariantViolation, UnsupportedConfiguration
from vtoken.kv import Mover, TokenRowLayout, TransposedKeyLayout, probe_layout, stack_layers
from vtoken.kv.layouts import KVLayout
from vtoken.kv.relocator import Relocator
from vtoken.kv.streams import CopyStream, SynchronousCopyStream, ThreadCopyStream
from vtoken.kv.translation import TranslationCache
from vtoken.policies.taps import TappedStep, Taps
from vtoken.vllm.backend import (
    GatherRows,
    GatherScratch,
    adopt_attention,
    attach_rows,
    gather_rows,
)
from vtoken.vllm.fingerprint import compare_ranks, fingerprint_of
from vtoken.vllm.guards import check_layers
from vtoken.vllm.kv_manager import VTokenAttentionSpec
from vtoken.vllm.metadata import (
    Sequence,
    StepMetadata,
    StepNews,
    metadata_of,
    tell,
)
from vtoken.vllm.score_support import why_no_scores_in
from vtoken.vllm.scores import (
    CapturedTap,
    DirectTap,
    QueryBuffers,
    StepTap,
    TappedLayer,
    attach_tap,
    scored_row,
    tapped_layers,
)
from vtoken.vllm.settings import settings_of
from vtoken.vllm.views import View, capability_of, view_of

_NO_STEP = StepMetadata()


class VTokenRunnerMixin:
    """What vToken adds to a V1 model runner. Mixed in before the runner class."""

    # Provided by vLLM's runner, named here for readers and type checkers.
    vllm_config: Any
    kv_cache_config: Any
    compilation_config: Any
    requests: dict[str, Any]
    input_batch: Any
    attn_groups: Any
    positions: torch.Tensor
    seq_lens: torch.Tensor
    optimistic_seq_lens_cpu: torch.Tensor
    query_start_loc: Any
    device: torch.device

    vtoken_step: StepMetadata = _NO_STEP
    _vtoken_gathered: tuple[GatherRows, ...] = ()
    vtoken_relocator: Relocator
    vtoken_stream: CopyStream | None = None
    vtoken_layout: KVLayout
    vtoken_checker: WorkerChecker
    vtoken_translation: TranslationCache
    #: live slots of this step's rows with holes
    _vtoken_rows: dict[str, torch.Tensor]
    #: whether the score tap copies q in the layers and computes after them (full CUDA graphs)
    vtoken_captures: bool = False
    _vtoken_tap: StepTap | None = None
    #: scores that no output has taken along yet
    _vtoken_scores: list[TappedStep]

    # ---- start

    def get_kv_cache_spec(self) -> dict[str, Any]:
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        layers = self.compilation_config.static_forward_context
        check_layers(specs, layers)
        why_not = why_no_scores_in({name: layers[name] for name in specs})
        return {
            name: VTokenAttentionSpec.of(spec, why_no_scores=why_not)
            for name, spec in specs.items()
        }

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        names = self.kv_cache_config.kv_cache_groups[0].layer_names
        layers = [self.compilation_config.static_forward_context[name] for name in names]
        cpu = isinstance(self, CPUModelRunner)
        if cpu:
            adopt_attention(layers)
        layout_class = TransposedKeyLayout if cpu else TokenRowLayout
        self.vtoken_layout = layout_class(stack_layers([layer.kv_cache for layer in layers]))

        def write(index: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
            layer = layers[index]
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

        last = self.kv_cache_config.num_blocks - 1
        probe_layout(self.vtoken_layout, write, (last - 1, last))
        self._vtoken_scratch = GatherScratch(self.vtoken_layout)
        self._vtoken_layers = dict(zip(names, layers, strict=True))
        self._vtoken_tapped: dict[str, TappedLayer] = {}
        self._vtoken_queries: QueryBuffers | None = None
        self._vtoken_backend = self.attn_groups[0][0].backend.get_name()
        self.vtoken_configure(settings_of(self.vllm_config))

    def vtoken_configure(self, settings: VTokenConfig) -> None:
        """Take a configuration from the next step on; all counters start anew."""
        if self.vtoken_stream is not None:
            self.vtoken_stream.close()
        beside = settings.reclaim == "background" and not settings.force_sync
        self.vtoken_stream = ThreadCopyStream() if beside else SynchronousCopyStream()
        self.vtoken_checker = WorkerChecker(self.vtoken_layout, level=settings.checks)
        watch = self.vtoken_checker if self.vtoken_checker.watches_moves else None
        self.vtoken_translation = TranslationCache(self.device)
        self._vtoken_sequence = Sequence()
        self._vtoken_tap, self._vtoken_scores = None, []
        mover = Mover(self.vtoken_layout)
        self.vtoken_relocator = Relocator(mover, self.vtoken_stream, watch=watch)

    # ---- each step

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Before super: it zeroes new blocks first thing, and a block freed by a plan of this
        # step may be among them; and it appends new blocks to the lists corrected here.
        self._check_gathered()
        step = metadata_of(scheduler_output)
        if step is not None:
            self._vtoken_sequence.expect(step)
        self.vtoken_step = step or _NO_STEP
        for req_id in scheduler_output.finished_req_ids:
            self.vtoken_checker.forget(req_id)
            self.vtoken_translation.forget(req_id)
        if not self.vtoken_step.orders.empty:
            self.vtoken_relocator.apply(self.vtoken_step.orders)
            self._switch_layouts(self.vtoken_step.orders.changes)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_tap()
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput):
            scores, self._vtoken_scores = self._vtoken_scores, []
            news = StepNews(self.vtoken_relocator.take_failed(), scores)
            if not news.empty:
                output = tell(output, news)
        return output

    def _finish_tap(self) -> None:
        tap, self._vtoken_tap = self._vtoken_tap, None
        if tap is None:
            return
        step = tap.finish()
        for req_id, row in tap.rows.items():
            self.vtoken_checker.check_scores(
                req_id,
                step.rows[req_id].values,
                queries=row.num_queries,
                heads=step.rows[req_id].heads,
            )
        self._vtoken_scores.append(step)

    def _switch_layouts(self, changes: list[LayoutChange]) -> None:
        for change in changes:
            state = self.requests[change.req_id]
            # The batch row and the request's own list: a request that is not in the batch is
            # re-added from its list.
            state.block_ids[0][:] = change.blocks
            row = self.input_batch.req_id_to_index.get(change.req_id)
            if row is not None:
                table = self.input_batch.block_table[0]
                table.clear_row(row)
                table.add_row(change.blocks, row)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self._vtoken_rows = {}
        # After super: it compares logical lengths to decide which rows are sampled.
        layouts = self.vtoken_step.layouts
        if layouts:
            self._correct_inputs(layouts)
        if self.vtoken_checker.level >= 2 and self.vtoken_step is not _NO_STEP:
            compare_ranks(self._fingerprint(scheduler_output.total_num_scheduled_tokens))
        if self.vtoken_step.expected:
            self._check_access(scheduler_output.total_num_scheduled_tokens)
        return prepared

    def _correct_inputs(self, layouts: dict[str, StepLayout]) -> None:
        """Lengths in slots and slots of new tokens, for rows that differ from vLLM's layout."""
        batch = self.input_batch
        num_reqs = batch.num_reqs
        lag = np.zeros(num_reqs, dtype=np.int32)
        starts = self.query_start_loc.np
        tokens: list[int] = []
        slots: list[np.ndarray] = []
        dense: list[tuple[int, int]] = []
        for row, req_id in enumerate(batch.req_ids):
            layout = layouts.get(req_id)
            if layout is None:
                continue
            lag[row] = layout.reclaimed
            first, last = int(starts[row]), int(starts[row + 1])
            if view_of(self._vtoken_backend, holes=layout.holes) is View.GATHER:
                self._vtoken_rows[req_id] = self.vtoken_translation.take(
                    req_id, layout, last - first
                )
            tokens.extend(range(first, last))
            # A new request's adopted tokens come first and are not computed in this step.
            slots.append(layout.new_slots[first - last :])
            if not layout.holes:
                dense.append((row, layout.num_live))
        lag_cpu = torch.from_numpy(lag)
        lag_device = lag_cpu.to(self.device, non_blocking=True)
        self.seq_lens[:num_reqs] -= lag_device
        self.optimistic_seq_lens_cpu[:num_reqs] -= lag_cpu
        if dense and self.vtoken_checker.level:
            rows = [row for row, _ in dense]
            self.vtoken_checker.check_lengths(
                [batch.req_ids[row] for row in rows],
                self.optimistic_seq_lens_cpu.numpy()[rows],
                np.array([live for _, live in dense]),
            )
        index = torch.tensor(tokens, device=self.device)
        values = torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(self.device)
        batch.block_table[0].slot_mapping.gpu[index] = values

    def _fingerprint(self, num_tokens: int) -> int:
        """Of block tables, lengths and slots, as attention is about to be given them."""
        rows, table = self.input_batch.num_reqs, self.input_batch.block_table[0]
        lengths = self.optimistic_seq_lens_cpu[:rows].numpy()
        used = -(-int(lengths.max(initial=0)) // self.vtoken_layout.block_size)
        slots = table.slot_mapping.gpu[:num_tokens].cpu().numpy()
        return fingerprint_of([table.block_table.np[:rows, :used], lengths, slots])

    def _check_access(self, num_tokens: int) -> None:
        """Hand the checker what this step's attention was really given."""
        batch = self.input_batch
        block_table = batch.block_table[0]
        starts = self.query_start_loc.np
        slot_mapping = block_table.slot_mapping.gpu[:num_tokens].cpu().numpy()
        positions = self.positions[:num_tokens].cpu().numpy()
        lengths = self.seq_lens[: batch.num_reqs].cpu().numpy()
        for row, req_id in enumerate(batch.req_ids):
            expected = self.vtoken_step.expected.get(req_id)
            if expected is None:
                continue
            chunk = slice(int(starts[row]), int(starts[row + 1]))
            gathered = self._vtoken_rows.get(req_id)
            self.vtoken_checker.check_access(
                expected,
                block_row=block_table.block_table.np[row],
                seq_len=int(lengths[row]),
                gathered=None if gathered is None else gathered.cpu().numpy(),
                writes=slot_mapping[chunk],
                query_positions=positions[chunk],
            )

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("num_scheduled_tokens") is None:  # a dummy run of vLLM's, no scheduled step
            if self.vtoken_captures and isinstance(metadata, dict):
                self._attach_to_all(metadata, self._queries())  # it may be what is captured
            return metadata, common
        rows = []
        for row, req_id in enumerate(self.input_batch.req_ids):
            if req_id in self._vtoken_rows:
                rows.append((row, self._vtoken_rows[req_id]))
        if rows:
            self._attach_gather(metadata, rows)
        if self.vtoken_step.taps is not None:
            self._attach_tap(metadata, self.vtoken_step.taps)
        return metadata, common

    def _attach_gather(
        self, metadata: dict[str, Any], rows: list[tuple[int, torch.Tensor]]
    ) -> None:
        layout = self.vtoken_layout
        done: dict[int, Any] = {}
        for group in self.attn_groups[0]:
            builder = group.get_metadata_builder(0)
            for name in group.layer_names:
                own = metadata[name]
                if id(own) not in done:
                    done[id(own)] = gather_rows(
                        self.query_start_loc.cpu,
                        builder,
                        rows,
                        self._vtoken_scratch,
                        layout.block_size,
                    )
                    attach_rows(own, done[id(own)])
        self._vtoken_gathered = tuple(done.values())

    def _attach_tap(self, metadata: dict[str, Any], taps: Taps) -> None:
        why_not = capability_of(self._vtoken_backend).why_no_scores
        if why_not:
            raise UnsupportedConfiguration(why_not)
        names = list(self._vtoken_layers)
        by_stride = {tap.stride: tapped_layers(names, tap.stride) for tap in taps.rows.values()}
        wanted = set().union(*by_stride.values())
        layers = {name: self._tapped_layer(name) for name in names if name in wanted}
        heads = next(iter(layers.values())).num_heads  # the same in all; see `score_support.py`
        starts, batch = self.query_start_loc.np, self.input_batch
        rows = {}
        for req_id, tap in taps.rows.items():
            index = batch.req_id_to_index[req_id]
            chunk = slice(int(starts[index]), int(starts[index + 1]))
            rows[req_id] = scored_row(
                tap,
                chunk,
                self._read_slots(req_id, index),
                self.vtoken_layout.block_size,
                layers=len(by_stride[tap.stride]),
                heads=heads,
            )
        if self.vtoken_captures:
            self._vtoken_tap = CapturedTap(taps, rows, layers, names, buffers=self._queries())
        else:
            self._vtoken_tap = DirectTap(taps, rows, layers, names)
        self._attach_to_all({name: metadata[name] for name in layers}, self._vtoken_tap)

    def _attach_to_all(self, metadata: dict[str, Any], tap: StepTap | QueryBuffers) -> None:
        for own in {id(own): own for own in metadata.values()}.values():
            attach_tap(own, tap)

    def _queries(self) -> QueryBuffers:
        if self._vtoken_queries is None:
            most = self.vllm_config.scheduler_config.max_num_batched_tokens
            self._vtoken_queries = QueryBuffers(most)
        return self._vtoken_queries

    def _tapped_layer(self, name: str) -> TappedLayer:
        if name not in self._vtoken_tapped:
            self._vtoken_tapped[name] = TappedLayer.of(self._vtoken_layers[name])
        return self._vtoken_tapped[name]

    def _read_slots(self, req_id: str, row: int) -> np.ndarray:
        """Slots that attention reads for a row of the batch, in its order, int64 `[k]`."""
        gathered = self._vtoken_rows.get(req_id)
        if gathered is not None:
            return gathered.cpu().numpy()
        size = self.vtoken_layout.block_size
        length = int(self.optimistic_seq_lens_cpu[row])
        blocks = self.input_batch.block_table[0].block_table.np[row, : -(-length // size)]
        slots = blocks.astype(np.int64)[:, None] * size + np.arange(size)
        return slots.ravel()[:length]

    def _check_gathered(self) -> None:
        """L6: the last step's gather view was used by every layer, not only prepared."""
        gathered, self._vtoken_gathered = self._vtoken_gathered, ()
        uses = sum(rows.uses for rows in gathered)
        if gathered and uses != self.vtoken_layout.num_layers:
            raise InvariantViolation(
                law="L6",
                message="a row with holes was attended to without the gather view",
                before=self.vtoken_layout.num_layers,
                after=uses,
            )


class VTokenCPUModelRunner(VTokenRunnerMixin, CPUModelRunner):
    """vLLM's V1 runner on CPUs with vToken."""


class VTokenGPUModelRunner(VTokenRunnerMixin, GPUModelRunner):
    """vLLM's V1 runner on GPUs with vToken."""
