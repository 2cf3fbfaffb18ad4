"""The reference model: `step`, and one pure function per event (relocation is in `relocation.py`).

`step` returns the next state, or `Rejected` when the event was not allowed; it never raises for
a wrong event and never guesses a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from . import relocation
from .breach import is_protected, slots_in_flight
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
from .laws import i3_visibility, l6_read_set
from .reading import writes
from .reasons import Reason, Rejected, no, twice
from .state import Memory, Payload, RequestState, State


def step(state: State, event: Event) -> State | Rejected:
    """The state after `event`, or why it was not allowed. Pure and total."""
    return _STEPS[type(event)](state, event)


# Blocks ---------------------------------------------------------------------------------------


def _allocate(state: State, event: Allocate) -> State | Rejected:
    if event.req_id in state.preempted:
        return no(Reason.PREEMPTED, event.req_id)
    if problem := twice(event.blocks) or _allotment_problem(state, event.blocks):
        return problem
    table = state.requests.get(event.req_id, RequestState(event.req_id))
    table = replace(table, blocks=table.blocks + event.blocks)
    return state.settled(pool=state.pool.taken(event.blocks), table=table)


def _hit(state: State, event: Hit) -> State | Rejected:
    if event.req_id in state.preempted:
        return no(Reason.PREEMPTED, event.req_id)
    if problem := twice(event.blocks):
        return problem
    table = state.requests.get(event.req_id, RequestState(event.req_id))
    if table.blocks or table.slots:
        return no(Reason.BAD_HIT, f"{event.req_id} has tokens or blocks already")
    if missing := set(event.blocks) - state.pool.cached:
        return no(Reason.NOT_CACHED, f"{event.req_id}: blocks {sorted(missing)}")
    table = replace(table, blocks=event.blocks)
    slots = table.places(block_size=state.pool.block_size)
    for token, slot in enumerate(slots):
        payload = state.memory[slot]
        if payload is None or payload.token_id != token:
            return no(Reason.BAD_HIT, f"{event.req_id}: slot {slot} is not token {token}")
    table = replace(table, slots=slots, live=(True,) * len(slots), physical_len=len(slots))
    return state.settled(pool=state.pool.taken(event.blocks), table=table)


def _release(state: State, event: Release) -> State | Rejected:
    table, size = state.requests.get(event.req_id), state.pool.block_size
    if table is None:
        return no(Reason.UNKNOWN_REQUEST, event.req_id)
    if state.flight(event.req_id) is not None:
        return no(Reason.IN_FLIGHT, event.req_id)
    if problem := twice(event.blocks):
        return problem
    for block in event.blocks:
        if block not in table.blocks:
            return no(Reason.NOT_OWNED, f"{event.req_id}: block {block}")
        if any(slot // size == block for slot in table.live_slots()):
            return no(Reason.LIVE_BLOCK, f"{event.req_id}: block {block}")
    # The physical length falls by what lay in the released blocks: a whole block's slots in the
    # middle, fewer where the physical end falls, none behind it.
    used = table.places(block_size=size)[: table.physical_len]
    lost = [slot for slot in used if slot // size in event.blocks]
    table = replace(
        table.reclaimed(lost),
        blocks=tuple(block for block in table.blocks if block not in event.blocks),
        physical_len=table.physical_len - len(lost),
        version=table.version + 1,
    )
    return state.settled(pool=state.pool.given_back(event.blocks), table=table)


def _cache(state: State, event: Cache) -> State | Rejected:
    if problem := twice(event.blocks):
        return problem
    for block in event.blocks:
        owners = [table for table in state.tables if block in table.blocks]
        if not owners:
            return no(Reason.NOT_OWNED, f"block {block}")
        if block in state.pool.cached:
            return no(Reason.CACHED_BLOCK, f"block {block}")
        if not any(_is_cacheable(t, block, block_size=state.pool.block_size) for t in owners):
            return no(Reason.NOT_CACHEABLE, f"block {block}")
    pool = replace(state.pool, cached=state.pool.cached.union(event.blocks))
    return state.settled(pool=pool)


def _uncache(state: State, event: Uncache) -> State | Rejected:
    if problem := twice(event.blocks):
        return problem
    if missing := set(event.blocks) - state.pool.cached:
        return no(Reason.NOT_CACHED, f"blocks {sorted(missing)}")
    pool = replace(state.pool, cached=state.pool.cached.difference(event.blocks))
    return state.settled(pool=pool)


def _reserve(state: State, event: Reserve) -> State | Rejected:
    if problem := twice(event.blocks) or _allotment_problem(state, event.blocks):
        return problem
    mine, pool = frozenset(event.blocks), state.pool
    return state.settled(pool=replace(pool, free=pool.free - mine, headroom=pool.headroom | mine))


def _unreserve(state: State, event: Unreserve) -> State | Rejected:
    if problem := twice(event.blocks):
        return problem
    mine, pool = frozenset(event.blocks), state.pool
    if missing := mine - pool.headroom:
        return no(Reason.NOT_RESERVED, f"blocks {sorted(missing)}")
    return state.settled(pool=replace(pool, free=pool.free | mine, headroom=pool.headroom - mine))


# Tokens ---------------------------------------------------------------------------------------


def _append(state: State, event: Append) -> State | Rejected:
    table, size = state.requests.get(event.req_id), state.pool.block_size
    if not event.slots:
        return no(Reason.NOTHING_TO_DO, event.req_id)
    if table is None:
        return no(Reason.UNKNOWN_REQUEST, event.req_id)
    places = table.places(block_size=size)
    # A trim can leave the physical end inside a protected block: appended tokens skip the rest
    # of it, which thereby becomes holes.
    room = [s for s in places[table.physical_len :] if not is_protected(state.pool, s // size)]
    expected = tuple(room[: len(event.slots)])
    if event.slots != expected:
        return no(Reason.BAD_SLOTS, f"{event.req_id}: {event.slots}, not {expected}")
    if problem := _busy_problem(state, expected):
        return problem
    table = replace(
        table,
        slots=table.slots + expected,
        live=table.live + (True,) * len(expected),
        physical_len=places.index(expected[-1]) + 1,
    )
    return state.settled(memory=_written(state, event), table=table)


def _recycle(state: State, event: Recycle) -> State | Rejected:
    table, size = state.requests.get(event.req_id), state.pool.block_size
    if table is None:
        return no(Reason.UNKNOWN_REQUEST, event.req_id)
    if state.flight(event.req_id) is not None:
        return no(Reason.IN_FLIGHT, event.req_id)
    where = f"{event.req_id}: slot {event.slot}"
    if event.slot // size not in table.blocks:
        return no(Reason.NOT_OWNED, where)
    if is_protected(state.pool, event.slot // size):
        return no(Reason.PROTECTED_BLOCK, where)
    used = table.places(block_size=size)[: table.physical_len]
    if event.slot not in used or event.slot in table.live_slots():
        return no(Reason.NOT_A_HOLE, where)
    if problem := _busy_problem(state, (event.slot,)):
        return problem
    table = table.reclaimed([event.slot])
    table = replace(
        table,
        slots=(*table.slots, event.slot),
        live=(*table.live, True),
        version=table.version + 1,
    )
    return state.settled(memory=_written(state, event), table=table)


def _attend(state: State, event: Attend) -> State | Rejected:
    """Rejection is the law itself, as for a plan."""
    if event.read.req_id not in state.requests:
        return no(Reason.UNKNOWN_REQUEST, event.read.req_id)
    for breach in i3_visibility(state, event.read):
        return no(Reason.COPY_PENDING, breach.message)
    for breach in l6_read_set(state, event.read):
        return no(Reason.BAD_READ, breach.message)
    return state


def _evict(state: State, event: Evict) -> State | Rejected:
    table = state.requests.get(event.req_id)
    if table is None:
        return no(Reason.UNKNOWN_REQUEST, event.req_id)
    if problem := twice(event.token_ids, named="tokens"):
        return problem
    for token in event.token_ids:
        if reason := _eviction_problem(table, token):
            return no(reason, f"{event.req_id}: token {token}")
    live = list(table.live)
    for token in event.token_ids:
        live[token] = False
    return state.settled(table=replace(table, live=tuple(live)))


# Requests -------------------------------------------------------------------------------------


def _finish(state: State, event: Finish) -> State | Rejected:
    if event.req_id in state.preempted:
        return replace(state, preempted=state.preempted - {event.req_id})
    return _dropped(state, event.req_id)


def _preempt(state: State, event: Preempt) -> State | Rejected:
    after = _dropped(state, event.req_id)
    if isinstance(after, Rejected):
        return after
    return replace(after, preempted=after.preempted | {event.req_id})


def _resume(state: State, event: Resume) -> State | Rejected:
    if event.req_id not in state.preempted:
        return no(Reason.NOT_PREEMPTED, event.req_id)
    back = replace(state, preempted=state.preempted - {event.req_id})
    return back.settled(table=RequestState(event.req_id))


def _dropped(state: State, req_id: str) -> State | Rejected:
    table = state.requests.get(req_id)
    if table is None:
        return no(Reason.UNKNOWN_REQUEST, req_id)
    left = relocation.aborted(state, req_id)
    others = replace(left, tables=tuple(t for t in left.tables if t != table))
    return others.settled(pool=left.pool.given_back(table.blocks))


_STEPS: Mapping[type, Callable[[State, Any], State | Rejected]] = MappingProxyType(
    {
        Allocate: _allocate,
        Hit: _hit,
        Release: _release,
        Cache: _cache,
        Uncache: _uncache,
        Reserve: _reserve,
        Unreserve: _unreserve,
        Append: _append,
        Recycle: _recycle,
        Attend: _attend,
        Evict: _evict,
        MoveTokens: relocation.move_tokens,
        Prepare: relocation.prepare,
        Copy: relocation.copy,
        Wait: relocation.wait,
        Commit: relocation.commit,
        Abort: relocation.abort,
        Finish: _finish,
        Preempt: _preempt,
        Resume: _resume,
    }
)


# Inside ---------------------------------------------------------------------------------------


def _allotment_problem(state: State, blocks: Iterable[int]) -> Rejected | None:
    """Blocks that are to be filled are free and not cached."""
    for block in blocks:
        if block not in state.pool.free:
            return no(Reason.NOT_FREE, f"block {block}")
        if block in state.pool.cached:
            return no(Reason.CACHED_BLOCK, f"block {block}")
    return None


def _busy_problem(state: State, slots: Iterable[int]) -> Rejected | None:
    """No plan in flight copies from or to slots that are to be written. It can be another request's
    that has ended since: its copy was made when the block was shared."""
    flying = slots_in_flight(state)
    for slot in slots:
        if slot in flying:
            return no(Reason.COPY_PENDING, f"slot {slot} of request {flying[slot]}'s plan")
    return None


def _eviction_problem(table: RequestState, token: int) -> Reason | None:
    if token < 0:
        return Reason.UNKNOWN_TOKEN
    if token >= table.logical_len:
        return Reason.NOT_COMPUTED
    if not table.live[token]:
        return Reason.DEAD_TOKEN
    if token == table.logical_len - 1:
        return Reason.LAST_TOKEN
    return None


def _is_cacheable(table: RequestState, block: int, *, block_size: int) -> bool:
    """Whether `block` is full and holds its tokens as they were computed. After the first
    eviction of a request nothing is cached: later tokens depend on the pruned context."""
    first = table.blocks.index(block) * block_size
    expected = tuple(range(block * block_size, (block + 1) * block_size))
    return all(table.live) and table.slots[first : first + block_size] == expected


def _written(state: State, event: Append | Recycle) -> Memory:
    memory = list(state.memory)
    for write in writes(state, event):
        memory[write.slot] = Payload(write.req_id, write.token_id)
    return tuple(memory)
