"""A small honest block pool: vLLM's BlockPool and manager, reduced to what reclamation touches.

Free list with an order, reference counts, prefix-cache keys, exhaustion. It holds no opinion of
its own: an operation that a real pool could not do (freeing a free block, writing the null block
into a list) raises `PoolFault` at once, so that a fault of the code under test is not absorbed.

A test may have chosen allocations fail although blocks are free, see `FakePool.fail_at`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

Key = tuple[Hashable, ...]


class PoolFault(AssertionError):
    """The pool was asked for something that no allocator can do."""


class FakePool:
    """Implements `vtoken.core.PoolPort` and `vtoken_spec.PoolView`.

    Args:
        num_blocks: blocks in the pool, the null block 0 included.
        block_size: slots per block.

    Attributes:
        allocations: how often blocks were asked for so far, whether or not they were given.
        fail_at: which of those, counted from 1, are answered with False although blocks are free.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lists: dict[str, list[int]] = {}
        self.allocations = 0
        self.fail_at: Collection[int] = ()
        self._free: deque[int] = deque(range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._keys: dict[int, Key] = {}
        self._reserved: dict[int, None] = {}
        #: blocks of `reserve` that plans in flight draw
        self.held_by: Callable[[], Collection[int]] = tuple

    # ------------------------------------------------------------------ PoolView

    @property
    def free(self) -> list[int]:
        return list(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def headroom(self) -> list[int]:
        held = set(self.held_by())
        return [block for block in self._reserved if block not in held]

    @property
    def held(self) -> list[int]:
        held = set(self.held_by())
        return [block for block in self._reserved if block in held]

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        return block in self._keys

    # ------------------------------------------------------------------ PoolPort

    def private(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        return np.array([self._refs[block] == 1 for block in blocks.tolist()], dtype=np.bool_)

    def uncache(self, blocks: npt.NDArray[np.int32]) -> None:
        for block in blocks.tolist():
            if self._refs[block] > 1:
                raise PoolFault(f"block {block} is shared and would leave the prefix cache")
            self._keys.pop(block, None)

    def set_blocks(
        self, req_id: str, keep: Sequence[int], dropped: Sequence[int], joined: Sequence[int] = ()
    ) -> None:
        if sorted([*keep, *dropped]) != sorted([*self.lists[req_id], *joined]):
            raise PoolFault(f"{req_id}: {keep} and {dropped} are not {self.lists[req_id]}")
        for block in joined:
            if block not in self._reserved or self._refs[block] != 0:
                raise PoolFault(f"{req_id}: block {block} joins, but was not reserved")
            del self._reserved[block]
            self._refs[block] = 1
        self.lists[req_id] = list(keep)
        self.give_back(reversed(dropped))

    def reserve(self, count: int) -> list[int]:
        blocks = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        for block in blocks:
            self._keys.pop(block, None)
            self._reserved[block] = None
        return blocks

    def unreserve(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block not in self._reserved:
                raise PoolFault(f"block {block} is unreserved, but was not reserved")
            del self._reserved[block]
            self._free.appendleft(block)

    # ------------------------------------------------------------------ the engine's side

    def extend(self, req_id: str, total: int) -> bool:
        """Grow a request's list to `total` blocks; False (and no change) when too few are free."""
        missing = total - len(self.lists.get(req_id, ()))
        if not self._grants(missing):
            return False
        self.lists.setdefault(req_id, []).extend(self._take() for _ in range(missing))
        return True

    def adopt(self, req_id: str, hits: Sequence[int], total: int) -> bool:
        """Admit a request with `hits` from the prefix cache and fresh blocks up to `total`."""
        missing = total - len(hits)
        pinned = [block for block in hits if self._refs[block] == 0]
        if not self._grants(missing + len(pinned)):
            return False
        # Pinned first: what is taken next must not be one of them.
        for block in pinned:
            self._free.remove(block)
        for block in hits:
            self._refs[block] += 1
        self.lists[req_id] = [*hits, *(self._take() for _ in range(missing))]
        return True

    def release(self, req_id: str) -> None:
        """Finish, abort or preemption: every reference of the request goes."""
        self.give_back(reversed(self.lists.pop(req_id)))

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not 0 < block < self.num_blocks or self._refs[block] == 0:
                raise PoolFault(f"block {block} is freed, but has no reference")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                # Cached blocks go to the far end, so that they stay hit-able longest.
                (self._free.append if block in self._keys else self._free.appendleft)(block)

    def cache(self, block: int, key: Key) -> None:
        self._keys.setdefault(block, key)

    def key(self, block: int) -> Key | None:
        return self._keys.get(block)

    def lookup(self, keys: Sequence[Key]) -> list[int]:
        """Blocks of the longest cached prefix of `keys`."""
        known = {key: block for block, key in sorted(self._keys.items(), reverse=True)}
        hits = []
        for key in keys:
            if key not in known:
                break
            hits.append(known[key])
        return hits

    def _grants(self, count: int) -> bool:
        """Whether `count` blocks can be had; to ask for any is an allocation."""
        if count <= 0:
            return True
        self.allocations += 1
        return self.allocations not in self.fail_at and count <= len(self._free)

    def _take(self) -> int:
        block = self._free.popleft()
        if self._refs[block] != 0:
            raise PoolFault(
                f"block {block} is in the free list with {self._refs[block]} references"
            )
        self._keys.pop(block, None)
        self._refs[block] = 1
        return block
