"""The reference model: `step`, and one pure function per event.

`step` returns the next state, or `Rejected` when the event was not allowed; it never raises for
a wrong event and never guesses a choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from . import planning
from .breach import is_protected
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
from .state import Memory, Payload, RequestState, State
from .view import Plan, ReadSet, Write


class Reason(Enum):
    """Why an event was rejected. Rejection is normal and changes nothing."""

    UNKNOWN_REQUEST = "the request has no table"
    NOTHING_TO_DO = "the event would change nothing"
    DUPLICATE = "a token or a block is named twice"
    UNKNOWN_TOKEN = "a negative id is no token"
    NOT_COMPUTED = "the token has not been computed yet"
    DEAD_TOKEN = "the token is dead already"
    LAST_TOKEN = "the last computed token cannot be evicted"
    BAD_SLOTS = "the slots are not the next ones at the physical end"
    BAD_ADOPTION = "the adopted tokens are not a whole cached prefix of a new request"
    NOT_A_HOLE = "the slot is not a hole"
    PROTECTED_BLOCK = "the block is shared or cached and must not be written"
    NOT_FREE = "the block is not free"
    NOT_OWNED = "the block is not owned"
    LIVE_BLOCK = "the block still holds a live token"
    CACHED_BLOCK = "the block is reachable through the prefix cache"
    NOT_CACHED = "the block is not reachable through the prefix cache"
    NOT_CACHEABLE = "the block is not a full, unmoved part of a request without evictions"
    STALE_PLAN = "the plan was made from another table"
    BAD_SOURCE = "a source is not the slot of the live token it names"
    BAD_TARGET = "a target is not an unused slot of an owned or headroom block"
    BAD_RELEASE = "the plan releases a block that it does not empty"
    BAD_ORDER = "the new order is not a permutation of the blocks that stay"
    NO_GAIN = "the plan does not lower the block count"


@dataclass(frozen=True, slots=True)
class Rejected:
    """The answer to an event that was not allowed. `detail` names the offender."""

    reason: Reason
    detail: str


def step(state: State, event: Event) -> State | Rejected:
    """The state after `event`, or why it was not allowed. Pure and total."""
    match event:
        case Append():
            return _append(state, event)
        case Evict():
            return _evict(state, event)
        case Recycle():
            return _recycle(state, event)
        case MoveTokens():
            return _move_tokens(state, event)
        case Release():
            return _release(state, event)
        case Finish() | Preempt():
            return _drop(state, event)
        case Cache():
            return _cache(state, event)
        case Uncache():
            return _uncache(state, event)
        case _:
            assert_never(event)


# What a step reads and writes -----------------------------------------------------------------


def reads(state: State, req_id: str) -> list[tuple[int, Payload | None]]:
    """What attention must see of a request: (token id, payload) of its live tokens, in logical
    order. Raises KeyError for an unknown request."""
    table = state.requests[req_id]
    pairs = enumerate(zip(table.slots, table.live, strict=True))
    return [(token, state.memory[slot]) for token, (slot, alive) in pairs if alive]


def visible(state: State) -> dict[str, dict[int, Payload | None]]:
    """`reads` of every request: the map that L9 compares."""
    return {req_id: dict(reads(state, req_id)) for req_id in state.requests}


def read_set(state: State, req_id: str, *, queries: int) -> ReadSet:
    """What attention is given when the newest `queries` tokens are computed: the live slots in
    physical order. Raises KeyError for an unknown request."""
    table = state.requests[req_id]
    live, end = table.live_slots(), table.logical_len
    used = table.places(block_size=state.pool.block_size)[: table.physical_len]
    return ReadSet(req_id, tuple(s for s in used if s in live), tuple(range(end - queries, end)))


def writes(state: State, event: Append | Recycle) -> tuple[Write, ...]:
    """The K/V entries that the step behind an allowed `event` writes to `state`; adopted tokens
    and moves are not writes."""
    first = _table(state, event.req_id).logical_len
    if isinstance(event, Recycle):
        return (Write(event.req_id, first, event.slot),)
    tokens = enumerate(event.slots, start=first)
    return tuple(Write(event.req_id, token, s) for token, s in tokens)[event.adopted :]


def allotted(state: State, event: Append | Recycle) -> State:
    """The moment between allocation and writing, at which L7 is judged: the new blocks of an
    allowed `event` belong to the request, its tokens are not in the table yet."""
    table = _table(state, event.req_id)
    table = replace(table, blocks=table.blocks + event.new_blocks)
    return state.settled(pool=state.pool.taken(event.new_blocks), memory=state.memory, table=table)


def guarded(
    before: State, after: State
) -> tuple[dict[int, Payload | None], dict[int, Payload | None]]:
    """The two maps that L8 compares: payloads, before and after, of the slots whose block is
    shared or cached in both states."""
    blocks = [
        block
        for block in range(before.pool.num_blocks)
        if is_protected(before.pool, block) and is_protected(after.pool, block)
    ]
    slots = RequestState("", tuple(blocks)).places(block_size=before.pool.block_size)
    return {s: before.memory[s] for s in slots}, {s: after.memory[s] for s in slots}


# One function per event -----------------------------------------------------------------------


def _append(state: State, event: Append) -> State | Rejected:
    size = state.pool.block_size
    if not event.slots:
        return _no(Reason.NOTHING_TO_DO, event.req_id)
    if event.adopted and (problem := _adoption_problem(state, event)):
        return problem
    fresh = event.new_blocks[event.adopted // size :]
    if problem := _twice(event.new_blocks) or _allotment_problem(state, fresh):
        return problem
    base = allotted(state, event)
    table = base.requests[event.req_id]
    places = table.places(block_size=size)
    # A trim can leave the physical end inside a protected block: appended tokens skip the rest
    # of it, which thereby becomes holes. Adopted blocks are protected too.
    room = [s for s in places[table.physical_len :] if not is_protected(base.pool, s // size)]
    wanted = len(event.slots) - event.adopted
    expected = event.slots[: event.adopted] + tuple(room[:wanted])
    if event.slots != expected:
        return _no(Reason.BAD_SLOTS, f"{event.req_id}: {event.slots}, not {expected}")
    table = replace(
        table,
        slots=table.slots + expected,
        live=table.live + (True,) * len(expected),
        physical_len=places.index(expected[-1]) + 1,
    )
    return base.settled(pool=base.pool, memory=_written(state, event), table=table)


def _evict(state: State, event: Evict) -> State | Rejected:
    table = state.requests.get(event.req_id)
    if table is None:
        return _no(Reason.UNKNOWN_REQUEST, event.req_id)
    if problem := _twice(event.token_ids, named="tokens", none_is_wrong=True):
        return problem
    for token in event.token_ids:
        if reason := _eviction_problem(table, token):
            return _no(reason, f"{event.req_id}: token {token}")
    live = tuple(alive and i not in event.token_ids for i, alive in enumerate(table.live))
    return state.settled(pool=state.pool, memory=state.memory, table=replace(table, live=live))


def _recycle(state: State, event: Recycle) -> State | Rejected:
    table, size = state.requests.get(event.req_id), state.pool.block_size
    if table is None:
        return _no(Reason.UNKNOWN_REQUEST, event.req_id)
    if problem := _twice(event.new_blocks) or _allotment_problem(state, event.new_blocks):
        return problem
    where = f"{event.req_id}: slot {event.slot}"
    if event.slot // size not in table.blocks:
        return _no(Reason.NOT_OWNED, where)
    if is_protected(state.pool, event.slot // size):
        return _no(Reason.PROTECTED_BLOCK, where)
    used = table.places(block_size=size)[: table.physical_len]
    if event.slot not in used or event.slot in table.live_slots():
        return _no(Reason.NOT_A_HOLE, where)
    base = allotted(state, event)
    table = base.requests[event.req_id].reclaimed([event.slot])
    table = replace(
        table,
        slots=(*table.slots, event.slot),
        live=(*table.live, True),
        version=table.version + 1,
    )
    return base.settled(pool=base.pool, memory=_written(state, event), table=table)


def _move_tokens(state: State, event: MoveTokens) -> State | Rejected:
    plan, size = event.plan, state.pool.block_size
    table = state.requests.get(plan.req_id)
    if table is None:
        return _no(Reason.UNKNOWN_REQUEST, plan.req_id)
    if problem := _plan_problem(state, plan, version=table.version):
        return problem
    targets = {move.token_id: move.dst for move in plan.moves}
    drawn = dict.fromkeys(dst // size for dst in targets.values())
    drawn_blocks = tuple(block for block in drawn if block in state.pool.headroom)
    blocks = plan.order or tuple(planning.blocks_after(state, plan))
    cleared = table.reclaimed(targets.values())
    slots = tuple(targets.get(token, slot) for token, slot in enumerate(cleared.slots))
    moved = _trimmed(replace(cleared, blocks=blocks, slots=slots), block_size=size)
    if moved == table:
        return _no(Reason.NOTHING_TO_DO, plan.req_id)
    memory = list(state.memory)
    for move in plan.moves:
        memory[move.dst] = state.memory[move.src]
    return state.settled(
        pool=state.pool.taken(drawn_blocks).given_back(plan.released),
        memory=tuple(memory),
        table=replace(moved, version=table.version + 1),
    )


def _release(state: State, event: Release) -> State | Rejected:
    table, size = state.requests.get(event.req_id), state.pool.block_size
    if table is None:
        return _no(Reason.UNKNOWN_REQUEST, event.req_id)
    if problem := _twice(event.blocks, none_is_wrong=True):
        return problem
    for block in event.blocks:
        if block not in table.blocks:
            return _no(Reason.NOT_OWNED, f"{event.req_id}: block {block}")
        if any(slot // size == block for slot in table.live_slots()):
            return _no(Reason.LIVE_BLOCK, f"{event.req_id}: block {block}")
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
    pool = state.pool.given_back(event.blocks)
    return state.settled(pool=pool, memory=state.memory, table=table)


def _drop(state: State, event: Finish | Preempt) -> State | Rejected:
    table = state.requests.get(event.req_id)
    if table is None:
        return _no(Reason.UNKNOWN_REQUEST, event.req_id)
    others = replace(state, tables=tuple(t for t in state.tables if t != table))
    return others.settled(pool=state.pool.given_back(table.blocks), memory=state.memory)


def _cache(state: State, event: Cache) -> State | Rejected:
    if problem := _twice(event.blocks, none_is_wrong=True):
        return problem
    for block in event.blocks:
        owners = [table for table in state.tables if block in table.blocks]
        if not owners:
            return _no(Reason.NOT_OWNED, f"block {block}")
        if block in state.pool.cached:
            return _no(Reason.CACHED_BLOCK, f"block {block}")
        if not any(_is_cacheable(t, block, block_size=state.pool.block_size) for t in owners):
            return _no(Reason.NOT_CACHEABLE, f"block {block}")
    pool = replace(state.pool, cached=state.pool.cached.union(event.blocks))
    return state.settled(pool=pool, memory=state.memory)


def _uncache(state: State, event: Uncache) -> State | Rejected:
    if problem := _twice(event.blocks, none_is_wrong=True):
        return problem
    if missing := set(event.blocks) - state.pool.cached:
        return _no(Reason.NOT_CACHED, f"blocks {sorted(missing)}")
    pool = replace(state.pool, cached=state.pool.cached.difference(event.blocks))
    return state.settled(pool=pool, memory=state.memory)


# What can be wrong with an event --------------------------------------------------------------


def _no(reason: Reason, detail: str) -> Rejected:
    return Rejected(reason, f"{reason.value}: {detail}")


def _twice(
    items: tuple[int, ...], *, named: str = "blocks", none_is_wrong: bool = False
) -> Rejected | None:
    if none_is_wrong and not items:
        return _no(Reason.NOTHING_TO_DO, f"no {named} named")
    if len(set(items)) != len(items):
        return _no(Reason.DUPLICATE, f"{named} {items}")
    return None


def _adoption_problem(state: State, event: Append) -> Rejected | None:
    """A hit covers whole blocks of a new request, and they hold the tokens of that place."""
    size = state.pool.block_size
    cached = event.new_blocks[: max(event.adopted, 0) // size]
    prefix = RequestState(event.req_id, cached).places(block_size=size)
    if event.req_id in state.requests:
        return _no(Reason.BAD_ADOPTION, f"{event.req_id} is not new")
    if len(prefix) != event.adopted or event.slots[: len(prefix)] != prefix:
        return _no(Reason.BAD_ADOPTION, f"{event.req_id}: {event.adopted} tokens, not {prefix}")
    if missing := set(cached) - state.pool.cached:
        return _no(Reason.NOT_CACHED, f"{event.req_id}: blocks {sorted(missing)}")
    for token, slot in enumerate(prefix):
        payload = state.memory[slot]
        if payload is None or payload.token_id != token:
            return _no(Reason.BAD_ADOPTION, f"{event.req_id}: slot {slot} is not token {token}")
    return None


def _allotment_problem(state: State, blocks: Iterable[int]) -> Rejected | None:
    """Blocks that are to be filled are free and not cached."""
    for block in blocks:
        if block not in state.pool.free:
            return _no(Reason.NOT_FREE, f"block {block}")
        if block in state.pool.cached:
            return _no(Reason.CACHED_BLOCK, f"block {block}")
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


def _plan_problem(state: State, plan: Plan, *, version: int) -> Rejected | None:
    """The first breach of I4 decides: for a plan, rejection is the law itself."""
    parts = (
        (Reason.STALE_PLAN, planning.i4_snapshot(state, plan, version=version)),
        (Reason.BAD_SOURCE, planning.i4_sources(state, plan)),
        (Reason.BAD_TARGET, planning.i4_targets(state, plan)),
        (Reason.PROTECTED_BLOCK, planning.i4_writable(state, plan)),
        (Reason.BAD_RELEASE, planning.i4_released(state, plan)),
        (Reason.BAD_ORDER, planning.i4_order(state, plan)),
        (Reason.NO_GAIN, planning.i4_gain(state, plan)),
    )
    for reason, breaches in parts:
        for breach in breaches:
            return _no(reason, breach.message)
    return None


def _is_cacheable(table: RequestState, block: int, *, block_size: int) -> bool:
    """Whether `block` is full and holds its tokens as they were computed. After the first
    eviction of a request nothing is cached: later tokens depend on the pruned context."""
    first = table.blocks.index(block) * block_size
    expected = tuple(range(block * block_size, (block + 1) * block_size))
    return all(table.live) and table.slots[first : first + block_size] == expected


# Building the next state ----------------------------------------------------------------------


def _table(state: State, req_id: str) -> RequestState:
    """The request's table, empty if it is new."""
    return state.requests.get(req_id, RequestState(req_id))


def _written(state: State, event: Append | Recycle) -> Memory:
    memory = list(state.memory)
    for write in writes(state, event):
        memory[write.slot] = Payload(write.req_id, write.token_id)
    return tuple(memory)


def _trimmed(table: RequestState, *, block_size: int) -> RequestState:
    """The physical length ends after the last live slot; dead tokens behind it, and those whose
    block has left the request, are reclaimed."""
    places, live = table.places(block_size=block_size), table.live_slots()
    end = max((index for index, slot in enumerate(places) if slot in live), default=-1) + 1
    lost = set(table.slots) - set(places[:end])
    return replace(table.reclaimed(lost), physical_len=end)
