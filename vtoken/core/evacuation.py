"""Planning for the `background` mode: which blocks to empty, and where their live tokens go.

Pure, like `planner.py`. While the plan is in flight the request goes on at its physical end, so
only blocks before the one with that end are emptied and only holes before it are filled, those of
writable blocks that stay and those of the headroom blocks that are drawn.

Blocks that may not be written are emptied only with `copy_out`: their content stays for the others
who refer to them, and this request gives back its reference. Such a block asks for as many slots
elsewhere as it has live tokens, a writable one for all its slots, since its holes go with it. So
the two kinds are not compared with each other: of each kind the emptiest are emptied, and of all
ways to combine them, within the bounds, the one that gains the most blocks is taken, and of those
the one with the fewest moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.core.arrays import BoolArray, IntArray
from vtoken.core.flight import EvacuationPlan
from vtoken.core.request_table import RequestTable

_MOST_MOVES = 1 << 32  # one block more is worth any number of moves
MOST_DRAWN = 32
"""Headroom blocks that one plan draws at most; each is a round of the search."""


def plan_evacuation(
    table: RequestTable,
    writable: BoolArray,
    *,
    max_moves: int,
    spare: Sequence[int] = (),
    copy_out: bool = False,
) -> EvacuationPlan | None:
    """The plan that empties the most blocks within the bounds, with the fewest moves for them.

    Args:
        writable: per owned block, whether it may be written (private); bool `[num_blocks]`.
        max_moves: most tokens to move.
        spare: headroom blocks that may be drawn.
        copy_out: whether blocks that may not be written can be emptied.

    Returns:
        None when no block would be gained, or nothing has to be copied for it.
    """
    size = table.block_size
    end, tail = divmod(table.physical_len, size)
    live = table.block_live
    room = int(np.where(writable[:end], size - live[:end], 0).sum())
    if tail and writable[end]:
        room += tail - int(live[end])
    own, own_moves = _emptiest(live, (live[:end] > 0) & writable[:end])
    others, other_moves = _emptiest(live, (live[:end] > 0) & ~writable[:end] & copy_out)
    counts = np.arange(len(own_moves))
    best, chosen, draws = 0, own, 0
    for drawn in range(min(len(spare), MOST_DRAWN) + 1):
        # With each number of writable blocks go as many others as the rest of the room holds.
        limit = np.minimum(room + (drawn - counts) * size, max_moves - own_moves)
        beside = np.searchsorted(other_moves, limit, side="right") - 1
        gain = np.where(limit < 0, 0, counts + beside - drawn)
        score = gain * _MOST_MOVES - own_moves - other_moves[beside]
        index = int(np.argmax(score))
        if score[index] > best:
            best, draws = int(score[index]), drawn
            chosen = np.concatenate([own[:index], others[: beside[index]]])
    if best == 0:
        return None
    return _moves(table, np.sort(chosen), writable, drawn=list(spare[:draws]))


def _emptiest(live: IntArray, which: BoolArray) -> tuple[IntArray, IntArray]:
    """Indices of the blocks in question, those with the fewest live tokens first, and how many
    tokens have to move for none, one, two, ... of them."""
    index = np.flatnonzero(which).astype(np.int32)
    index = index[np.argsort(live[index], kind="stable")]
    return index, np.concatenate([[0], np.cumsum(live[index])])


def _moves(
    table: RequestTable, chosen: IntArray, writable: BoolArray, *, drawn: list[int]
) -> EvacuationPlan:
    size = table.block_size
    offsets = np.arange(size, dtype=np.int32)
    base = (chosen * np.int32(size))[:, None] + offsets
    leaving = base[table.live_mask(chosen)]
    others = np.setdiff1d(np.flatnonzero(writable), chosen).astype(np.int32)
    # The fullest first: what is left over stays together in the emptiest, for the next plan.
    others = others[np.argsort(-table.block_live[others], kind="stable")]
    positions = (others * np.int32(size))[:, None] + offsets
    free = ~table.live_mask(others) & (positions < table.physical_len)
    targets = table.slots_at(positions[free])
    spare = (np.array(drawn, dtype=np.int32) * np.int32(size))[:, None] + offsets
    targets = np.concatenate([targets, spare.reshape(-1)])[: len(leaving)]
    owned = np.setdiff1d(targets // size, np.array(drawn, dtype=np.int64))
    return EvacuationPlan(
        version=table.version,
        token_ids=table.owners_at(leaving),
        sources=table.slots_at(leaving),
        targets=targets.astype(np.int32),
        released=table.blocks[chosen].tolist(),
        drawn=drawn,
        written=owned.tolist(),
    )
