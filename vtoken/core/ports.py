"""What the reclamation backend stands on, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vtoken.core.arrays import BoolArray, IntArray


class PoolPort(Protocol):
    """What the backend needs from the block allocator; vLLM's BlockPool stands behind it."""

    def private(self, blocks: IntArray) -> BoolArray:
        """Per block, whether this request alone refers to it; bool, same shape."""

    def uncache(self, blocks: IntArray) -> None:
        """Take these private blocks out of the prefix cache, before they are written."""

    def set_blocks(
        self, req_id: str, keep: Sequence[int], dropped: Sequence[int], joined: Sequence[int] = ()
    ) -> None:
        """Make `keep` the request's block list and return its reference to `dropped`; `joined`
        are the blocks in `keep` that were reserved until now."""

    def reserve(self, count: int) -> list[int]:
        """Take up to `count` blocks out of the pool, uncached, and keep them for the backend."""

    def unreserve(self, blocks: Sequence[int]) -> None:
        """Return reserved blocks to the pool."""


@dataclass
class ReclaimCounters:
    """Exact counts since start.

    Attributes:
        moved: tokens that changed their slot.
        copied: tokens whose copy was ordered; more than moved where a token died, or a plan was
            aborted, while the copy was in flight.
    """

    evicted: int = 0
    recycled: int = 0
    moved: int = 0
    copied: int = 0
    released_blocks: int = 0
    plans: int = 0
    aborted_plans: int = 0
    recomputed_requests: int = 0

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))
