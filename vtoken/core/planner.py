"""Relocation planning: which live tokens move where, so that which blocks come back.

Pure: reads one request's table and the block usage index, returns a plan, changes nothing.
The plan of the `eager` mode makes the view dense. With R live tokens in the blocks that may be
written, block size B, and r = 1 if the next token will recycle a hole (else 0):

- D = R + r positions stay, in K = ceil(D / B) blocks;
- the partial block is chosen so that the fewest moves remain, and the fullest of the others
  are kept: R minus the live tokens in the K fullest, plus less than one block;
- the partial block goes to the end of the block list, every hole before it is filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.arrays import BoolArray, IntArray
from vtoken.core.request_table import RequestTable

_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class DensePlan:
    """A relocation plan for one request, made against `version` of its table.

    Attributes:
        version: table version the plan was made from (I4).
        token_ids: tokens that move, int32 `[n]`.
        targets: their new positions in the *old* block list, int32 `[n]`.
        keep: indices of the blocks that stay, in their new order, int32 `[k]`.
        physical_len: positions in use after the plan, the hole to recycle included; the last
            one is live.
        hole: old position of the hole left for the next token, or -1 (it is appended then).
        written: indices of kept blocks that the plan or later appends write, int32; the ones
            that the prefix cache knows have to leave it first (L8).
    """

    version: int
    token_ids: IntArray
    targets: IntArray
    keep: IntArray
    physical_len: int
    hole: int
    written: IntArray


def releasable_blocks(table: RequestTable) -> IntArray:
    """Indices of owned blocks without a live token, ascending: they come back without a copy."""
    return np.flatnonzero(table.block_live == 0).astype(np.int32)


def plan_release(table: RequestTable) -> tuple[IntArray, int] | None:
    """Whole-block release alone: `(keep, physical_len)`, or None if no block is wholly dead."""
    if table.num_empty == 0:
        return None
    empty = releasable_blocks(table)
    size = table.block_size
    starts = np.arange(table.num_blocks) * size
    used = np.clip(table.physical_len - starts, 0, size)
    keep = np.setdiff1d(np.arange(table.num_blocks, dtype=np.int32), empty)
    return keep, int(used[keep].sum())


def plan_dense(table: RequestTable, writable: BoolArray, *, recycle: bool) -> DensePlan | None:
    """Plan that leaves no hole in writable blocks but the one to recycle.

    Args:
        table: the request.
        writable: per owned block, whether it may be written (private); bool `[num_blocks]`.
            The other blocks stay as they are unless wholly dead, and come first.
        recycle: whether the next step adds exactly one token, which then takes a hole.

    Returns:
        None when the table already has that form and nothing is to be freed.
    """
    if table.num_holes == 0:
        return None
    size = table.block_size
    live = table.block_live
    alive = live > 0
    frozen = np.flatnonzero(alive & ~writable).astype(np.int32)
    usable = np.flatnonzero(alive & writable).astype(np.int32)
    num_live = int(live[usable].sum())
    # Holes in frozen blocks cannot be filled; every other hole in use can.
    fillable = table.num_holes - (len(frozen) * size - int(live[frozen].sum()))
    # Where all usable blocks are full, holes lie in dead blocks alone, and those are released.
    hole_wanted = recycle and fillable > 0 and num_live < len(usable) * size
    filled = num_live + int(hole_wanted)
    if fillable == int(hole_wanted) and len(frozen) + len(usable) == table.num_blocks:
        # Dense but for the hole to recycle, and no block to release: the steady state.
        if not hole_wanted:
            return None
        hole = table.recent_hole()
        if not writable[hole // size]:  # a frozen block's hole: look for the private one
            holes = table.hole_positions()
            hole = int(holes[writable[holes // size]][0])
        index = np.array([hole // size], dtype=np.int32)
        keep = np.arange(table.num_blocks, dtype=np.int32)
        end = table.physical_len
        if hole == end - 1:  # nothing lies behind it: give the end back and append there
            return DensePlan(table.version, _NONE, _NONE, keep, end - 1, -1, index)
        return DensePlan(table.version, _NONE, _NONE, keep, end, hole, index)
    num_kept = -(-filled // size)
    if num_kept == 0:
        return DensePlan(table.version, _NONE, _NONE, frozen, len(frozen) * size, -1, _NONE)
    fill = filled - (num_kept - 1) * size
    last = _partial_block(table, usable, num_kept, fill)
    others = usable[usable != last]
    fullest = np.argsort(-live[others], kind="stable")
    front, spilled = np.sort(others[fullest[: num_kept - 1]]), others[fullest[num_kept - 1 :]]
    kept = np.append(front, last).astype(np.int32)

    mask = table.live_mask(kept)
    beyond = np.zeros_like(mask)
    beyond[-1, fill:] = True
    base = (kept * np.int32(size))[:, None] + np.arange(size, dtype=np.int32)
    targets = base[~mask & ~beyond]
    sources = base[mask & beyond]
    if len(spilled):
        spill_base = (spilled * np.int32(size))[:, None] + np.arange(size, dtype=np.int32)
        sources = np.concatenate([spill_base[table.live_mask(spilled)], sources])
    hole = -1
    if hole_wanted:
        hole = int(targets[-1])
        targets = targets[:-1]
    written = np.unique(np.append(targets, hole if hole >= 0 else targets[:0]) // size)
    if fill < size:
        written = np.union1d(written, [last])
    if hole == int(base[-1, fill - 1]):  # the next token comes to the physical end: an append
        hole, filled = -1, filled - 1
    return DensePlan(
        version=table.version,
        token_ids=table.owners_at(sources),
        targets=targets.astype(np.int32),
        keep=np.concatenate([frozen, kept]),
        physical_len=len(frozen) * size + filled,
        hole=hole,
        written=written.astype(np.int32),
    )


def _partial_block(table: RequestTable, usable: IntArray, num_kept: int, fill: int) -> int:
    """Which usable block holds the last `fill` positions, so that the fewest tokens move.

    A token stays if it lies in one of the other kept blocks, the fullest, or at an offset below
    `fill` of this one. Taking block b therefore costs its own place among the `num_kept` fullest,
    or that of the least full of those, and gains b's live tokens below `fill`.
    """
    live = table.block_live[usable]
    if fill == table.block_size:
        return int(usable[np.argsort(-live, kind="stable")[:num_kept]].max())
    least = np.sort(live)[-num_kept]
    stay = table.live_mask(usable)[:, :fill].sum(axis=1) - np.maximum(live, least)
    # Ties go to the later block, which is the one being appended to already.
    return int(usable[np.flatnonzero(stay == stay.max())[-1]])
