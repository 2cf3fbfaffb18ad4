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
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from .view import NO_SLOT, Plan


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
class Flight:
    """A plan in flight (see `FlightView`). `copied` are the indices of the moves that happened."""

    plan: Plan
    copied: frozenset[int] = frozenset()
    waited: bool = False
    aborted: bool = False

    @property
    def req_id(self) -> str:
        return self.plan.req_id

    def touched(self, *, block_size: int) -> frozenset[int]:
        """Blocks that its copies read or write."""
        return frozenset(s // block_size for move in self.plan.moves for s in (move.src, move.dst))

    def drawn(self, *, block_size: int) -> frozenset[int]:
        """Headroom blocks among its targets."""
        targets = frozenset(move.dst // block_size for move in self.plan.moves)
        return targets.difference(self.plan.blocks)


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
        """One more reference to each of `blocks`, wherever they were."""
        mine = frozenset(blocks)
        return replace(
            self,
            refs=tuple(count + (block in mine) for block, count in enumerate(self.refs)),
            free=self.free - mine,
            headroom=self.headroom - mine,
            held=self.held - mine,
        )

    def given_back(self, blocks: Iterable[int]) -> PoolState:
        """One reference fewer to each of `blocks`; without references a block is free."""
        mine = frozenset(blocks)
        refs = tuple(count - (block in mine) for block, count in enumerate(self.refs))
        return replace(self, refs=refs, free=self.free.union(b for b in mine if refs[b] == 0))

    def fenced(self, touched: frozenset[int], drawn: frozenset[int]) -> PoolState:
        """Free blocks that a copy may still touch are held; held ones that nothing needs any more,
        neither as `touched` nor as `drawn`, are free."""
        loose = self.free | self.held
        held = loose & (touched | drawn)
        return self if held == self.held else replace(self, free=loose - held, held=held)


@dataclass(frozen=True)
class State:
    """The whole model. `tables` and `flights` are sorted by request id; `preempted` are the
    requests that will come back."""

    pool: PoolState
    tables: tuple[RequestState, ...]
    memory: Memory
    flights: tuple[Flight, ...] = ()
    preempted: frozenset[str] = frozenset()

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

    @cached_property
    def requests(self) -> Mapping[str, RequestState]:
        return MappingProxyType({table.req_id: table for table in self.tables})

    def flight(self, req_id: str) -> Flight | None:
        return next((flight for flight in self.flights if flight.req_id == req_id), None)

    def with_flight(self, req_id: str, flight: Flight | None) -> State:
        """This state with the request's plan in flight replaced, or removed."""
        others = [other for other in self.flights if other.req_id != req_id]
        mine = [] if flight is None else [flight]
        flights = tuple(sorted(others + mine, key=lambda one: one.req_id))
        return replace(self, flights=flights)

    def settled(
        self,
        *,
        pool: PoolState | None = None,
        memory: Memory | None = None,
        table: RequestState | None = None,
    ) -> State:
        """This state with another pool and memory, and `table` put in; blocks that a copy may
        still touch are held, and what nobody can reach any more is forgotten."""
        pool, memory = pool or self.pool, memory or self.memory
        tables = self.tables
        if table is not None:
            others = [other for other in tables if other.req_id != table.req_id]
            tables = tuple(sorted([*others, table], key=lambda one: one.req_id))
        size, none = pool.block_size, frozenset[int]()
        waiting = [f.touched(block_size=size) for f in self.flights if not f.waited]
        drawn = [f.drawn(block_size=size) for f in self.flights]
        pool = pool.fenced(none.union(*waiting), none.union(*drawn))
        gone = forgotten(pool) - forgotten(self.pool)
        if gone:
            kept = list(memory)
            for block in gone:
                kept[block * size : (block + 1) * size] = (None,) * size
            memory = tuple(kept)
        return State(pool, tables, memory, self.flights, self.preempted)


def forgotten(pool: PoolState) -> frozenset[int]:
    """Blocks whose content nobody can reach."""
    return (pool.free | pool.headroom) - pool.cached
