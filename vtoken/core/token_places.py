"""Where one request's tokens are, to be read: logical token id -> (block, offset) and liveness.

Inside a request, places are kept as *positions*, which count slots along the block list:
position p is offset `p % block_size` of block `blocks[p // block_size]`. A position is what a
dense view and the block usage index need, and a change of the block list (release, reorder) is
one vector operation instead of one per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.core.arrays import FREE, NO_SLOT, BoolArray, IntArray, TableSnapshot, grown
from vtoken.errors import Rejected

RECENT_HOLES = 16
SCANNED_HOLES = 256


class TokenPlaces:
    """Where one request's tokens are, and which of them are live; `RequestTable` changes it.

    Implements `vtoken_spec.view.RequestView`, so the laws read it directly.

    Attributes:
        logical_len: number of tokens ever registered; the next id.
        physical_len: positions [0, physical_len) are in use: live tokens and holes.
        num_live: live tokens.
        num_empty: owned blocks without a live token.
        version: bumped by every change to where known tokens lie (moves, release, reorder, a
            recycled hole), but not by appends and evictions.
        evicted: whether any token of this request was ever evicted; prefix caching ends there.
        life: number of this table among all that `TokenTable` opened: a preempted request comes
            back under its old id with another one.
    """

    __slots__ = (
        "_block_ids",
        "_block_live",
        "_live",
        "_logical_live",
        "_num_blocks",
        "_owner",
        "_position",
        "_recent_holes",
        "block_size",
        "evicted",
        "life",
        "logical_len",
        "naive_blocks",
        "num_empty",
        "num_live",
        "physical_len",
        "req_id",
        "version",
    )

    def __init__(self, req_id: str, block_size: int) -> None:
        self.req_id = req_id
        self.block_size = block_size
        self.logical_len = 0
        self.physical_len = 0
        self.num_live = 0
        self.num_empty = 0
        self.version = 0
        self.evicted = False
        self.life = 0
        self.naive_blocks = 0
        self._num_blocks = 0
        self._position: IntArray = np.empty(0, dtype=np.int32)
        self._live: BoolArray = np.empty(0, dtype=np.bool_)
        self._owner: IntArray = np.empty(0, dtype=np.int32)
        self._block_ids: IntArray = np.empty(0, dtype=np.int32)
        self._block_live: IntArray = np.empty(0, dtype=np.int32)
        # Live tokens per *logical* block: what a cache that never moves anything would hold.
        self._logical_live: IntArray = np.empty(0, dtype=np.int32)
        self._recent_holes: list[int] = []

    @property
    def blocks(self) -> IntArray:
        """Owned block ids in physical order, int32 `[num_blocks]` (a view; do not write)."""
        return self._block_ids[: self._num_blocks]

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def live(self) -> BoolArray:
        """Liveness per logical id, bool `[logical_len]` (a view; do not write)."""
        return self._live[: self.logical_len]

    @property
    def positions(self) -> IntArray:
        """Position per logical id, `NO_SLOT` once reclaimed; int32 `[logical_len]`."""
        return self._position[: self.logical_len]

    @property
    def block_live(self) -> IntArray:
        """The block usage index: live tokens per owned block, int32 `[num_blocks]`."""
        return self._block_live[: self._num_blocks]

    @property
    def slots(self) -> IntArray:
        """Slot per logical id, `NO_SLOT` once reclaimed; int32 `[logical_len]` (a copy)."""
        position = self.positions
        slots = self.slots_at(np.maximum(position, 0)) if len(position) else position.copy()
        slots[position < 0] = NO_SLOT
        return slots

    @property
    def num_holes(self) -> int:
        return self.physical_len - self.num_live

    @property
    def reclaimed(self) -> int:
        """`logical_len - physical_len`: how far physical positions lag behind logical ones."""
        return self.logical_len - self.physical_len

    @property
    def nbytes(self) -> int:
        """Bytes held by this table's arrays."""
        arrays = (
            self._position,
            self._live,
            self._owner,
            self._block_ids,
            self._block_live,
            self._logical_live,
        )
        return sum(array.nbytes for array in arrays)

    def slots_at(self, positions: IntArray) -> IntArray:
        """Slots of `positions` (each below `num_blocks * block_size`), int32."""
        index, offset = np.divmod(positions, np.int32(self.block_size))
        slots: IntArray = self._block_ids[index] * np.int32(self.block_size) + offset
        return slots

    def slot_at(self, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        return int(self._block_ids[index]) * self.block_size + offset

    def slot_of(self, token_id: int) -> int:
        """Slot of a token that is live or a hole, `NO_SLOT` once reclaimed.

        Raises:
            Rejected: the id was never registered.
        """
        if not 0 <= token_id < self.logical_len:
            raise Rejected(f"request {self.req_id}: token {token_id} is unknown")
        position = int(self._position[token_id])
        return NO_SLOT if position < 0 else self.slot_at(position)

    def live_slots(self) -> IntArray:
        """Slots of the live tokens in logical order, int32 `[num_live]`: the exact read set."""
        return self.slots_at(self.positions[self.live])

    def snapshot(self) -> TableSnapshot:
        """What the laws see of this table, frozen."""
        return TableSnapshot(
            self.req_id,
            self.logical_len,
            self.physical_len,
            self.blocks.copy(),
            self.slots,
            self.live.copy(),
            self.life,
        )

    def position_of_slot(self, slot: int) -> int:
        """Position of `slot` in this request's block list, or -1 if the block is not owned."""
        block, offset = divmod(slot, self.block_size)
        last = self._num_blocks - 1
        if last >= 0 and self._block_ids[last] == block:  # where tokens are appended
            return last * self.block_size + offset
        index = np.flatnonzero(self.blocks == block)
        return -1 if len(index) == 0 else int(index[0]) * self.block_size + offset

    def positions_of(self, slots: IntArray) -> IntArray:
        """`position_of_slot` of many slots, int32; -1 where the block is not owned."""
        block, offset = np.divmod(slots, np.int32(self.block_size))
        order = np.argsort(self.blocks, kind="stable")
        found = np.searchsorted(self.blocks[order], block)
        index = order[np.minimum(found, self._num_blocks - 1)]
        positions: IntArray = (index * self.block_size + offset).astype(np.int32)
        positions[self.blocks[index] != block] = FREE
        return positions

    def owner_at(self, position: int) -> int:
        """Id of the token whose entry sits at `position`, live or dead; -1 if none."""
        return int(self._owner[position]) if position < len(self._owner) else FREE

    def owners_at(self, positions: IntArray) -> IntArray:
        """`owner_at` of many positions within the block list, int32."""
        self._fit_owner(self._num_blocks * self.block_size)
        return self._owner[positions]

    def live_mask(self, index: IntArray) -> BoolArray:
        """Which slots of the blocks at list indices `index` are live, bool `[n, block_size]`."""
        size = self.block_size
        self._fit_owner(self._num_blocks * size)
        owner = self._owner[: self._num_blocks * size].reshape(-1, size)[index]
        mask: BoolArray = (owner >= 0) & self._live[np.maximum(owner, 0)]
        return mask

    def hole_positions(self) -> IntArray:
        """Positions in [0, physical_len) without a live token, ascending, int32."""
        owner = self._owner[: self.physical_len]
        dead = (owner < 0) | ~self._live[np.maximum(owner, 0)]
        return np.flatnonzero(dead).astype(np.int32)

    def recent_hole(self) -> int:
        """A hole made lately, or any hole, as a position; -1 if there is none.

        Steady state asks for the hole it made in the same step, so that one is found without a
        scan.
        """
        while self._recent_holes:
            position = self._recent_holes.pop()
            if position < self.physical_len:
                owner = int(self._owner[position])
                if owner < 0 or not self._live[owner]:
                    return position
        if self.num_holes == 0:
            return -1
        # A scan, for the sake of many calls to come.
        self._recent_holes = self.hole_positions()[:SCANNED_HOLES].tolist()
        return self._recent_holes.pop()

    def next_slots(
        self, new_blocks: Sequence[int], total_len: int, *, hole: int | None = None
    ) -> IntArray:
        """Slots that `append` with the same arguments would give, int32 `[n]`; for checks."""
        if hole is not None:
            return np.array([self.slot_at(hole)], dtype=np.int32)
        size, first = self.block_size, self.physical_len
        count = total_len - self.logical_len
        if count == 1 and first < self._num_blocks * size:
            return np.array([self.slot_at(first)], dtype=np.int32)
        positions = np.arange(first, first + count, dtype=np.int32)
        blocks = np.concatenate([self.blocks, np.asarray(new_blocks, dtype=np.int32)])
        slots: IntArray = blocks[positions // size] * np.int32(size) + positions % size
        return slots

    def _fit_owner(self, end: int) -> None:
        if end > len(self._owner):
            self._owner = grown(self._owner, end, FREE)  # type: ignore[assignment]
