"""Which events to try in a state: the allowed ones. The forbidden ones are in `forbidden.py`.

One generator serves the random walk and the exhaustive search. Its expectations do not come from
the model: they are read off the state here, without the model's own helpers, so that the two can
disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from .events import (
    Abort,
    Allocate,
    Append,
    Attend,
    Cache,
    Commit,
    Copy,
    Event,
    Evict,
    Finish,
    Hit,
    MoveTokens,
    Preempt,
    Prepare,
    Recycle,
    Release,
    Reserve,
    Resume,
    Uncache,
    Unreserve,
    Wait,
)
from .state import RequestState, State
from .view import Move, Plan, ReadSet

Purpose = Literal["dense", "reclaim"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far the allowed events reach: which requests there are, how many tokens a request may
    have, how many of them one event appends, evicts or moves, and how many blocks are headroom
    at most."""

    requests: tuple[str, ...] = ("a", "b", "c")
    logical_len: int = 1_000_000
    appended: int = 4
    evicted: tuple[int, ...] = (1, 2, 4)
    moved: int = 3
    headroom: int = 1


# Facts about a state, read off without the model's own helpers ----------------------------------


def places_of(state: State, table: RequestState) -> list[int]:
    size = state.pool.block_size
    return [block * size + offset for block in table.blocks for offset in range(size)]


def protected(state: State, slot: int) -> bool:
    block = slot // state.pool.block_size
    return state.pool.refs[block] > 1 or block in state.pool.cached


def busy(state: State, slot: int) -> bool:
    """Whether a plan in flight copies from or to the slot."""
    moves = [move for flight in state.flights for move in flight.plan.moves]
    return any(slot in (move.src, move.dst) for move in moves)


def writable(state: State, slot: int) -> bool:
    return not protected(state, slot) and not busy(state, slot)


def live_of(table: RequestState) -> dict[int, int]:
    return {token: table.slots[token] for token in range(len(table.slots)) if table.live[token]}


def holes_of(state: State, table: RequestState) -> list[int]:
    live = live_of(table).values()
    return [s for s in places_of(state, table)[: table.physical_len] if s not in live]


def empty_blocks(state: State, table: RequestState) -> list[int]:
    used = {slot // state.pool.block_size for slot in live_of(table).values()}
    return [block for block in table.blocks if block not in used]


def plain_free(state: State) -> list[int]:
    return sorted(state.pool.free - state.pool.cached)


def in_flight(state: State, req_id: str) -> bool:
    return any(flight.plan.req_id == req_id for flight in state.flights)


def idle(state: State) -> list[RequestState]:
    """Requests with tokens and without a plan in flight: what may be restructured."""
    return [t for t in state.tables if t.slots and not in_flight(state, t.req_id)]


def targets_of(state: State, table: RequestState) -> list[int]:
    """Slots a plan may move a token to: unused ones of owned blocks, then the headroom's."""
    size, live = state.pool.block_size, set(live_of(table).values())
    spare = [b * size + offset for b in sorted(state.pool.headroom) for offset in range(size)]
    places = places_of(state, table) + spare
    return [slot for slot in places if writable(state, slot) and slot not in live]


def plan_of(
    table: RequestState,
    tokens: Sequence[int],
    targets: Sequence[int],
    *,
    purpose: Purpose,
    released: tuple[int, ...] = (),
) -> Plan:
    pairs = zip(tokens, targets, strict=False)
    moves = tuple(Move(token, table.slots[token], slot) for token, slot in pairs)
    return Plan(table.req_id, table.version, table.blocks, moves, released, purpose)


# Allowed events: everything of one kind that must be accepted, within the bounds ----------------


def allocations(state: State, bounds: Bounds) -> Iterator[Event]:
    """One block, unless a whole one is unused already."""
    fresh = tuple(plain_free(state)[:1])
    for req_id in bounds.requests if fresh else ():
        table = state.requests.get(req_id, RequestState(req_id))
        unused = len(table.blocks) * state.pool.block_size - table.physical_len
        wanted = table.logical_len < bounds.logical_len and unused < state.pool.block_size
        if wanted and req_id not in state.preempted:
            yield Allocate(req_id, fresh)


def hits(state: State, bounds: Bounds) -> Iterator[Event]:
    """One or two cached blocks, for a request without tokens or blocks."""
    size, place = state.pool.block_size, {}
    for block in sorted(state.pool.cached):
        payload = state.memory[block * size]
        place[block] = payload.token_id // size if payload else -1
    firsts = [(block,) for block in place if place[block] == 0]
    chains = firsts + [(*b, c) for b in firsts for c in place if place[c] == 1]
    for req_id in bounds.requests:
        table = state.requests.get(req_id, RequestState(req_id))
        if req_id in state.preempted or table.blocks or table.slots:
            continue
        for chain in chains:
            if len(chain) * size <= bounds.logical_len:
                yield Hit(req_id, chain)


def appends(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        places = places_of(state, table)[table.physical_len :]
        room = tuple(slot for slot in places if not protected(state, slot))
        most = min(bounds.appended, len(room), bounds.logical_len - table.logical_len)
        for count in range(1, most + 1):
            if not any(busy(state, slot) for slot in room[:count]):
                yield Append(table.req_id, room[:count])


def attends(state: State, bounds: Bounds) -> Iterator[Event]:
    """One query; its keys in physical order."""
    for table in state.tables:
        if table.slots:
            live = set(live_of(table).values())
            slots = tuple(slot for slot in places_of(state, table) if slot in live)
            yield Attend(ReadSet(table.req_id, slots, (table.logical_len - 1,)))


def evictions(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        victims = [token for token in live_of(table) if token < table.logical_len - 1]
        for count in bounds.evicted:
            for first in range(len(victims) - count + 1):
                yield Evict(table.req_id, tuple(victims[first : first + count]))


def recycles(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in idle(state):
        if table.logical_len < bounds.logical_len:
            for slot in holes_of(state, table):
                if writable(state, slot):
                    yield Recycle(table.req_id, slot)


def single_moves(state: State, bounds: Bounds) -> Iterator[Event]:
    """Any live token to any slot that a plan may write."""
    for table in idle(state):
        for token in live_of(table):
            for slot in targets_of(state, table):
                yield MoveTokens(plan_of(table, [token], [slot], purpose="dense"))


def plans(state: State, bounds: Bounds) -> Iterator[Event]:
    """Tail fills, evacuations of one or two blocks, and a trim, in step order."""
    for table in idle(state):
        for plan in (*tail_fills(state, table, bounds), *evacuations(state, table)):
            yield MoveTokens(plan)
        used = places_of(state, table)[: table.physical_len]
        if used and used[-1] not in live_of(table).values():
            yield MoveTokens(plan_of(table, [], [], purpose="dense"))


def tail_fills(state: State, table: RequestState, bounds: Bounds) -> Iterator[Plan]:
    live, targets = live_of(table), targets_of(state, table)
    tail = [t for slot in reversed(places_of(state, table)) for t in live if live[t] == slot]
    for count in range(1, min(bounds.moved, len(tail), len(targets)) + 1):
        yield plan_of(table, tail[:count], targets[:count], purpose="dense")


def evacuations(state: State, table: RequestState) -> Iterator[Plan]:
    sources = [(block,) for block in table.blocks] + list(pairwise(table.blocks))
    for blocks in sources:
        yield from evacuation(state, table, blocks, targets_of(state, table), flexible=True)


def evacuation(
    state: State,
    table: RequestState,
    blocks: tuple[int, ...],
    targets: Sequence[int],
    *,
    flexible: bool,
) -> Iterator[Plan]:
    """All live tokens of `blocks` to the first targets outside. If `flexible`, with a reversed
    block order too, and a plan that frees nothing is made "dense" instead of left out."""
    size = state.pool.block_size
    inside = [token for token, slot in live_of(table).items() if slot // size in blocks]
    outside = [slot for slot in targets if slot // size not in blocks]
    drawn = {slot // size for slot in outside[: len(inside)]} - set(table.blocks)
    gains = len(drawn) < len(blocks)
    if len(inside) > len(outside) or not (gains or flexible):
        return
    purpose: Purpose = "reclaim" if gains else "dense"
    plan = plan_of(table, inside, outside, released=blocks, purpose=purpose)
    yield plan
    joined = dict.fromkeys(move.dst // size for move in plan.moves)
    after = dict.fromkeys([b for b in (*table.blocks, *joined) if b not in blocks])
    if flexible and len(after) > 1:
        yield replace(plan, order=tuple(reversed(after)))


def releases(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        if in_flight(state, table.req_id):
            continue
        empty = empty_blocks(state, table)
        for block in empty:
            yield Release(table.req_id, (block,))
        if len(empty) > 1:
            yield Release(table.req_id, tuple(reversed(empty)))


def preparations(state: State, bounds: Bounds) -> Iterator[Event]:
    """Evacuations of one or two blocks before the physical end, to go into flight."""
    size = state.pool.block_size
    for table in idle(state):
        behind = set(places_of(state, table)[table.physical_len :])
        targets = [slot for slot in targets_of(state, table) if slot not in behind]
        before = table.blocks[: table.physical_len // size]
        for blocks in [(block,) for block in before] + list(pairwise(before)):
            for plan in evacuation(state, table, blocks, targets, flexible=False):
                if plan.moves:
                    yield Prepare(plan)


def copies(state: State, bounds: Bounds) -> Iterator[Event]:
    for flight in state.flights:
        for index in range(len(flight.plan.moves)):
            if index not in flight.copied:
                yield Copy(flight.plan.req_id, index)


def settlements(state: State, bounds: Bounds) -> Iterator[Event]:
    """Waits, commits and aborts."""
    for flight in state.flights:
        req_id = flight.plan.req_id
        if not flight.waited and len(flight.copied) == len(flight.plan.moves):
            yield Wait(req_id)
        if not flight.aborted:
            if flight.waited:
                yield Commit(req_id)
            yield Abort(req_id)


def endings(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        yield Finish(table.req_id)
        yield Preempt(table.req_id)


def returns(state: State, bounds: Bounds) -> Iterator[Event]:
    for req_id in sorted(state.preempted):
        yield Resume(req_id)
        yield Finish(req_id)


def cachings(state: State, bounds: Bounds) -> Iterator[Event]:
    size = state.pool.block_size
    for table in state.tables:
        for index, block in enumerate(table.blocks):
            tokens = table.slots[index * size : (index + 1) * size]
            in_order = tokens == tuple(block * size + offset for offset in range(size))
            if in_order and all(table.live) and block not in state.pool.cached:
                yield Cache((block,))
    for block in sorted(state.pool.cached):
        yield Uncache((block,))


def reservations(state: State, bounds: Bounds) -> Iterator[Event]:
    if len(state.pool.headroom) < bounds.headroom:
        for block in plain_free(state)[:1]:
            yield Reserve((block,))
    for block in sorted(state.pool.headroom)[:1]:
        yield Unreserve((block,))


Generator = Callable[[State, Bounds], Iterator[Event]]
_KINDS: tuple[Generator, ...] = (
    allocations,
    hits,
    appends,
    attends,
    evictions,
    recycles,
    single_moves,
    plans,
    releases,
    preparations,
    copies,
    settlements,
    endings,
    returns,
    cachings,
    reservations,
)
ALLOWED: Mapping[str, Generator] = MappingProxyType({kind.__name__: kind for kind in _KINDS})
"""The generators of allowed events by name."""
