"""What the layers of a step are given beside vLLM's own metadata: the view for rows with holes, and
the score tap."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vtoken.checks.worker import WorkerChecker
from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedConfiguration
from vtoken.kv import TransposedKeyLayout
from vtoken.kv.layouts import KVLayout
from vtoken.policies.taps import TappedStep, Taps
from vtoken.vllm.backend import GatherRows, GatherScratch, attach_rows, gather_rows
from vtoken.vllm.batch import Batch, PreparedStep
from vtoken.vllm.guards import refuse
from vtoken.vllm.holes import has_full_graphs, has_page_view, leaves_holes
from vtoken.vllm.metadata import StepMetadata
from vtoken.vllm.pages import PageBuffers, PageRows, PageTables, ViewUse, attach_pages
from vtoken.vllm.query_buffers import QueryBuffers
from vtoken.vllm.score_support import why_no_scores, why_no_scores_in
from vtoken.vllm.scores import (
    CapturedTap,
    DirectTap,
    StepTap,
    TappedLayer,
    attach_tap,
    scored_row,
    tapped_layers,
)
from vtoken.vllm.settings import settings_of
from vtoken.vllm.views import View, capability_of, view_of


class VTokenRunnerAttention:
    """The part of `VTokenRunnerCore` that completes metadata."""

    # Provided by vLLM's runner and by `VTokenRunnerCore`.
    vllm_config: Any
    attn_groups: Any
    device: torch.device
    vtoken_step: StepMetadata
    vtoken_layout: KVLayout
    vtoken_checker: WorkerChecker

    #: whether the score tap copies q in the layers and computes after them (full CUDA graphs)
    vtoken_captures: bool = False
    #: whether all steps use the page-1 view: a full CUDA graph keeps the one it was captured with
    vtoken_always_pages: bool = False
    _vtoken_backend: str
    _vtoken_layers: dict[str, Any]
    _vtoken_page_buffers: PageBuffers | None = None
    _vtoken_queries: QueryBuffers | None = None
    _vtoken_tap: StepTap | None = None
    #: scores that no output has taken along yet
    _vtoken_scores: list[TappedStep]

    def _meet_layers(self, layers: dict[str, Any]) -> None:
        """Take attention layers by name, in the model's order; before they have a KV cache, and
        again when they have one.

        Raises:
            UnsupportedConfiguration: there will be holes, and a layer's backend, which may be
                another one than the configuration names, has no view for them.
        """
        holes = leaves_holes(self.vllm_config, settings_of(self.vllm_config))
        for layer in layers.values():
            try:
                view_of(layer.attn_backend.get_name(), holes=holes)
            except UnsupportedConfiguration as error:
                raise refuse(str(error)) from None
        self._vtoken_layers = layers
        self._vtoken_backend = next(iter(layers.values())).attn_backend.get_name()

    def _meet_cache(self) -> None:
        """Start with a new KV cache; `vtoken_layout` is its."""
        self._vtoken_scratch = GatherScratch(self.vtoken_layout)
        self._vtoken_pages: PageTables | None = None
        self._vtoken_uses = ViewUse(len(self._vtoken_layers))
        self._vtoken_tapped: dict[str, TappedLayer] = {}
        graphs, settings = has_full_graphs(self.vllm_config), settings_of(self.vllm_config)
        self.vtoken_always_pages = graphs and self._wants_pages
        self.vtoken_captures = graphs and self._may_be_tapped(settings)
        if self._wants_pages:
            self._page_tables()  # refuses a cache without pages of one token

    def _forget_cache(self) -> None:
        """Let go of the KV cache, so that its memory is free when vLLM allocates another: it makes
        a small one first, to measure its CUDA graphs."""
        holders = ("vtoken_layout", "vtoken_checker", "vtoken_relocator", "_vtoken_scratch")
        for name in (*holders, "_vtoken_tapped"):
            self.__dict__.pop(name, None)
        self._vtoken_pages = None

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        # Here, since vLLM gives its pool the memory that this run does not take.
        if self._wants_pages:
            self._reserve_pages()
        if has_full_graphs(self.vllm_config) and self._may_be_tapped(settings_of(self.vllm_config)):
            impl = next(iter(self._vtoken_layers.values())).impl
            dtype = self.vllm_config.model_config.dtype
            self._queries().reserve((impl.num_heads, impl.head_size), dtype, self.device)
        super().profile_run(*args, **kwargs)  # type: ignore[misc]

    @property
    def _wants_pages(self) -> bool:
        config = self.vllm_config
        return has_page_view(config) and leaves_holes(config, settings_of(config))

    def _may_be_tapped(self, settings: VTokenConfig) -> bool:
        """By a policy of the server's, or one that a request names."""
        if settings.policy == "none":
            return False
        return not (why_no_scores(self.vllm_config) or why_no_scores_in(self._vtoken_layers))

    def _captured_for(self, settings: VTokenConfig) -> bool:
        """Whether full CUDA graphs, if there are any, have all that a configuration needs."""
        if not has_full_graphs(self.vllm_config):
            return True
        by_pages = capability_of(self._vtoken_backend).with_holes is View.PAGE_1
        needs_pages = by_pages and leaves_holes(self.vllm_config, settings)
        return (self.vtoken_always_pages or not needs_pages) and (
            self.vtoken_captures or not self._may_be_tapped(settings)
        )

    def _reserve_pages(self) -> PageBuffers:
        if self._vtoken_page_buffers is None:
            self._vtoken_page_buffers = PageBuffers(
                max_rows=self.vllm_config.scheduler_config.max_num_seqs,
                max_length=self.vllm_config.model_config.max_model_len,
                device=self.device,
            )
        return self._vtoken_page_buffers

    def _complete(
        self, metadata: dict[str, Any], prepared: PreparedStep | None, *, replayed: bool
    ) -> None:
        """Attach the view for holes and the score tap to a step's metadata, by layer name.

        Args:
            prepared: None if nothing of the step is vToken's.
            replayed: whether vLLM replays a full CUDA graph for the step.
        """
        rows = []
        if prepared is not None:
            rows = [
                (row, prepared.rows[req_id])
                for row, req_id in enumerate(prepared.batch.req_ids)
                if req_id in prepared.rows
            ]
        pages: PageRows | None = None
        if self.vtoken_always_pages or (
            rows and capability_of(self._vtoken_backend).with_holes is View.PAGE_1
        ):
            given = self._attach_pages(metadata, rows)
            self._vtoken_uses.of_step(given, replayed=replayed)
            pages = given[0]
        elif rows and prepared is not None:
            gathered = self._attach_gather(metadata, prepared.batch, rows)
            self._vtoken_uses.of_step(gathered, replayed=replayed)
        if prepared is not None and self.vtoken_step.expected:
            self._check_access(prepared, pages)
        if prepared is not None and self.vtoken_step.taps is not None:
            self._attach_tap(metadata, prepared, self.vtoken_step.taps)

    def _check_access(self, prepared: PreparedStep, pages: PageRows | None) -> None:
        """Hand the checker what this step's attention was really given."""
        batch, rows = prepared.batch, prepared.rows
        slots = batch.slots.cpu().numpy()
        positions = batch.positions.cpu().numpy()
        lengths = batch.device_lengths()
        for row, req_id in enumerate(batch.req_ids):
            expected = self.vtoken_step.expected.get(req_id)
            if expected is None:
                continue
            if pages is not None:
                gathered = self._page_tables().slots(pages, row)
            else:
                gathered = rows[req_id].cpu().numpy() if req_id in rows else None
            self.vtoken_checker.check_access(
                expected,
                block_row=batch.blocks(row),
                seq_len=int(lengths[row]),
                gathered=gathered,
                writes=slots[batch.chunk(row)],
                query_positions=positions[batch.chunk(row)],
            )

    def _attach_gather(
        self, metadata: dict[str, Any], batch: Batch, rows: list[tuple[int, torch.Tensor]]
    ) -> list[GatherRows]:
        done: dict[int, GatherRows] = {}
        for group in self.attn_groups[0]:
            builder = group.get_metadata_builder(0)
            for name in group.layer_names:
                own = metadata[name]
                if id(own) not in done:
                    done[id(own)] = gather_rows(
                        torch.from_numpy(batch.starts),
                        builder,
                        rows,
                        self._vtoken_scratch,
                        self.vtoken_layout.block_size,
                    )
                    attach_rows(own, done[id(own)])
        return list(done.values())

    def _page_tables(self) -> PageTables:
        if self._vtoken_pages is None:
            caches = {name: layer.kv_cache for name, layer in self._vtoken_layers.items()}
            self._vtoken_pages = PageTables(self._reserve_pages(), caches)
        return self._vtoken_pages

    def _attach_pages(
        self, metadata: dict[str, Any], rows: list[tuple[int, torch.Tensor]]
    ) -> list[PageRows]:
        given = []
        for own in {id(metadata[name]): metadata[name] for name in self._vtoken_layers}.values():
            given.append(self._page_tables().fill(own, rows))
            attach_pages(own, given[-1])
        return given

    def _attach_tap(self, metadata: dict[str, Any], prepared: PreparedStep, taps: Taps) -> None:
        why_not = capability_of(self._vtoken_backend).why_no_scores
        if why_not:
            raise UnsupportedConfiguration(why_not)
        names = list(self._vtoken_layers)
        by_stride = {tap.stride: tapped_layers(names, tap.stride) for tap in taps.rows.values()}
        wanted = set().union(*by_stride.values())
        layers = {name: self._tapped_layer(name) for name in names if name in wanted}
        heads = next(iter(layers.values())).num_heads  # the same in all; see `score_support.py`
        batch = prepared.batch
        places = {req_id: row for row, req_id in enumerate(batch.req_ids)}
        rows = {
            req_id: scored_row(
                tap,
                batch.chunk(places[req_id]),
                self._read_slots(prepared, places[req_id]),
                self.vtoken_layout.block_size,
                layers=len(by_stride[tap.stride]),
                heads=heads,
            )
            for req_id, tap in taps.rows.items()
        }
        if self.vtoken_captures:
            self._vtoken_tap = CapturedTap(taps, rows, layers, names, buffers=self._queries())
        else:
            self._vtoken_tap = DirectTap(taps, rows, layers, names)
        self._attach_to_all({name: metadata[name] for name in layers}, self._vtoken_tap)

    def _complete_dummy(self, metadata: Any) -> None:
        """Of a run of vLLM's that is no scheduled step, but may be what is captured."""
        if not metadata or not isinstance(metadata, dict):
            return  # a run without attention
        if self.vtoken_always_pages:
            self._vtoken_uses.of_dummy(self._attach_pages(metadata, []))
        if self.vtoken_captures:
            self._attach_to_all(metadata, self._queries())

    def _attach_to_all(self, metadata: dict[str, Any], tap: StepTap | QueryBuffers) -> None:
        for own in {id(own): own for own in metadata.values()}.values():
            attach_tap(own, tap)

    def _queries(self) -> QueryBuffers:
        if self._vtoken_queries is None:
            config = self.vllm_config
            most = config.compilation_config.max_cudagraph_capture_size
            self._vtoken_queries = QueryBuffers(
                list(self._vtoken_layers), most or config.scheduler_config.max_num_batched_tokens
            )
        return self._vtoken_queries

    def _tapped_layer(self, name: str) -> TappedLayer:
        if name not in self._vtoken_tapped:
            transposed = isinstance(self.vtoken_layout, TransposedKeyLayout)
            self._vtoken_tapped[name] = TappedLayer.of(
                self._vtoken_layers[name], transposed=transposed
            )
        return self._vtoken_tapped[name]

    def _read_slots(self, prepared: PreparedStep, row: int) -> np.ndarray:
        """Slots that attention reads for a row of the batch, in its order, int64 `[k]`."""
        batch = prepared.batch
        gathered = prepared.rows.get(batch.req_ids[row])
        if gathered is not None:
            return gathered.cpu().numpy()
        size = self.vtoken_layout.block_size
        length = int(batch.lengths[row])
        blocks = batch.blocks(row, -(-length // size))
        slots = blocks.astype(np.int64)[:, None] * size + np.arange(size)
        return slots.ravel()[:length]

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
