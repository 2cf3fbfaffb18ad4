"""What vToken does in a worker's step, whichever of vLLM's model runners is in use.

Positions are never touched: they stay logical. What changes is where vLLM looks: the slot of
each new token, the length of each sequence in slots, and the block list. `runner.py` and
`runner_v2.py` say at which places of their runner the parts of this class are called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vtoken.checks.worker import WorkerChecker
from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedConfiguration
from vtoken.kv import Mover, TokenRowLayout, TransposedKeyLayout, probe_layout, stack_layers
from vtoken.kv.cuda_stream import copy_stream
from vtoken.kv.layouts import KVLayout
from vtoken.kv.relocator import Relocator
from vtoken.kv.streams import CopyStream
from vtoken.kv.translation import TranslationCache, on_device
from vtoken.vllm.backend import adopt_attention
from vtoken.vllm.batch import Batch, PreparedStep
from vtoken.vllm.fingerprint import compare_ranks, fingerprint_of
from vtoken.vllm.guards import check_layers
from vtoken.vllm.holes import leaves_holes
from vtoken.vllm.kv_manager import VTokenAttentionSpec
from vtoken.vllm.metadata import (
    Sequence as StepSequence,
)
from vtoken.vllm.metadata import (
    StepMetadata,
    StepNews,
    metadata_of,
    tell,
)
from vtoken.vllm.runner_attention import VTokenRunnerAttention
from vtoken.vllm.score_support import why_no_scores_in
from vtoken.vllm.settings import settings_of
from vtoken.vllm.views import View, view_of

NO_STEP = StepMetadata()


class VTokenRunnerCore(VTokenRunnerAttention):
    """Base of the mixins, themselves mixed in before a runner class of vLLM.

    Not an `ABC`: a finished runner could not change its class to one that is.
    """

    # Provided by vLLM's runner, named here for readers and type checkers.
    kv_cache_config: Any
    compilation_config: Any

    vtoken_step: StepMetadata = NO_STEP
    vtoken_relocator: Relocator
    vtoken_stream: CopyStream | None = None
    vtoken_layout: KVLayout
    vtoken_checker: WorkerChecker
    vtoken_translation: TranslationCache

    # ---- start

    def get_kv_cache_spec(self) -> dict[str, Any]:
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        layers = self.compilation_config.static_forward_context
        check_layers(specs, layers)
        self._meet_layers({name: layers[name] for name in specs})
        why_not = why_no_scores_in(self._vtoken_layers)
        return {
            name: VTokenAttentionSpec.of(spec, why_no_scores=why_not)
            for name, spec in specs.items()
        }

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        self._forget_cache()
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)  # type: ignore[misc]
        names = self.kv_cache_config.kv_cache_groups[0].layer_names
        layers = [self.compilation_config.static_forward_context[name] for name in names]
        self._meet_layers(dict(zip(names, layers, strict=True)))
        adopt_attention(layers, self._vtoken_backend)
        transposed = self._vtoken_backend == "CPU_ATTN"
        layout_class = TransposedKeyLayout if transposed else TokenRowLayout
        self.vtoken_layout = layout_class(stack_layers([layer.kv_cache for layer in layers]))

        def write(index: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
            layer = layers[index]
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

        if not is_profiling:  # a cache of few blocks, maybe one, for dummy batches alone
            last = self.kv_cache_config.num_blocks - 1
            probe_layout(self.vtoken_layout, write, (last - 1, last))
        self._meet_cache()
        self.vtoken_configure(settings_of(self.vllm_config))

    def vtoken_configure(self, settings: VTokenConfig) -> None:
        """Take a configuration from the next step on; all counters start anew.

        Raises:
            UnsupportedConfiguration: CUDA graphs were captured without what it needs, or it leaves
                holes and the backend has no view for them.
        """
        if not self._captured_for(settings):
            raise UnsupportedConfiguration(
                "the CUDA graphs were captured for another configuration; start the engine with "
                "this one"
            )
        view_of(self._vtoken_backend, holes=leaves_holes(self.vllm_config, settings))
        if self.vtoken_stream is not None:
            self.vtoken_stream.close()
        beside = settings.reclaim == "background" and not settings.force_sync
        self.vtoken_stream = copy_stream(self.device, beside=beside)
        self.vtoken_checker = WorkerChecker(self.vtoken_layout, level=settings.checks)
        watch = self.vtoken_checker if self.vtoken_checker.watches_moves else None
        self.vtoken_translation = TranslationCache(self.device)
        self._vtoken_sequence = StepSequence()
        self._vtoken_tap, self._vtoken_scores = None, []
        mover = Mover(self.vtoken_layout)
        self.vtoken_relocator = Relocator(mover, self.vtoken_stream, watch=watch)

    # ---- each step

    @abstractmethod
    def _set_blocks(self, req_id: str, blocks: Sequence[int]) -> None:
        """Replace a request's block list, before the step's new blocks are appended to it."""

    def _begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Before the runner looks at the step: it zeroes new blocks first thing, and a block
        freed by a plan of this step may be among them; and it appends new blocks to the lists
        corrected here."""
        self._vtoken_uses.check()
        step = metadata_of(scheduler_output)
        if step is not None:
            self._vtoken_sequence.expect(step)
        self.vtoken_step = step or NO_STEP
        for req_id in scheduler_output.finished_req_ids:
            self.vtoken_checker.forget(req_id)
            self.vtoken_translation.forget(req_id)
        orders = self.vtoken_step.orders
        if not orders.empty:
            self.vtoken_relocator.apply(orders)
            # One list for each request, and none of a request that is preempted in this step: V2
            # writes them all at once, in no order, and may give its place to another one.
            for change in orders.changes:
                self._set_blocks(change.req_id, change.blocks)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_tap()
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput):
            scores, self._vtoken_scores = self._vtoken_scores, []
            news = StepNews(self.vtoken_relocator.take_failed(), scores)
            if not news.empty:
                output = tell(output, news)
        return output

    def _correct(self, batch: Batch) -> PreparedStep:
        """Lengths in slots and slots of new tokens, for rows that differ from vLLM's layout."""
        rows: dict[str, torch.Tensor] = {}
        if self.vtoken_step.layouts:
            rows = self._correct_rows(batch)
        if self.vtoken_checker.level >= 2 and self.vtoken_step is not NO_STEP:
            compare_ranks(self._fingerprint(batch))
        return PreparedStep(batch, rows)

    def _correct_rows(self, batch: Batch) -> dict[str, torch.Tensor]:
        lag = np.zeros(len(batch.req_ids), dtype=np.int32)
        rows: dict[str, torch.Tensor] = {}
        tokens: list[int] = []
        slots: list[np.ndarray] = []
        dense: list[tuple[int, int]] = []
        for row, req_id in enumerate(batch.req_ids):
            layout = self.vtoken_step.layouts.get(req_id)
            if layout is None:
                continue
            lag[row] = layout.reclaimed
            chunk = batch.chunk(row)
            count = chunk.stop - chunk.start
            if view_of(self._vtoken_backend, holes=layout.holes) is not View.DENSE:
                rows[req_id] = self.vtoken_translation.take(req_id, layout, count)
            tokens.extend(range(chunk.start, chunk.stop))
            # A new request's adopted tokens come first and are not computed in this step.
            slots.append(layout.new_slots[-count:])
            if not layout.holes:
                dense.append((row, layout.num_live))
        batch.shorten(lag)
        if dense and self.vtoken_checker.level:
            places = [row for row, _ in dense]
            self.vtoken_checker.check_lengths(
                [batch.req_ids[row] for row in places],
                batch.lengths[places],
                np.array([live for _, live in dense]),
            )
        index = on_device(np.array(tokens), self.device)
        batch.slots[index] = on_device(np.concatenate(slots), self.device)
        return rows

    def _fingerprint(self, batch: Batch) -> int:
        """Of block tables, lengths and slots, as attention is about to be given them."""
        size = self.vtoken_layout.block_size
        used = -(-int(batch.lengths.max(initial=0)) // size)
        tables = [batch.blocks(row, used) for row in range(len(batch.req_ids))]
        return fingerprint_of([*tables, batch.lengths, batch.slots.cpu().numpy()])
