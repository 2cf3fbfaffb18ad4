"""Which events to try in a state: allowed ones, and forbidden ones with the reason.

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
    Append,
    Cache,
    Event,
    Evict,
    Finish,
    MoveTokens,
    Preempt,
    Recycle,
    Release,
    Uncache,
)
from .model import Reason
from .state import RequestState, State
from .view import NULL_BLOCK, Move, Plan


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far the allowed events reach: which requests there are, how many tokens a request may
    have, and how many of them one event appends, evicts or moves."""

    requests: tuple[str, ...] = ("a", "b", "c")
    logical_len: int = 1_000_000
    appended: int = 4
    evicted: tuple[int, ...] = (1, 2, 4)
    moved: int = 3


# Facts about a state, read off without the model's own helpers ----------------------------------


def places_of(state: State, table: RequestState) -> list[int]:
    size = state.pool.block_size
    return [block * size + offset for block in table.blocks for offset in range(size)]


def writable(state: State, slot: int) -> bool:
    block = slot // state.pool.block_size
    return state.pool.refs[block] < 2 and block not in state.pool.cached


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


def targets_of(state: State, table: RequestState) -> list[int]:
    """Slots a plan may move a token to: unused ones of owned blocks, then the headroom's."""
    size, live = state.pool.block_size, set(live_of(table).values())
    spare = [b * size + offset for b in sorted(state.pool.headroom) for offset in range(size)]
    places = places_of(state, table) + spare
    return [slot for slot in places if writable(state, slot) and slot not in live]


def moving(
    table: RequestState,
    tokens: Sequence[int],
    targets: Sequence[int],
    *,
    purpose: Literal["dense", "reclaim"],
    released: tuple[int, ...] = (),
) -> MoveTokens:
    pairs = zip(tokens, targets, strict=False)
    moves = tuple(Move(token, table.slots[token], slot) for token, slot in pairs)
    return MoveTokens(Plan(table.req_id, table.version, table.blocks, moves, released, purpose))


# Allowed events: everything of one kind that must be accepted, within the bounds ----------------


def appends(state: State, bounds: Bounds) -> Iterator[Event]:
    fresh = tuple(plain_free(state)[:1])
    for req_id in bounds.requests:
        table = state.requests.get(req_id, RequestState(req_id))
        for new_blocks in dict.fromkeys(((), fresh)):
            longer = replace(table, blocks=table.blocks + new_blocks)
            places = places_of(state, longer)[table.physical_len :]
            room = tuple(slot for slot in places if writable(state, slot))
            most = min(bounds.appended, len(room), bounds.logical_len - table.logical_len)
            for count in range(1, most + 1):
                yield Append(req_id, room[:count], new_blocks)


def adoptions(state: State, bounds: Bounds) -> Iterator[Event]:
    """Hits of one or two cached blocks, alone and with one token written behind them."""
    size, place = state.pool.block_size, {}
    for block in sorted(state.pool.cached):
        payload = state.memory[block * size]
        place[block] = payload.token_id // size if payload else -1
    firsts = [(block,) for block in place if place[block] == 0]
    chains = firsts + [(*b, c) for b in firsts for c in place if place[c] == 1]
    for req_id in bounds.requests:
        if req_id in state.requests:
            continue
        for chain in chains:
            slots = tuple(block * size + offset for block in chain for offset in range(size))
            if len(slots) <= bounds.logical_len:
                yield Append(req_id, slots, chain, adopted=len(slots))
            for fresh in plain_free(state)[:1]:
                if len(slots) < bounds.logical_len:
                    more = (*slots, fresh * size)
                    yield Append(req_id, more, (*chain, fresh), adopted=len(slots))


def evictions(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        victims = [token for token in live_of(table) if token < table.logical_len - 1]
        for count in bounds.evicted:
            for first in range(len(victims) - count + 1):
                yield Evict(table.req_id, tuple(victims[first : first + count]))


def recycles(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        if table.logical_len >= bounds.logical_len:
            continue
        for slot in holes_of(state, table):
            if writable(state, slot):
                yield Recycle(table.req_id, slot)
                yield Recycle(table.req_id, slot, tuple(plain_free(state)[:1]))


def single_moves(state: State, bounds: Bounds) -> Iterator[Event]:
    """Any live token to any slot that a plan may write."""
    for table in state.tables:
        for token in live_of(table):
            for slot in targets_of(state, table):
                yield moving(table, [token], [slot], purpose="dense")


def plans(state: State, bounds: Bounds) -> Iterator[Event]:
    """Tail fills, evacuations of one or two blocks, and a trim."""
    for table in state.tables:
        yield from tail_fills(state, table, bounds)
        yield from evacuations(state, table)
        used = places_of(state, table)[: table.physical_len]
        if used and used[-1] not in live_of(table).values():
            yield moving(table, [], [], purpose="dense")


def tail_fills(state: State, table: RequestState, bounds: Bounds) -> Iterator[Event]:
    live, targets = live_of(table), targets_of(state, table)
    tail = [t for slot in reversed(places_of(state, table)) for t in live if live[t] == slot]
    for count in range(1, min(bounds.moved, len(tail), len(targets)) + 1):
        yield moving(table, tail[:count], targets[:count], purpose="dense")


def evacuations(state: State, table: RequestState) -> Iterator[Event]:
    size, live = state.pool.block_size, live_of(table)
    sources = [(block,) for block in table.blocks] + list(pairwise(table.blocks))
    for blocks in sources:
        inside = [token for token, slot in live.items() if slot // size in blocks]
        outside = [s for s in targets_of(state, table) if s // size not in blocks]
        drawn = {s // size for s in outside[: len(inside)]} - set(table.blocks)
        if len(inside) <= len(outside):
            purpose: Literal["dense", "reclaim"]
            purpose = "reclaim" if len(drawn) < len(blocks) else "dense"
            event = moving(table, inside, outside, released=blocks, purpose=purpose)
            yield event
            joined = dict.fromkeys(move.dst // size for move in event.plan.moves)
            after = dict.fromkeys([b for b in (*table.blocks, *joined) if b not in blocks])
            if len(after) > 1:
                yield MoveTokens(replace(event.plan, order=tuple(reversed(after))))


def releases(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        empty = empty_blocks(state, table)
        for block in empty:
            yield Release(table.req_id, (block,))
        if len(empty) > 1:
            yield Release(table.req_id, tuple(reversed(empty)))


def endings(state: State, bounds: Bounds) -> Iterator[Event]:
    for table in state.tables:
        yield Finish(table.req_id)
        yield Preempt(table.req_id)


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


Generator = Callable[[State, Bounds], Iterator[Event]]
_KINDS: tuple[Generator, ...] = (
    appends,
    adoptions,
    evictions,
    recycles,
    single_moves,
    plans,
    releases,
    endings,
    cachings,
)
ALLOWED: Mapping[str, Generator] = MappingProxyType({kind.__name__: kind for kind in _KINDS})
"""The generators of allowed events by name."""


# Forbidden events, each with the reason ---------------------------------------------------------


def forbidden(state: State, bounds: Bounds) -> Iterator[tuple[Event, Reason]]:
    for req_id in bounds.requests:
        if req_id not in state.requests:
            yield Evict(req_id, (0,)), Reason.UNKNOWN_REQUEST
            yield Finish(req_id), Reason.UNKNOWN_REQUEST
    for table in state.tables:
        yield from forbidden_evictions(table)
        yield from forbidden_slots(state, table)
        yield from forbidden_blocks(state, table)
        yield from forbidden_plans(state, table)
    for block in sorted(state.pool.free):
        yield Cache((block,)), Reason.NOT_OWNED
        if block in state.pool.cached:
            slot = block * state.pool.block_size
            yield Append("new", (slot,), (block,)), Reason.CACHED_BLOCK
            yield Uncache((block, block)), Reason.DUPLICATE
        else:
            yield Uncache((block,)), Reason.NOT_CACHED


def forbidden_evictions(table: RequestState) -> Iterator[tuple[Event, Reason]]:
    last = table.logical_len - 1
    yield Evict(table.req_id, (-1,)), Reason.UNKNOWN_TOKEN
    yield Evict(table.req_id, (last + 1,)), Reason.NOT_COMPUTED
    yield Evict(table.req_id, (last,)), Reason.LAST_TOKEN
    yield Evict(table.req_id, (last, last)), Reason.DUPLICATE
    for token, alive in enumerate(table.live):
        if not alive:
            yield Evict(table.req_id, (token,)), Reason.DEAD_TOKEN


def forbidden_slots(state: State, table: RequestState) -> Iterator[tuple[Event, Reason]]:
    req_id, size = table.req_id, state.pool.block_size
    yield Append(req_id, ()), Reason.NOTHING_TO_DO
    hit = Append(req_id, tuple(range(size, 2 * size)), (1,), adopted=size)
    yield hit, Reason.BAD_ADOPTION
    for slot in live_of(table).values():
        yield Append(req_id, (slot,)), Reason.BAD_SLOTS
        reason = Reason.NOT_A_HOLE if writable(state, slot) else Reason.PROTECTED_BLOCK
        yield Recycle(req_id, slot), reason
    for slot in holes_of(state, table):
        yield Append(req_id, (slot,)), Reason.BAD_SLOTS
        if not writable(state, slot):
            yield Recycle(req_id, slot), Reason.PROTECTED_BLOCK
    for slot in places_of(state, table)[table.physical_len :]:
        if writable(state, slot):
            yield Recycle(req_id, slot), Reason.NOT_A_HOLE
    for slot in (-1, 0, len(state.memory)):
        yield Recycle(req_id, slot), Reason.NOT_OWNED


def forbidden_blocks(state: State, table: RequestState) -> Iterator[tuple[Event, Reason]]:
    size = state.pool.block_size
    for block in table.blocks:
        yield Append("new", (block * size,), (block,)), Reason.NOT_FREE
        if block not in state.pool.cached:
            whole = tuple(range(block * size, (block + 1) * size))
            yield Append("new", whole, (block,), adopted=size), Reason.NOT_CACHED
        if block not in empty_blocks(state, table):
            yield Release(table.req_id, (block,)), Reason.LIVE_BLOCK
        if not all(table.live) and writable(state, block * size):
            yield Cache((block,)), Reason.NOT_CACHEABLE
    for block in (-1, NULL_BLOCK, state.pool.num_blocks):
        yield Release(table.req_id, (block,)), Reason.NOT_OWNED


def forbidden_plans(state: State, table: RequestState) -> Iterator[tuple[Event, Reason]]:
    live, size = live_of(table), state.pool.block_size
    token = max(live)
    trimmed = places_of(state, table)[table.physical_len - 1] in live.values()
    if trimmed:
        yield moving(table, [], [], purpose="dense"), Reason.NOTHING_TO_DO
    yield moving(table, [], [], purpose="reclaim"), Reason.NO_GAIN
    yield moving(table, [token], [live[token]], purpose="dense"), Reason.BAD_TARGET
    for slot in holes_of(state, table):
        if not writable(state, slot):
            yield moving(table, [token], [slot], purpose="dense"), Reason.PROTECTED_BLOCK
    for slot in targets_of(state, table):
        plan = moving(table, [token], [slot], purpose="dense").plan
        for wrong in (
            replace(plan, version=plan.version + 1),
            replace(plan, blocks=(*plan.blocks, 0)),
        ):
            yield MoveTokens(wrong), Reason.STALE_PLAN
        for source in (live[token] + 1, slot, -1):
            move = Move(token, source, slot)
            yield MoveTokens(replace(plan, moves=(move,))), Reason.BAD_SOURCE
        twice = replace(plan, moves=plan.moves * 2)
        yield MoveTokens(twice), Reason.BAD_SOURCE
        for target in (*live.values(), 0, size - 1, -1):
            move = Move(token, live[token], target)
            yield MoveTokens(replace(plan, moves=(move,))), Reason.BAD_TARGET
        kept = replace(plan, released=(slot // size,))
        yield MoveTokens(kept), Reason.BAD_RELEASE
        for order in (plan.blocks[1:] or (0,), (*plan.blocks, plan.blocks[0])):
            yield MoveTokens(replace(plan, order=order)), Reason.BAD_ORDER
        gainless = replace(plan, purpose="reclaim")
        yield MoveTokens(gainless), Reason.NO_GAIN
