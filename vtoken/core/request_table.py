"""One request's token table, to be changed; what can be read of it is in `token_places.py`.

Memory per token: 4 bytes position + 1 byte liveness + 4 bytes owner (position -> token id), in
arrays grown by an eighth, plus 12 bytes per block; independent of layers and heads.
`RequestTable.nbytes` gives the exact figure and a test bounds it at 16 bytes per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.core.arrays import FREE, NO_SLOT, IntArray, grown
from vtoken.core.contract import check_evictable, check_move, check_recyclable
from vtoken.core.token_places import RECENT_HOLES, TokenPlaces
from vtoken.errors import InvariantViolation, Rejected


class RequestTable(TokenPlaces):
    """The operations that change where a request's tokens are, and which of them are live: each
    is all or nothing."""

    __slots__ = ()

    def append(
        self, new_blocks: Sequence[int], total_len: int, *, hole: int | None = None
    ) -> IntArray:
        """Register tokens `logical_len .. total_len - 1`; returns their positions, int32 `[n]`.

        They are placed at the physical end, or, for a single token, in `hole` (slot recycling).

        Raises:
            Rejected: `total_len` is not larger, the blocks do not hold it, a block is owned
                already, or `hole` is given for more than one token.
            InvariantViolation: `hole` holds a live token (L7).
        """
        count = total_len - self.logical_len
        if count <= 0:
            raise Rejected(
                f"request {self.req_id}: total_len {total_len} does not extend {self.logical_len}"
            )
        size = self.block_size
        end = self.physical_len if hole is not None else self.physical_len + count
        capacity = (self._num_blocks + len(new_blocks)) * size
        if end > capacity:
            raise Rejected(
                f"request {self.req_id}: {end} positions do not fit {capacity // size} blocks"
            )
        if hole is not None and count != 1:
            raise Rejected(f"request {self.req_id}: a hole takes one token, not {count}")
        if hole is not None:
            check_recyclable(self, hole)
        if len(new_blocks):
            self._append_blocks(new_blocks)
        self._fit_tokens(total_len)
        self._fit_owner(end)
        first = self.logical_len
        if hole is not None:
            self._drop_owner(hole)
            positions = np.array([hole], dtype=np.int32)
            self.version += 1
        else:
            positions = np.arange(self.physical_len, end, dtype=np.int32)
        if count == 1:  # the decode step; scalar writes are several times cheaper than slices
            position = int(positions[0])
            self.num_empty -= int(self._block_live[position // size] == 0)
            self._position[first] = position
            self._owner[position] = first
            self._live[first] = True
            self._block_live[position // size] += 1
            logical_block = first // size
            if self._logical_live[logical_block] == 0:
                self.naive_blocks += 1
            self._logical_live[logical_block] += 1
        else:
            self._position[first:total_len] = positions
            self._owner[positions] = np.arange(first, total_len, dtype=np.int32)
            self._live[first:total_len] = True
            index, counts = np.unique(positions // size, return_counts=True)
            self.num_empty -= int(np.count_nonzero(self._block_live[index] == 0))
            self._block_live[index] += counts.astype(np.int32)
            logical = np.arange(first, total_len) // size
            index, counts = np.unique(logical, return_counts=True)
            self.naive_blocks += int(np.count_nonzero(self._logical_live[index] == 0))
            self._logical_live[index] += counts.astype(np.int32)
        self.logical_len = total_len
        self.physical_len = end
        self.num_live += count
        return positions

    def join(self, new_blocks: Sequence[int]) -> None:
        """Blocks join the end of the list; nothing lies in them yet.

        Raises:
            Rejected: a block is owned already. Nothing changes then.
        """
        if len(new_blocks):
            self._append_blocks(new_blocks)

    def evict(self, token_ids: IntArray) -> None:
        """Mark tokens dead: metadata only, nothing moves and nothing is freed.

        Raises:
            Rejected: an id is unknown, dead already, given twice, or the request's newest token.
                Nothing changes then.
        """
        count = len(token_ids)
        if count == 0:
            return
        check_evictable(self, token_ids)
        size = self.block_size
        if count == 1:
            token_id = int(token_ids[0])
            position = int(self._position[token_id])
            self._live[token_id] = False
            self._block_live[position // size] -= 1
            self.num_empty += int(self._block_live[position // size] == 0)
            logical = token_id // size
            self._logical_live[logical] -= 1
            if self._logical_live[logical] == 0:
                self.naive_blocks -= 1
            self._recent_holes.append(position)
        else:
            positions = self._position[token_ids]
            self._live[token_ids] = False
            index, counts = np.unique(positions // size, return_counts=True)
            self._block_live[index] -= counts.astype(np.int32)
            self.num_empty += int(np.count_nonzero(self._block_live[index] == 0))
            index, counts = np.unique(token_ids // size, return_counts=True)
            self._logical_live[index] -= counts.astype(np.int32)
            self.naive_blocks -= int(np.count_nonzero(self._logical_live[index] == 0))
            self._recent_holes.extend(positions[-RECENT_HOLES:].tolist())
        if len(self._recent_holes) > RECENT_HOLES:
            del self._recent_holes[:-RECENT_HOLES]
        self.num_live -= count
        self.evicted = True

    def move(self, token_ids: IntArray, targets: IntArray) -> None:
        """Give live tokens new positions, all or nothing; sources become free positions.

        Args:
            token_ids: distinct live ids, int32 `[n]`.
            targets: distinct positions without a live token that stays, int32 `[n]`; may lie
                beyond `physical_len` but within the block list.

        Raises:
            InvariantViolation: I2 would break. Nothing changes then.
        """
        if len(token_ids) == 0:
            return
        size = self.block_size
        self._fit_owner(self._num_blocks * size)
        check_move(self, token_ids, targets)
        sources = self._position[token_ids].copy()
        replaced = self._owner[targets]
        self._position[replaced[replaced >= 0]] = NO_SLOT
        self._owner[sources] = FREE
        self._owner[targets] = token_ids
        self._position[token_ids] = targets
        np.subtract.at(self._block_live, sources // size, 1)
        np.add.at(self._block_live, targets // size, 1)
        self.num_empty = int(np.count_nonzero(self.block_live == 0))
        self.physical_len = max(self.physical_len, int(targets.max()) + 1)
        self._recent_holes.clear()
        self.version += 1

    def set_layout(self, keep: IntArray, physical_len: int) -> list[int]:
        """Reduce the block list to the blocks at indices `keep`, in that order.

        Tokens in dropped blocks or at or beyond `physical_len` (new order) must be dead; they
        become reclaimed. Returns the dropped block ids.

        Raises:
            InvariantViolation: a live token would lose its slot (I1), or `keep` names a block
                twice or one that is not there (I2). Nothing changes then.
        """
        size = self.block_size
        total = self._num_blocks
        dropped_index = np.setdiff1d(np.arange(total, dtype=np.int32), keep)
        if len(dropped_index) + len(keep) != total or not 0 <= physical_len <= len(keep) * size:
            raise InvariantViolation(
                law="I2",
                message=f"a layout of {len(keep)} blocks and {physical_len} positions does not "
                f"come from a list of {total} blocks",
                req_id=self.req_id,
            )
        self._fit_owner(total * size)
        grid = self._owner[: total * size].reshape(total, size)
        owner = grid[keep].reshape(-1)
        lost = [owner[physical_len:]]
        lost.append(grid[dropped_index].reshape(-1))
        gone = np.concatenate(lost)
        gone = gone[gone >= 0]
        if len(gone) and self._live[gone].any():
            token = int(gone[self._live[gone]][0])
            raise InvariantViolation(
                law="I1",
                message="a live token would lose its slot in a release",
                req_id=self.req_id,
                token_id=token,
                slot=self.slot_of(token),
            )
        dropped = [int(b) for b in self._block_ids[dropped_index]]
        self._position[gone] = NO_SLOT
        owner[physical_len:] = FREE
        self._block_ids[: len(keep)] = self._block_ids[keep]
        self._block_live[: len(keep)] = self._block_live[keep]
        self._num_blocks = len(keep)
        self.num_empty = int(np.count_nonzero(self.block_live == 0))
        self._owner[: len(owner)] = owner
        self._owner[len(owner) :] = FREE
        held = np.flatnonzero(owner >= 0)
        self._position[owner[held]] = held
        self.physical_len = physical_len
        self._recent_holes.clear()
        self.version += 1
        return dropped

    # ------------------------------------------------------------------ inside

    def _append_blocks(self, new_blocks: Sequence[int]) -> None:
        need = self._num_blocks + len(new_blocks)
        fresh = np.asarray(new_blocks, dtype=np.int32)
        if len(fresh) and fresh.min() <= 0:
            raise Rejected(f"request {self.req_id}: block {int(fresh.min())} cannot be owned")
        if len(np.intersect1d(fresh, self.blocks)) or len(np.unique(fresh)) != len(fresh):
            raise Rejected(f"request {self.req_id}: block list would hold a block twice")
        if need > len(self._block_ids):
            self._block_ids = grown(self._block_ids, need, 0)[: need + 4].copy()  # type: ignore[assignment]
            self._block_live = grown(self._block_live, need, 0)[: need + 4].copy()  # type: ignore[assignment]
        self._block_ids[self._num_blocks : need] = fresh
        self._block_live[self._num_blocks : need] = 0
        self.num_empty += len(new_blocks)
        self._num_blocks = need

    def _fit_tokens(self, total_len: int) -> None:
        if total_len > len(self._position):
            self._position = grown(self._position, total_len, NO_SLOT)  # type: ignore[assignment]
            self._live = grown(self._live, total_len, 0)  # type: ignore[assignment]
        logical_blocks = -(-total_len // self.block_size)
        if logical_blocks > len(self._logical_live):
            bigger = grown(self._logical_live, logical_blocks, 0)
            self._logical_live = bigger[: logical_blocks + (logical_blocks >> 3) + 4].copy()  # type: ignore[assignment]

    def _drop_owner(self, position: int) -> None:
        owner = int(self._owner[position])
        if owner >= 0:
            self._position[owner] = NO_SLOT
