"""Breadth-first search of every state that the reference model can reach within a small scope.

In every state it evaluates I2, I3, L5, L6 and L11, on every transition I1, I4, L7 and L8 and what
the event says about the visible tokens. Where the scope asks for it, every forbidden event must be
rejected for the right reason, and from every state each plan in flight must be able to come to
its end and reclaimable blocks must be able to come back (L10). The first fault ends a search;
since the search is breadth-first, the history that leads to it is a shortest one.

States that differ by a symmetry are visited once (see `canonical`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, permutations

from . import model
from .alphabet import ALLOWED, Bounds, preparations, releases
from .breach import Breach
from .events import (
    Allocate,
    Append,
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
    Resume,
    Wait,
)
from .forbidden import forbidden
from .laws import (
    i1_conservation,
    i2_unique_mapping,
    i3_visibility,
    l5_accounting,
    l6_read_set,
    l7_write_safety,
    l8_sharing,
    l11_fence,
)
from .planning import i4_commit, i4_planning
from .progress import reclaimable_blocks
from .reading import guarded, read_set, visible, writes
from .reasons import Reason, Rejected
from .state import Flight, Payload, RequestState, State

Step = Callable[[State, Event], State | Rejected]
Visible = Mapping[str, Mapping[int, Payload | None]]
EVERY_KIND = tuple(ALLOWED)


# Judging one state and one transition -----------------------------------------------------------


def state_faults(state: State) -> Iterator[str]:
    """Breaches of the laws that look at one state; the read set is that of a step that computes
    nothing."""
    yield from _messages(i2_unique_mapping(state))
    yield from _messages(l5_accounting(state))
    yield from _messages(l11_fence(state))
    for req_id in state.requests:
        read = read_set(state, req_id, queries=0)
        yield from _messages(i3_visibility(state, read))
        yield from _messages(l6_read_set(state, read))


def transition_faults(
    before: State, event: Event, after: State, *, seen: Visible | None = None
) -> Iterator[str]:
    """Breaches of the laws about a transition; `seen` is `visible(before)`, if it is at hand."""
    seen, sees = visible(before) if seen is None else seen, visible(after)
    match event:
        case Append() | Recycle():
            entries = writes(before, event)
            yield from _messages(l7_write_safety(before, entries))
            read = read_set(after, event.req_id, queries=len(entries))
            yield from _messages(l6_read_set(after, read))
        case MoveTokens(plan) | Prepare(plan):
            version = before.requests[plan.req_id].version
            flies = isinstance(event, Prepare)
            yield from _messages(i4_planning(before, plan, version=version, in_flight=flies))
        case Commit(req_id):
            version = before.requests[req_id].version
            mine = [flight for flight in before.flights if flight.req_id == req_id]
            for flight in mine:
                yield from _messages(i4_commit(before, flight, version=version))
    # Equal maps cannot breach I1, nor equal memories L8: the two are about differences.
    if sees != seen and not isinstance(event, Append | Recycle | Hit | Evict | Finish | Preempt):
        for req_id in seen:
            one, other = seen[req_id], sees.get(req_id, {})
            yield from _messages(i1_conservation(one, other, req_id=req_id))
    if before.memory != after.memory:
        yield from _messages(l8_sharing(*guarded(before, after)))
    yield from visibility_faults(before, event, seen=seen, sees=sees)


def visibility_faults(
    before: State, event: Event, *, seen: Visible, sees: Visible
) -> Iterator[str]:
    """The visible map changes by exactly what the event says, and names the right tokens."""
    expected = dict(seen)
    match event:
        case Evict(req_id, token_ids):
            old = seen[req_id].items()
            expected[req_id] = {token: seen for token, seen in old if token not in token_ids}
        case Append(req_id) | Recycle(req_id) | Hit(req_id):
            first = before.requests[req_id].logical_len if req_id in before.requests else 0
            new = range(first, after_len(event, before, first))
            mine = {token: sees[req_id].get(token) for token in new}
            expected[req_id] = {**seen.get(req_id, {}), **mine}
        case Finish(req_id) | Preempt(req_id):
            expected.pop(req_id, None)
        case Allocate(req_id) | Resume(req_id):
            expected.setdefault(req_id, {})
    if sees != expected:
        yield f"visible tokens are {sees}, not {expected}"
    for req_id, tokens in sees.items():
        for token, payload in tokens.items():
            if payload is None or payload.token_id != token:
                yield f"request {req_id!r} sees {payload} as token {token}"


def after_len(event: Append | Recycle | Hit, before: State, first: int) -> int:
    """The logical length that the event leads to."""
    if isinstance(event, Hit):
        return len(event.blocks) * before.pool.block_size
    return first + (1 if isinstance(event, Recycle) else len(event.slots))


def progress_faults(state: State, bounds: Bounds, step: Step) -> Iterator[str]:
    """What L10 needs of the model: each plan in flight can come to its end, and when all have, a
    request from which relocation could take a block has one less after the right plan or
    release."""
    for flight in state.flights:
        state = flown(state, flight.req_id, step)
        if state.flight(flight.req_id) is not None:
            yield f"the plan of request {flight.req_id!r} cannot end: {state.flights}"
            return
    for table in state.tables:
        if reclaimable_blocks(state, table) > 0 and not _can_shrink(state, table, bounds, step):
            yield f"no block of request {table.req_id!r} can come back"


def flown(state: State, req_id: str, step: Step) -> State:
    """The state after what is left to do of the request's plan in flight, or of that as much as
    is accepted: its copies, the wait and the commit."""
    flight = state.flight(req_id)
    assert flight is not None
    moves = range(len(flight.plan.moves))
    todo: list[Event] = [Copy(req_id, index) for index in moves if index not in flight.copied]
    todo += [] if flight.waited else [Wait(req_id)]
    todo += [] if flight.aborted else [Commit(req_id)]
    for event in todo:
        after = step(state, event)
        if isinstance(after, Rejected):
            break
        state = after
    return state


def _can_shrink(state: State, table: RequestState, bounds: Bounds, step: Step) -> bool:
    """Whether a release or a plan in flight leaves the request with fewer blocks."""
    for event in (*releases(state, bounds), *preparations(state, bounds)):
        req_id = event.plan.req_id if isinstance(event, Prepare) else event.req_id  # type: ignore[union-attr]
        after = step(state, event) if req_id == table.req_id else None
        if isinstance(after, State) and after.flight(req_id) is not None:
            after = flown(after, req_id, step)
        if isinstance(after, State) and len(after.requests[req_id].blocks) < len(table.blocks):
            return True
    return False


def _messages(breaches: Iterator[Breach]) -> Iterator[str]:
    return (breach.message for breach in breaches)


# Scopes, symmetry, search -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A bounded corner of the model. `kinds` are the generators of `alphabet` that are used."""

    name: str
    num_blocks: int
    block_size: int
    bounds: Bounds
    headroom: tuple[int, ...] = ()
    kinds: tuple[str, ...] = EVERY_KIND
    with_forbidden: bool = False
    with_progress: bool = False
    most_states: int = 200_000


@dataclass(slots=True)
class Report:
    """What a search has covered. `fault` is None, or the first fault with its history."""

    scope: Scope
    states: int = 0
    edges: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    rejected: Counter[Reason] = field(default_factory=Counter)
    reached: set[str] = field(default_factory=set)
    fault: str | None = None
    history: tuple[Event, ...] = ()


def canonical(state: State, requests: tuple[str, ...]) -> bytes:
    """The same bytes exactly for states of one scope that a symmetry maps onto each other.

    - Table versions are left out. The model only compares a plan's version with the table's, the
      plans tried are made from the table at hand, and nothing raises it while a plan is in flight.
    - Request ids are interchangeable: the model compares them for equality only, and the order of
      the tables by id decides nothing. The smallest code over all orders of the requests stands
      for all; only orders by shape are tried, because a shape names no request.
    - So are the blocks besides the null block: the model compares ids for equality and computes
      slots from them, which follow. Owned blocks are named in the order of the block lists; the
      rest by all that the model knows of them, so that those which tie are alike.
    - What lies in a slot counts only if a live token is there, or the copy of one, or the block is
      cached. Nothing else is ever looked at: moves copy live tokens, a hit takes cached blocks,
      only a block full of live tokens is cached, and everything else is written before it is read.
    - Of a plan in flight the moves count, what it releases, and how many blocks it was made from;
      of an aborted one only the slots, what is still to be copied, and what it drew.
    """
    if len(requests) == 1:
        return _code(state, requests)
    shapes = {req_id: _shape(state, req_id) for req_id in requests}
    in_order = sorted(requests, key=shapes.__getitem__)
    by_shape = [shapes[req_id] for req_id in in_order]
    if len(set(by_shape)) == len(by_shape):
        return _code(state, in_order)
    return min(
        _code(state, order)
        for order in permutations(in_order)
        if [shapes[req_id] for req_id in order] == by_shape
    )


def _shape(state: State, req_id: str) -> tuple[object, ...]:
    """What can be said of a request without naming anything."""
    table, flight = state.requests.get(req_id), state.flight(req_id)
    mine = () if table is None else (table.live, len(table.blocks), table.physical_len)
    if flight is None:
        return mine, req_id in state.preempted, ()
    copied = tuple(sorted(flight.copied))
    flying = (len(flight.plan.moves), copied, flight.waited, flight.aborted)
    return mine, req_id in state.preempted, flying


def _code(state: State, order: Sequence[str]) -> bytes:
    """The state with requests and blocks named in order. Every part has a length that is fixed by
    the scope or stands before it, so different states have different codes. ValueError if a
    number is beyond a byte, which no scope should be."""
    pool, size, tables = state.pool, state.pool.block_size, state.requests
    flights = {flight.req_id: flight for flight in state.flights}
    flags = [0] * pool.num_blocks
    for bit, blocks in ((1, pool.free), (2, pool.headroom), (4, pool.held), (8, pool.cached)):
        for block in blocks:
            flags[block] += bit
    content = _content(state, order)
    facts = list(zip(flags, pool.refs, *(content[i::size] for i in range(size)), strict=True))
    named = {0: 0}
    for req_id in order:
        if req_id in tables:
            for block in tables[req_id].blocks:
                named.setdefault(block, len(named))
    for req_id in order if flights else ():
        if req_id in flights:
            for move in flights[req_id].plan.moves:
                named.setdefault(move.src // size, len(named))
                named.setdefault(move.dst // size, len(named))
    rest = [block for block in range(pool.num_blocks) if block not in named]
    for block in sorted(rest, key=facts.__getitem__):
        named[block] = len(named)
    code: list[int] = []
    for req_id in order:
        table = tables.get(req_id)
        if table is None:
            code.append(254 if req_id in state.preempted else 255)
            continue
        code += (len(table.blocks), len(table.slots), table.physical_len)
        code += [named[block] for block in table.blocks]
        code += [named[s // size] * size + s % size + 1 if s >= 0 else 0 for s in table.slots]
        code += table.live
    for req_id in order:
        code += _flight_code(flights[req_id], named, size) if req_id in flights else (255,)
    for block in named:
        code += facts[block]
    return bytes(code)


def _content(state: State, order: Sequence[str]) -> list[int]:
    """Per slot, which token of which request's writing lies there, where that can matter."""
    size, memory = state.pool.block_size, state.memory
    kept = [slot for table in state.tables for slot in compress(table.slots, table.live)]
    for block in state.pool.cached:
        kept += range(block * size, block * size + size)
    for flight in state.flights:
        if not flight.aborted:
            live = state.requests[flight.req_id].live
            moved = [flight.plan.moves[index] for index in flight.copied]
            kept += [move.dst for move in moved if live[move.token_id]]
    first = {req_id: 64 * index + 1 for index, req_id in enumerate(order)}
    content = [0] * len(memory)
    for slot in kept:
        if (payload := memory[slot]) is not None:
            content[slot] = first[payload.writer] + payload.token_id
    return content


def _flight_code(flight: Flight, named: Mapping[int, int], size: int) -> list[int]:
    plan, drawn = flight.plan, flight.drawn(block_size=size)
    code = [len(plan.moves), flight.waited + 2 * flight.aborted]
    for index, move in enumerate(plan.moves):
        code.append(0 if flight.aborted else move.token_id + 1)
        code += [named[s // size] * size + s % size + 1 for s in (move.src, move.dst)]
        code += [index in flight.copied, move.dst // size in drawn]
    if not flight.aborted:
        code += [len(plan.blocks), len(plan.released), *(named[block] for block in plan.released)]
    return code


def explore(
    scope: Scope,
    *,
    step: Step = model.step,
    controls: Mapping[str, Callable[[State], bool]] | None = None,
) -> Report:
    """Search `scope` to its end or to the first fault. `controls` are predicates by name; the
    report says which of them some state fulfils."""
    report, waiting = Report(scope), dict(controls or {})
    start = State.initial(
        num_blocks=scope.num_blocks, block_size=scope.block_size, headroom=scope.headroom
    )
    known = {canonical(start, scope.bounds.requests)}
    origins: list[tuple[int, Event | None]] = [(0, None)]
    frontier = deque([start])
    while frontier and report.fault is None:
        state = frontier.popleft()
        for name in [name for name, holds in waiting.items() if holds(state)]:
            report.reached.add(name)
            del waiting[name]
        for event, after, fault in _successors(state, report, step):
            code = b"" if fault else canonical(after, scope.bounds.requests)
            if not fault and code in known:
                continue
            origins.append((report.states, event))
            fault = fault or next(state_faults(after), "")
            if not fault and scope.with_progress:
                fault = next(progress_faults(after, scope.bounds, step), "")
            if fault:
                report.fault, report.history = fault, _history(origins)
                break
            known.add(code)
            frontier.append(after)
        report.states += 1
        if report.states > scope.most_states:
            report.fault = f"more than {scope.most_states} states"
    return report


def _successors(state: State, report: Report, step: Step) -> Iterator[tuple[Event, State, str]]:
    """Each allowed event with the state after it, and its first fault, or "" for none."""
    scope, seen = report.scope, visible(state)
    for kind in scope.kinds:
        for event in ALLOWED[kind](state, scope.bounds):
            after = step(state, event)
            report.edges += 1
            report.accepted[type(event).__name__] += 1
            if isinstance(after, Rejected):
                yield event, state, f"an allowed event was rejected: {after.detail}"
            else:
                yield event, after, next(transition_faults(state, event, after, seen=seen), "")
    for event, reason in forbidden(state, scope.bounds) if scope.with_forbidden else ():
        after = step(state, event)
        report.rejected[reason] += 1
        if not isinstance(after, Rejected):
            yield event, state, f"a forbidden event was accepted, not rejected as {reason.name}"
        elif after.reason is not reason:
            yield event, state, f"rejected as {after.reason.name}, not as {reason.name}"


def _history(origins: list[tuple[int, Event | None]]) -> tuple[Event, ...]:
    """The events that led to the last of `origins`, each of which names its predecessor's index."""
    found: list[Event] = []
    index = len(origins) - 1
    while (event := origins[index][1]) is not None:
        found.append(event)
        index = origins[index][0]
    return tuple(reversed(found))
