"""What queries of one row attend to: softmax(q K^T) from the layer's own query and the paged K.

K is read block by block where it lies, never gathered token by token: a kernel on a CPU keeps a
block's keys transposed, so that one component of the query meets the same component of all of a
block's keys in one run of memory. Slots that are not the row's live ones are computed with their
block and left out before the softmax, so nothing dead is ever counted.

`row_weights` is the definition, in torch. `fast_row` is the same in one pass, compiled by Numba,
which vLLM's worker needs as well; without it, and where the cache is not fp32, the definition
serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtoken.core.arrays import IntArray
from vtoken.kv.host_copy import compiled_copy
from vtoken.kv.translation import on_device

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]


@dataclass
class ScoredRow:
    """One row of a step whose scores are wanted, and what has been summed so far.

    Attributes:
        queries: its observed query tokens in the batch, the last ones of the row's step.
        blocks: blocks that are read, int64 `[n]`.
        places: for each live token in attention order, its place in the slots of `blocks`; int32
            `[k]`. Those of the step's own tokens come last and in order.
        values: softmax weights summed over observed queries, query heads and layers, float32 `[k]`.
        per_head: the same by layer and query head, float32 `[layers, heads, k]`, or None.
        all_heads: what `per_head` is part of: room for the heads of all ranks, rank after rank,
            float32 `[layers, ranks * heads, k]`.
    """

    queries: slice
    blocks: npt.NDArray[np.int64]
    places: IntArray
    values: Floats
    per_head: Floats | None = None
    all_heads: Floats | None = None

    @property
    def num_queries(self) -> int:
        return int(self.queries.stop - self.queries.start)

    @classmethod
    def of(
        cls,
        queries: slice,
        slots: npt.NDArray[np.integer],
        block_size: int,
        *,
        per_head: tuple[int, int] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> ScoredRow:
        """A row whose live tokens lie in `slots`, in attention order, int `[k]`.

        Args:
            per_head: layers and query heads, if values by head are wanted as well.
            rank, ranks: whose query heads these are, where the heads are split over ranks.
        """
        which, offsets = np.divmod(np.asarray(slots, dtype=np.int64), block_size)
        blocks, index = np.unique(which, return_inverse=True)
        places = (index * block_size + offsets).astype(np.int32)
        count = len(places)
        row = cls(queries, blocks, places, np.zeros(count, dtype=np.float32))
        if per_head is not None:
            layers, heads = per_head
            row.all_heads = np.zeros((layers, ranks * heads, count), dtype=np.float32)
            row.per_head = row.all_heads[:, rank * heads : (rank + 1) * heads]
        return row


def keys_of(cache: torch.Tensor) -> torch.Tensor:
    """K of one layer as the CPU kernels keep it: a view `[blocks, heads, head_dim, tokens]` of
    `cache`, `[blocks, heads, tokens, 2 * head_dim]` with each head's block in one run."""
    blocks, heads, tokens, content = cache.shape
    strides = (*cache.stride()[:2], tokens, 1)
    return cache.as_strided((blocks, heads, content // 2, tokens), strides, cache.storage_offset())


def key_rows_of(cache: torch.Tensor) -> torch.Tensor:
    """The same view where a token's K and V lie in a row, with any strides before that."""
    return cache[..., : cache.shape[-1] // 2].transpose(2, 3)


def row_weights(
    row: ScoredRow, query: torch.Tensor, keys: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """One layer's weights of `row`, added up over its queries; float32 `[heads, k]`, where the keys
    are.

    Args:
        query: the batch's queries after rotary embedding, `[tokens, heads, head_dim]`.
        keys: `[blocks, kv_heads, head_dim, tokens]`, the step's own keys included.
        scale: what q K^T is multiplied with.
        cap: bound of the logits, `cap * tanh(logits / cap)`; 0 for none.
    """
    observed = query[row.queries].float()
    num_heads, num_kv = observed.shape[1], keys.shape[1]
    blocks, places = on_device(row.blocks, keys.device), on_device(row.places, keys.device)
    # [kv_heads, head_dim, blocks * tokens], then the live slots only
    read = keys[blocks].permute(1, 2, 0, 3).flatten(2)[:, :, places].float()
    grouped = observed.unflatten(1, (num_kv, num_heads // num_kv))
    logits = torch.einsum("qngd,ndk->ngqk", grouped, read).flatten(0, 1) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    count, observing = len(places), row.num_queries
    newest = torch.arange(count - observing, count, device=keys.device)[:, None]
    hidden = torch.arange(count, device=keys.device)[None, :] > newest
    return logits.masked_fill(hidden, float("-inf")).softmax(-1).sum(1)


class HostKeys:
    """K of one layer in host memory, as rows of one component of a block's keys.

    Args:
        cache: the layer's cache, as `keys_of` has it.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        blocks, heads, tokens, content = cache.shape
        steps = [*cache.stride()[:2]]
        self.usable = (
            cache.device.type == "cpu"
            and cache.dtype == torch.float32
            and (content // 2) % 8 == 0
            and all(step % tokens == 0 for step in steps)
            and compiled_row() is not None
        )
        if self.usable:
            self.block_rows, self.head_rows = (np.uint64(step // tokens) for step in steps)
            last = (blocks - 1) * steps[0] + (heads - 1) * steps[1] + tokens * content
            flat = cache.as_strided((last // tokens, tokens), (tokens, 1), cache.storage_offset())
            self.rows: Floats = flat.numpy()
            self.num_kv = int(heads)


def fast_row(
    row: ScoredRow, layer: int, query: Floats, keys: HostKeys, scale: float, cap: float
) -> None:
    """Add one layer's weights to `row`: `row_weights` in one compiled pass, float32 in host memory.

    Args:
        layer: place in `row.per_head`.
    """
    kernel = compiled_row()
    assert kernel is not None
    kernel(
        query[row.queries],
        keys.rows,
        row.blocks.astype(np.uint64) * keys.block_rows,
        keys.head_rows,
        keys.num_kv,
        row.places,
        np.float32(scale),
        np.float32(cap),
        row.values,
        np.empty((0, 0), dtype=np.float32) if row.per_head is None else row.per_head[layer],
    )


@cache
def compiled_row() -> Callable[..., None] | None:
    """The compiled pass; None without Numba. Compiling takes some seconds, once per process."""
    if compiled_copy() is None:  # it also settles what Numba and vLLM need to live side by side
        return None
    from numba import njit

    exponentials = njit(nogil=True, fastmath={"contract", "nnan", "ninf", "nsz"})(_exponentials)
    dots = njit(nogil=True, fastmath=True)(_dots)
    largest = njit(nogil=True, fastmath=True)(_largest)
    total = njit(nogil=True, fastmath=True)(_total)
    add = njit(nogil=True, fastmath=True)(_add)
    return njit(nogil=True)(_score_row(dots, largest, exponentials, total, add))  # type: ignore[no-any-return]


def _score_row(dots: Any, largest: Any, exponentials: Any, total: Any, add: Any) -> Any:
    def score_row(
        query: Any,
        rows: Any,
        firsts: Any,
        head_rows: Any,
        num_kv: int,
        places: Any,
        scale: Any,
        cap: Any,
        values: Any,
        per_head: Any,
    ) -> None:
        observing, num_heads = query.shape[0], query.shape[1]
        group = num_heads // num_kv
        count, size = len(places), rows.shape[1]
        logits = np.empty((observing * group, len(firsts) * size), dtype=np.float32)
        weights = np.empty(count, dtype=np.float32)
        bits = np.empty(count, dtype=np.int32)
        for kv in range(num_kv):
            dots(query, rows, firsts, np.uint64(kv) * head_rows, kv * group, group, scale, logits)
            for q in range(observing):
                seen = count - (observing - 1 - q)
                for g in range(group):
                    of_head = logits[q * group + g]
                    for k in range(seen):
                        weights[k] = of_head[places[k]]
                    if cap > 0:
                        for k in range(seen):
                            weights[k] = cap * np.tanh(weights[k] / cap)
                    exponentials(weights, largest(weights, seen), seen, bits)
                    share = np.float32(1) / total(weights, seen)
                    add(values, weights, share, seen)
                    if len(per_head):
                        add(per_head[kv * group + g], weights, share, seen)

    return score_row


def _dots(
    query: Any,
    rows: Any,
    firsts: Any,
    offset: Any,
    head: int,
    group: int,
    scale: Any,
    logits: Any,
) -> None:
    """q K^T of one KV head into `logits`, `[queries * group, blocks * tokens]`. Unsigned indices,
    since the compiled code would look at each signed one whether it is negative; eight components
    at a time, so that sums stay in registers that long."""
    observing, size, dim = query.shape[0], np.uint64(rows.shape[1]), np.uint64(query.shape[2])
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    five, six, seven, eight = np.uint64(5), np.uint64(6), np.uint64(7), np.uint64(8)
    for b in range(len(firsts)):
        start = np.uint64(b) * size
        for q in range(observing):
            for g in range(group):
                own = query[q, head + g]
                out = np.uint64(q * group + g)
                for t in range(size):
                    logits[out, start + t] = np.float32(0)
                for d in range(np.uint64(0), dim, eight):
                    r = firsts[b] + offset + d
                    a0, a1 = scale * own[d], scale * own[d + one]
                    a2, a3 = scale * own[d + two], scale * own[d + three]
                    a4, a5 = scale * own[d + four], scale * own[d + five]
                    a6, a7 = scale * own[d + six], scale * own[d + seven]
                    for t in range(size):
                        logits[out, start + t] += (
                            a0 * rows[r, t]
                            + a1 * rows[r + one, t]
                            + a2 * rows[r + two, t]
                            + a3 * rows[r + three, t]
                            + a4 * rows[r + four, t]
                            + a5 * rows[r + five, t]
                            + a6 * rows[r + six, t]
                            + a7 * rows[r + seven, t]
                        )


_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = (np.float32(x) for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3))
_P3, _P4, _P5 = (np.float32(x) for x in (4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))


def _exponentials(x: Any, top: Any, count: int, bits: Any) -> None:
    """exp(x - top) in place, for x <= top: the polynomial of the Cephes library's `expf`, of which
    a compiler makes vector code; the power of two is put together from its bits."""
    powers = bits.view(np.float32)
    for i in range(count):
        v = max(x[i] - top, np.float32(-87))
        n = np.floor(v * _LOG2E + np.float32(0.5))
        r = v - n * _LN2_HIGH
        r = r - n * _LN2_LOW
        p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
        x[i] = p * r * r + r + np.float32(1)
        bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(count):
        x[i] *= powers[i]


def _largest(x: Any, count: int) -> Any:
    """In eight independent chains, since a single one is not made vector code."""
    a = b = c = d = e = f = g = h = x[0]
    for i in range(0, count - 7, 8):
        a, b, c, d = max(a, x[i]), max(b, x[i + 1]), max(c, x[i + 2]), max(d, x[i + 3])
        e, f, g, h = max(e, x[i + 4]), max(f, x[i + 5]), max(g, x[i + 6]), max(h, x[i + 7])
    for i in range(count - count % 8, count):
        a = max(a, x[i])
    return max(max(max(a, b), max(c, d)), max(max(e, f), max(g, h)))


def _total(x: Any, count: int) -> Any:
    found = np.float32(0)
    for i in range(count):
        found += x[i]
    return found


def _add(values: Any, x: Any, share: Any, count: int) -> None:
    for i in range(count):
        values[i] += x[i] * share
