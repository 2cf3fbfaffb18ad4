"""The state of the reference model: immutable and hashable, and a `StateView` for the laws.

On top of the tables the model keeps a memory: for each slot, the name of the payload that lies
there. A payload is named by who wrote it, `(request, logical id)`. That is enough while request
ids are not reused for another prompt: a request that was preempted and comes back writes the
same content under the same names. Slots of blocks that nobody can reach any more are forgotten,
so that a stale read shows as None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from .view import NO_SLOT


class Payload(NamedTuple):
    """The name of one token's K and V in all layers."""

    writer: str
    token_id: int


Memory = tuple[Payload | None, ...]
"""Per slot, what lies there; None where nothing reachable does."""


@dataclass(frozen=True, slots=True)
class RequestState:
    """The token table of one request (see `RequestView`). `version` counts the changes to where
    known tokens lie: moves, releases and recycled holes, but not appends and evictions."""

    req_id: str
    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    live: tuple[bool, ...] = ()
    physical_len: int = 0
    version: int = 0

    @property
    def logical_len(self) -> int:
        return len(self.slots)

    def live_slots(self) -> frozenset[int]:
        return frozenset(s for s, alive in zip(self.slots, self.live, strict=True) if alive)

    def places(self, *, block_size: int) -> tuple[int, ...]:
        """Every owned slot, in physical order; its index is its position."""
        return tuple(b * block_size + offset for b in self.blocks for offset in range(block_size))

    def reclaimed(self, lost: Iterable[int]) -> RequestState:
        """The table after the tokens in the slots `lost`, all of them dead, have given them up."""
        gone = set(lost)
        return replace(self, slots=tuple(NO_SLOT if s in gone else s for s in self.slots))


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool of blocks (see `PoolView`). `refs` holds one count per block."""

    num_blocks: int
    block_size: int
    free: frozenset[int]
    headroom: frozenset[int]
    held: frozenset[int]
    cached: frozenset[int]
    refs: tuple[int, ...]

    def ref_count(self, block: int) -> int:
        return self.refs[block]

    def is_cached(self, block: int) -> bool:
        return block in self.cached

    def taken(self, blocks: Iterable[int]) -> PoolState:
        """One more reference to each of `blocks`, which leave the free set and the headroom."""
        mine = frozenset(blocks)
        refs = tuple(count + (block in mine) for block, count in enumerate(self.refs))
        return replace(self, refs=refs, free=self.free - mine, headroom=self.headroom - mine)

    def given_back(self, blocks: Iterable[int]) -> PoolState:
        """One reference fewer to each of `blocks`; without references a block is free."""
        mine = frozenset(blocks)
        refs = tuple(count - (block in mine) for block, count in enumerate(self.refs))
        return replace(self, refs=refs, free=self.free.union(b for b in mine if refs[b] == 0))


@dataclass(frozen=True, slots=True)
class State:
    """The whole model. `tables` are sorted by request id."""

    pool: PoolState
    tables: tuple[RequestState, ...]
    memory: Memory

    @staticmethod
    def initial(*, num_blocks: int, block_size: int, headroom: Iterable[int] = ()) -> State:
        """An empty pool of `num_blocks` blocks, the null block included. Raises ValueError."""
        blocks, spare = frozenset(range(1, num_blocks)), frozenset(headroom)
        if num_blocks < 2 or block_size < 1 or not spare <= blocks:
            raise ValueError(f"no such pool: {num_blocks=} {block_size=} headroom={sorted(spare)}")
        empty: frozenset[int] = frozenset()
        refs = (0,) * num_blocks
        pool = PoolState(num_blocks, block_size, blocks - spare, spare, empty, empty, refs)
        return State(pool, (), (None,) * (num_blocks * block_size))

    @property
    def requests(self) -> Mapping[str, RequestState]:
        return MappingProxyType({table.req_id: table for table in self.tables})

    def settled(
        self, *, pool: PoolState, memory: Memory, table: RequestState | None = None
    ) -> State:
        """This state with a new pool and memory, and `table` put in; what nobody can reach any
        more is forgotten."""
        tables = dict(self.requests)
        if table is not None:
            tables[table.req_id] = table
        reachable = tuple(
            payload if pool.refs[block] or block in pool.cached else None
            for slot, payload in enumerate(memory)
            for block in (slot // pool.block_size,)
        )
        return State(pool, tuple(tables[req_id] for req_id in sorted(tables)), reachable)
