"""The score tap: attention weights of chosen rows, from each layer's own query and the paged K.

A layer hands its query over at one place, `StepTap.hand_over`, after the kernel has run: K of the
step's own tokens is in the cache by then. `DirectTap` uses the query there and then. Inside a full
CUDA graph no Python runs at replay, only what was captured: one copy of q into a buffer that keeps
its address, and a count that says the copy has run. `CapturedTap` computes from the buffers when
the step's forward pass is over. K has not changed until then: moves and new writes begin with the
next step.

Costs O(live) per tapped row and layer; a step without taps costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vtoken.errors import InvariantViolation
from vtoken.kv.scores import HostKeys, ScoredRow, fast_row, key_rows_of, keys_of, row_weights
from vtoken.policies.taps import RowScores, RowTap, TappedStep, Taps
from vtoken.vllm.query_buffers import QueryBuffers

_TAP = "vtoken_tap"


@dataclass(frozen=True)
class TappedLayer:
    """What the tap knows of an attention layer.

    Attributes:
        keys: K in its KV cache, a view `[blocks, kv_heads, head_dim, tokens]`.
        num_heads: query heads of this rank.
        scale, cap: of the logits; see `row_weights`.
        host: the keys once more, where the compiled pass can read them.
    """

    keys: torch.Tensor
    num_heads: int
    head_dim: int
    scale: float
    cap: float
    host: HostKeys | None

    @classmethod
    def of(cls, layer: Any, *, transposed: bool) -> TappedLayer:
        """`transposed`: whether K lies as the CPU kernels keep it; else a token's K is a row."""
        impl, cache = layer.impl, layer.kv_cache
        cap = float(impl.logits_soft_cap or 0)
        keys = keys_of(cache) if transposed else key_rows_of(cache)
        host = HostKeys(cache) if transposed else None
        return cls(keys, impl.num_heads, keys.shape[2], float(impl.scale), cap, host)

    def score(self, row: ScoredRow, index: int, query: torch.Tensor, sums: DeviceSums) -> None:
        """Add this layer's weights to `row`, or to what is added to it at the end.

        Args:
            index: of the layer, among those tapped for the row.
            query: `[tokens, heads, head_dim]`.
        """
        if self.host is not None and self.host.usable and query.dtype == torch.float32:
            fast_row(row, index, query.numpy(), self.host, self.scale, self.cap)
        else:
            sums.add(index, row_weights(row, query, self.keys, self.scale, self.cap))


class DeviceSums:
    """Weights of one row that stay on the device until the step is over, then cross at once.

    Args:
        row: what they are added to.
    """

    def __init__(self, row: ScoredRow) -> None:
        self._row = row
        self._total: torch.Tensor | None = None
        self._by_layer: dict[int, torch.Tensor] = {}

    def add(self, index: int, weights: torch.Tensor) -> None:
        """A layer's, float32 `[heads, k]`."""
        total = weights.sum(0)
        self._total = total if self._total is None else self._total + total
        if self._row.per_head is not None:
            self._by_layer[index] = weights

    def finish(self) -> None:
        if self._total is not None:
            self._row.values += self._total.cpu().numpy()
        if self._row.per_head is not None:
            for index, weights in self._by_layer.items():
                self._row.per_head[index] += weights.cpu().numpy()


def tapped_layers(names: Sequence[str], stride: int) -> list[str]:
    """Those that are tapped: the last of every `stride`, or the very last if there are fewer."""
    return list(names[stride - 1 :: stride]) or list(names[-1:])


class StepTap(ABC):
    """The taps of one step on one rank.

    Args:
        taps: what the scheduler wants.
        rows: the same requests' rows.
        layers: by name, in the model's order, those that some row is tapped in.
        names: of all layers, in the model's order.
    """

    def __init__(
        self,
        taps: Taps,
        rows: dict[str, ScoredRow],
        layers: Mapping[str, TappedLayer],
        names: Sequence[str],
    ) -> None:
        self._taps = taps
        self.rows = rows
        self.layers = dict(layers)
        #: by layer: the rows that are tapped in it, and the layer's place among a row's
        self._readers: dict[str, list[tuple[ScoredRow, int]]] = {name: [] for name in layers}
        #: by request: query heads of this rank, over its layers
        self._heads: dict[str, int] = {}
        self._sums = {id(row): DeviceSums(row) for row in rows.values()}
        for req_id, row in rows.items():
            own = tapped_layers(names, taps.rows[req_id].stride)
            self._heads[req_id] = sum(self.layers[name].num_heads for name in own)
            for index, name in enumerate(own):
                self._readers[name].append((row, index))

    def hand_over(self, name: str, query: torch.Tensor) -> None:
        """A layer's query after rotary embedding, `[tokens, heads, head_dim]`; the only place
        where the tap is given one. Layers that are not tapped are passed over."""
        if name in self.layers:
            self._take(name, query)

    @abstractmethod
    def _take(self, name: str, query: torch.Tensor) -> None: ...

    @abstractmethod
    def _handed(self) -> int:
        """How many layers have handed over, each once."""

    @abstractmethod
    def _complete(self) -> None:
        """All layers have handed over."""

    def finish(self) -> TappedStep:
        """The sums over all layers and all ranks; called once by every rank.

        Raises:
            InvariantViolation: L6, if a layer has handed nothing over.
        """
        handed = self._handed()
        if handed != len(self.layers):
            raise InvariantViolation(
                law="L6",
                message="a layer's attention ran without the score tap",
                before=len(self.layers),
                after=handed,
            )
        self._complete()
        for sums in self._sums.values():
            sums.finish()
        ranks = get_tp_group().world_size
        _sum_over_ranks(self.rows.values())
        found = {
            req_id: RowScores(
                row.values,
                self._heads[req_id] * ranks,
                None if row.all_heads is None else _flat(row.all_heads),
            )
            for req_id, row in self.rows.items()
        }
        return TappedStep(self._taps.number, found)

    def _score(self, name: str, query: torch.Tensor) -> None:
        for row, index in self._readers[name]:
            self.layers[name].score(row, index, query, self._sums[id(row)])


class DirectTap(StepTap):
    """Uses each query at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._taken: set[str] = set()

    def _take(self, name: str, query: torch.Tensor) -> None:
        self._taken.add(name)
        self._score(name, query)

    def _handed(self) -> int:
        return len(self._taken)

    def _complete(self) -> None:
        return


class CapturedTap(StepTap):
    """Uses the buffers after the forward pass; see the module's docstring.

    Args:
        buffers: kept from step to step.
    """

    def __init__(self, *args: Any, buffers: QueryBuffers) -> None:
        super().__init__(*args)
        self._buffers = buffers
        self._before = buffers.mark()
        #: layers of a step that is longer than what is captured, and used at once
        self._taken: set[str] = set()

    def _take(self, name: str, query: torch.Tensor) -> None:
        if len(query) > self._buffers.num_tokens:
            self._taken.add(name)
            self._score(name, query)
        else:
            self._buffers.hand_over(name, query)

    def _copied(self) -> set[str]:
        counts = self._buffers.since(self._before)
        return {name for name in self.layers if counts[name] == 1}

    def _handed(self) -> int:
        return len(self._taken) + len(self._copied() - self._taken)

    def _complete(self) -> None:
        for name in self.layers:
            if name not in self._taken:
                self._score(name, self._buffers.query(name))


def attach_tap(metadata: Any, tap: StepTap | QueryBuffers) -> None:
    setattr(metadata, _TAP, tap)


def tap_of(metadata: Any) -> StepTap | QueryBuffers | None:
    found: StepTap | QueryBuffers | None = getattr(metadata, _TAP, None)
    return found


def scored_row(
    tap: RowTap,
    chunk: slice,
    slots: np.ndarray,
    block_size: int,
    *,
    layers: int,
    heads: int,
) -> ScoredRow:
    """The row as the tap reads it on this rank.

    Args:
        chunk: the row's query tokens in the batch.
        slots: its live slots in attention order, int `[k]`.
        layers: how many are tapped for this row.
        heads: query heads of one rank.
    """
    observed = slice(max(chunk.start, chunk.stop - tap.queries), chunk.stop)
    per_head = (layers, heads) if tap.per_head else None
    group = get_tp_group()
    return ScoredRow.of(
        observed,
        slots,
        block_size,
        per_head=per_head,
        rank=group.rank_in_group,
        ranks=group.world_size,
    )


def _flat(all_heads: np.ndarray) -> np.ndarray:
    return all_heads.reshape(-1, all_heads.shape[-1])


def _sum_over_ranks(rows: Iterable[ScoredRow]) -> None:
    """Add up the ranks' values in place, in one message."""
    group = get_tp_group()
    if group.world_size < 2:
        return
    parts = []
    for row in rows:
        parts.append(row.values)
        if row.all_heads is not None:
            parts.append(row.all_heads)
    flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    torch.distributed.all_reduce(flat, group=group.cpu_group)
    total, first = flat.numpy(), 0
    for part in parts:
        part[...] = total[first : first + part.size].reshape(part.shape)
        first += part.size
