"""The score tap: attention weights of chosen rows, from each layer's own query and the paged K.

A layer hands its query over at one place, `StepTap.hand_over`, after the kernel has run: K of the
step's own tokens is in the cache by then. `DirectTap` uses the query there and then. Inside a full
CUDA graph no Python runs at replay; `CapturedTap` therefore does nothing there but one copy into a
buffer that keeps its address, and computes when the step's forward pass is over. K has not changed
until then: moves and new writes begin with the next step.

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
from vtoken.kv.scores import HostKeys, ScoredRow, fast_row, keys_of, plain_row
from vtoken.policies.taps import RowScores, RowTap, TappedStep, Taps

_TAP = "vtoken_tap"


@dataclass(frozen=True)
class TappedLayer:
    """What the tap knows of an attention layer.

    Attributes:
        cache: its KV cache, `[blocks, kv_heads, tokens, 2 * head_dim]`.
        num_heads: query heads of this rank.
        scale, cap: of the logits; see `plain_row`.
    """

    cache: torch.Tensor
    num_heads: int
    head_dim: int
    scale: float
    cap: float
    keys: HostKeys

    @classmethod
    def of(cls, layer: Any) -> TappedLayer:
        impl, cache = layer.impl, layer.kv_cache
        cap = float(impl.logits_soft_cap or 0)
        width = cache.shape[-1] // 2
        return cls(cache, impl.num_heads, width, float(impl.scale), cap, HostKeys(cache))

    def score(self, row: ScoredRow, index: int, query: torch.Tensor) -> None:
        """Add this layer's weights to `row`. `query` is `[tokens, heads, head_dim]`."""
        if self.keys.usable and query.dtype == torch.float32:
            fast_row(row, index, query.numpy(), self.keys, self.scale, self.cap)
        else:
            plain_row(row, index, query, keys_of(self.cache), self.scale, self.cap)


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
        self._handed: set[str] = set()
        #: by layer: the rows that are tapped in it, and the layer's place among a row's
        self._readers: dict[str, list[tuple[ScoredRow, int]]] = {name: [] for name in layers}
        #: by request: query heads of this rank, over its layers
        self._heads: dict[str, int] = {}
        for req_id, row in rows.items():
            own = tapped_layers(names, taps.rows[req_id].stride)
            self._heads[req_id] = sum(self.layers[name].num_heads for name in own)
            for index, name in enumerate(own):
                self._readers[name].append((row, index))

    def hand_over(self, name: str, query: torch.Tensor) -> None:
        """A layer's query after rotary embedding, `[tokens, heads, head_dim]`; the only place
        where the tap is given one. Layers that are not tapped are passed over."""
        if name in self.layers:
            self._handed.add(name)
            self._take(name, query)

    @abstractmethod
    def _take(self, name: str, query: torch.Tensor) -> None: ...

    @abstractmethod
    def _complete(self) -> None:
        """All layers have handed over."""

    def finish(self) -> TappedStep:
        """The sums over all layers and all ranks; called once by every rank.

        Raises:
            InvariantViolation: L6, if a layer has handed nothing over.
        """
        if len(self._handed) != len(self.layers):
            raise InvariantViolation(
                law="L6",
                message="a layer's attention ran without the score tap",
                before=len(self.layers),
                after=len(self._handed),
            )
        self._complete()
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
            self.layers[name].score(row, index, query)


class DirectTap(StepTap):
    """Uses each query at once."""

    def _take(self, name: str, query: torch.Tensor) -> None:
        self._score(name, query)

    def _complete(self) -> None:
        return


class QueryBuffers:
    """Where captured copies of q lie: one buffer per layer, which keeps its address.

    Args:
        num_tokens: most tokens of a step.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._buffers: dict[str, torch.Tensor] = {}

    def of(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The layer's buffer, `[num_tokens, heads, head_dim]`."""
        if name not in self._buffers:
            self._buffers[name] = like.new_zeros((self.num_tokens, *like.shape[1:]))
        return self._buffers[name]


class CapturedTap(StepTap):
    """Copies each query, and nothing else, when it is handed over; see the module's docstring.

    Args:
        buffers: kept from step to step.
    """

    def __init__(self, *args: Any, buffers: QueryBuffers) -> None:
        super().__init__(*args)
        self._buffers = buffers
        self._copies: list[tuple[str, torch.Tensor]] = []

    def _take(self, name: str, query: torch.Tensor) -> None:
        buffer = self._buffers.of(name, query)
        buffer[: len(query)].copy_(query)
        self._copies.append((name, buffer))

    def _complete(self) -> None:
        for name, query in self._copies:
            self._score(name, query)


def attach_tap(metadata: Any, tap: StepTap) -> None:
    setattr(metadata, _TAP, tap)


def tap_of(metadata: Any) -> StepTap | None:
    found: StepTap | None = getattr(metadata, _TAP, None)
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
