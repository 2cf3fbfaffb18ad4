"""Events that must be rejected in a state, each with the reason; read off the state as in
`alphabet.py`, without the model's own helpers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .alphabet import (
    Bounds,
    busy,
    empty_blocks,
    holes_of,
    idle,
    in_flight,
    live_of,
    places_of,
    plan_of,
    preparations,
    protected,
    targets_of,
    writable,
)
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
    Prepare,
    Recycle,
    Release,
    Reserve,
    Resume,
    Uncache,
    Unreserve,
    Wait,
)
from .reasons import Reason
from .state import Flight, RequestState, State
from .view import NULL_BLOCK, Move, ReadSet

Wrong = Iterator[tuple[Event, Reason]]


def forbidden(state: State, bounds: Bounds) -> Wrong:
    for req_id in bounds.requests:
        yield from forbidden_requests(state, req_id)
    for table in state.tables:
        yield from forbidden_evictions(table)
        yield from forbidden_slots(state, table)
        yield from forbidden_reads(state, table)
        yield from forbidden_blocks(state, table)
        if in_flight(state, table.req_id):
            yield from forbidden_in_flight(state, table)
    for table in idle(state):
        yield from forbidden_plans(state, table)
        yield from forbidden_preparations(state, table)
    for flight in state.flights:
        yield from forbidden_settlements(flight)
    yield from forbidden_pool(state)


def forbidden_requests(state: State, req_id: str) -> Wrong:
    if req_id in state.preempted:
        yield Allocate(req_id, (1,)), Reason.PREEMPTED
        yield Hit(req_id, (1,)), Reason.PREEMPTED
    else:
        yield Resume(req_id), Reason.NOT_PREEMPTED
    if req_id not in state.requests:
        yield Evict(req_id, (0,)), Reason.UNKNOWN_REQUEST
        yield Append(req_id, (state.pool.block_size,)), Reason.UNKNOWN_REQUEST
        yield Attend(ReadSet(req_id, (), ())), Reason.UNKNOWN_REQUEST
        if req_id not in state.preempted:
            yield Finish(req_id), Reason.UNKNOWN_REQUEST
    if not in_flight(state, req_id):
        for event in (Copy(req_id, 0), Wait(req_id), Commit(req_id), Abort(req_id)):
            yield event, Reason.NOT_IN_FLIGHT


def forbidden_evictions(table: RequestState) -> Wrong:
    last = table.logical_len - 1
    yield Evict(table.req_id, (-1,)), Reason.UNKNOWN_TOKEN
    yield Evict(table.req_id, (last + 1,)), Reason.NOT_COMPUTED
    yield Evict(table.req_id, (last, last)), Reason.DUPLICATE
    if last >= 0:
        yield Evict(table.req_id, (last,)), Reason.LAST_TOKEN
    for token, alive in enumerate(table.live):
        if not alive:
            yield Evict(table.req_id, (token,)), Reason.DEAD_TOKEN


def forbidden_slots(state: State, table: RequestState) -> Wrong:
    req_id = table.req_id
    yield Append(req_id, ()), Reason.NOTHING_TO_DO
    for slot in (*live_of(table).values(), *holes_of(state, table)):
        yield Append(req_id, (slot,)), Reason.BAD_SLOTS
    if in_flight(state, req_id):
        for slot in places_of(state, table):
            yield Recycle(req_id, slot), Reason.IN_FLIGHT
        return
    for slot in live_of(table).values():
        reason = Reason.PROTECTED_BLOCK if protected(state, slot) else Reason.NOT_A_HOLE
        yield Recycle(req_id, slot), reason
    for slot in holes_of(state, table):
        if protected(state, slot):
            yield Recycle(req_id, slot), Reason.PROTECTED_BLOCK
        elif busy(state, slot):  # another request's copy, from when it shared the block
            yield Recycle(req_id, slot), Reason.COPY_PENDING
    for slot in places_of(state, table)[table.physical_len :]:
        if not protected(state, slot):
            yield Recycle(req_id, slot), Reason.NOT_A_HOLE
    for slot in (-1, 0, len(state.memory)):
        yield Recycle(req_id, slot), Reason.NOT_OWNED


def forbidden_reads(state: State, table: RequestState) -> Wrong:
    """A token too few, a hole too many, another query, and a slot that is being copied to."""
    live, newest = tuple(live_of(table).values()), (table.logical_len - 1,)
    if not live:
        return
    yield Attend(ReadSet(table.req_id, live[1:], newest)), Reason.BAD_READ
    yield Attend(ReadSet(table.req_id, live, (table.logical_len,))), Reason.BAD_READ
    written = {
        move.dst for flight in state.flights if not flight.waited for move in flight.plan.moves
    }
    for slot in holes_of(state, table):
        reason = Reason.COPY_PENDING if slot in written else Reason.BAD_READ
        yield Attend(ReadSet(table.req_id, (*live, slot), newest)), reason


def forbidden_blocks(state: State, table: RequestState) -> Wrong:
    size = state.pool.block_size
    for block in table.blocks:
        yield Allocate("new", (block,)), Reason.NOT_FREE
        yield Reserve((block,)), Reason.NOT_FREE
        yield Hit(table.req_id, (block,)), Reason.BAD_HIT
        if block in state.pool.cached:
            yield Cache((block,)), Reason.CACHED_BLOCK
        else:
            yield Hit("new", (block,)), Reason.NOT_CACHED
        if block not in empty_blocks(state, table) and not in_flight(state, table.req_id):
            yield Release(table.req_id, (block,)), Reason.LIVE_BLOCK
        if not all(table.live) and not protected(state, block * size):
            yield Cache((block,)), Reason.NOT_CACHEABLE
    for block in (-1, NULL_BLOCK, state.pool.num_blocks):
        if not in_flight(state, table.req_id):
            yield Release(table.req_id, (block,)), Reason.NOT_OWNED
    for block in state.pool.cached:
        payload = state.memory[block * size]
        if payload is not None and payload.token_id != 0:
            yield Hit("new", (block,)), Reason.BAD_HIT


def forbidden_pool(state: State) -> Wrong:
    for block in sorted(state.pool.free):
        yield Cache((block,)), Reason.NOT_OWNED
        yield Unreserve((block,)), Reason.NOT_RESERVED
        if block in state.pool.cached:
            yield Allocate("new", (block,)), Reason.CACHED_BLOCK
            yield Reserve((block,)), Reason.CACHED_BLOCK
            yield Uncache((block, block)), Reason.DUPLICATE
        else:
            yield Uncache((block,)), Reason.NOT_CACHED
    for block in sorted(state.pool.headroom | state.pool.held):
        yield Allocate("new", (block,)), Reason.NOT_FREE


def forbidden_plans(state: State, table: RequestState) -> Wrong:
    live, size = live_of(table), state.pool.block_size
    token = max(live)
    trimmed = places_of(state, table)[table.physical_len - 1] in live.values()
    if trimmed:
        yield MoveTokens(plan_of(table, [], [], purpose="dense")), Reason.NOTHING_TO_DO
    yield MoveTokens(plan_of(table, [], [], purpose="reclaim")), Reason.NO_GAIN
    still = plan_of(table, [token], [live[token]], purpose="dense")
    yield MoveTokens(still), Reason.BAD_TARGET
    for slot in holes_of(state, table):
        onto = plan_of(table, [token], [slot], purpose="dense")
        if busy(state, slot):
            yield MoveTokens(onto), Reason.BAD_TARGET
        elif protected(state, slot):
            yield MoveTokens(onto), Reason.PROTECTED_BLOCK
    for slot in targets_of(state, table):
        plan = plan_of(table, [token], [slot], purpose="dense")
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
        yield Prepare(gainless), Reason.NO_GAIN


def forbidden_preparations(state: State, table: RequestState) -> Wrong:
    """Plans that would touch the physical end while they are in flight, or copy nothing."""
    size, live = state.pool.block_size, live_of(table)
    yield Prepare(plan_of(table, [], [], purpose="reclaim")), Reason.NOTHING_TO_DO
    for event in preparations(state, Bounds((table.req_id,))):
        plan = event.plan  # type: ignore[union-attr]
        after = [block for block in plan.blocks if block not in plan.released]
        if plan.req_id == table.req_id and all(m.dst // size in after for m in plan.moves):
            yield Prepare(replace(plan, order=tuple(after))), Reason.AT_THE_END
    index = table.physical_len // size
    behind = places_of(state, table)[table.physical_len :]
    for slot in behind if index > 0 else ():
        first = table.blocks[0]
        inside = [token for token in live if live[token] // size == first]
        onto = [s for s in behind if s >= slot and writable(state, s)]
        if slot // size != first and 0 < len(inside) <= len(onto):
            plan = plan_of(table, inside, onto, purpose="reclaim", released=(first,))
            yield Prepare(plan), Reason.AT_THE_END
    if index < len(table.blocks):
        last = table.blocks[index]
        inside = [token for token in live if live[token] // size == last]
        onto = [s for s in holes_of(state, table) if writable(state, s) and s // size != last]
        if 0 < len(inside) <= len(onto):
            plan = plan_of(table, inside, onto, purpose="reclaim", released=(last,))
            yield Prepare(plan), Reason.AT_THE_END


def forbidden_in_flight(state: State, table: RequestState) -> Wrong:
    """Nothing restructures a table while a plan of it, even an aborted one, is in flight."""
    trim = plan_of(table, [], [], purpose="dense")
    yield MoveTokens(trim), Reason.IN_FLIGHT
    for flight in state.flights:
        if flight.plan.req_id == table.req_id:
            yield Prepare(flight.plan), Reason.IN_FLIGHT
    for block in table.blocks[:1]:
        yield Release(table.req_id, (block,)), Reason.IN_FLIGHT


def forbidden_settlements(flight: Flight) -> Wrong:
    req_id, count = flight.plan.req_id, len(flight.plan.moves)
    for index in (-1, count, *flight.copied):
        yield Copy(req_id, index), Reason.BAD_COPY
    if flight.waited:
        yield Wait(req_id), Reason.NOTHING_TO_DO
    elif len(flight.copied) < count:
        yield Wait(req_id), Reason.COPY_PENDING
    if flight.aborted:
        yield Commit(req_id), Reason.ABORTED
        yield Abort(req_id), Reason.ABORTED
    elif not flight.waited:
        yield Commit(req_id), Reason.NOT_WAITED
