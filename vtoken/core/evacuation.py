"""Planning for the `background` mode: which blocks to empty, and where their live tokens go.

Pure, like `planner.py`. While the plan is in flight the request goes on at its physical end, so
only blocks before the one with that end are emptied and only holes before it are filled. Of the
n blocks that may be emptied the m with the fewest live tokens are, for the largest m for which

- their live tokens fit the holes of the other writable blocks and of the headroom blocks offered,
- those are at most `max_moves`,
- more blocks are emptied than headroom blocks are drawn.

Blocks that may not be written are emptied only with `copy_out`: their content stays for the others
who refer to them, and this request gives back its reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.core.arrays import BoolArray, IntArray
from vtoken.core.flight import EvacuationPlan
from vtoken.core.request_table import RequestTable


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
    room = np.where(writable[:end], size - live[:end], 0)
    behind = 0
    if tail and writable[end]:
        behind = tail - int(live[end])
    sources = np.flatnonzero((live[:end] > 0) & (writable[:end] | copy_out))
    sources = sources[np.argsort(live[sources], kind="stable")]
    moved = np.cumsum(live[sources])
    holes = int(room.sum()) + behind - np.cumsum(room[sources])
    drawn = np.maximum(0, -(-(moved - holes) // size))
    gain = np.arange(1, len(sources) + 1) - drawn
    allowed = (moved <= max_moves) & (drawn <= len(spare)) & (gain > 0)
    if not allowed.any():
        return None
    gain = np.where(allowed, gain, 0)
    count = int(np.argmax(gain)) + 1  # the first of the best: the fewest moves
    chosen = np.sort(sources[:count]).astype(np.int32)
    draws = int(drawn[count - 1])
    return _moves(table, chosen, writable, drawn=list(spare[:draws]))


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
