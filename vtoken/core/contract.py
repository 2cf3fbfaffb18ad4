"""What the token table's operations require, checked before anything changes.

`Rejected` is the caller's fault, `InvariantViolation` that of the planner or the reclaimer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vtoken.core.arrays import NO_SLOT, IntArray
from vtoken.errors import InvariantViolation, Rejected

if TYPE_CHECKING:
    from vtoken.core.request_table import RequestTable


def check_evictable(table: RequestTable, token_ids: IntArray) -> None:
    """Each id is a live token other than the newest, named once; there is at least one.

    Raises:
        Rejected
    """
    who = f"request {table.req_id}"
    if token_ids.dtype.kind not in "iu":  # a mask or floats would be read as other ids
        raise Rejected(f"{who}: token ids are integers, not {token_ids.dtype}")
    if len(token_ids) == 1:
        low = high = int(token_ids[0])
    else:
        low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= table.logical_len:
        bad = low if low < 0 else high
        raise Rejected(f"{who}: token {bad} is unknown or not yet computed")
    if high == table.logical_len - 1:
        raise Rejected(f"{who}: token {high} is the newest and stays")
    if len(token_ids) == 1:
        if not table.live[low]:
            raise Rejected(f"{who}: token {low} is dead already")
        return
    live = table.live[token_ids]
    if not live.all():
        raise Rejected(f"{who}: token {int(token_ids[~live][0])} is dead already")
    if len(np.unique(token_ids)) != len(token_ids):
        raise Rejected(f"{who}: a token is named twice in one eviction")


def check_recyclable(table: RequestTable, hole: int) -> None:
    """The position is a hole.

    Raises:
        InvariantViolation: L7
    """
    inside = 0 <= hole < table.physical_len
    owner = table.owner_at(hole) if inside else -1
    if not inside or (owner >= 0 and table.live[owner]):
        known = 0 <= hole < table.num_blocks * table.block_size
        raise InvariantViolation(
            law="L7",
            message="a new token would be written where no hole is",
            req_id=table.req_id,
            token_id=owner,
            slot=table.slot_at(hole) if known else hole,
        )


def check_move(table: RequestTable, token_ids: IntArray, targets: IntArray) -> None:
    """Distinct live tokens move to distinct positions of the block list that hold no live token.

    Raises:
        InvariantViolation: I2
    """

    def broken(message: str, token: int, slot: int) -> InvariantViolation:
        return InvariantViolation(
            law="I2", message=message, req_id=table.req_id, token_id=token, slot=slot
        )

    limit = table.num_blocks * table.block_size
    if int(targets.min()) < 0 or int(targets.max()) >= limit:
        raise broken("a move leaves the block list", int(token_ids[0]), int(targets.max()))
    if len(np.unique(targets)) != len(targets) or len(np.unique(token_ids)) != len(token_ids):
        raise broken("two moves share a token or a target", int(token_ids[0]), NO_SLOT)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= table.logical_len:
        raise broken("a move names an unknown token", int(token_ids.max()), NO_SLOT)
    live = table.live
    if not live[token_ids].all():
        dead = int(token_ids[~live[token_ids]][0])
        raise broken("a dead token would be moved", dead, table.slot_of(dead))
    owner = table.owners_at(targets)
    taken = (owner >= 0) & live[np.maximum(owner, 0)]
    if taken.any():
        first = int(np.flatnonzero(taken)[0])
        slot = table.slot_at(int(targets[first]))
        raise broken("a move lands on a live token", int(owner[first]), slot)
