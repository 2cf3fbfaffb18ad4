"""Breadth-first search of every state that the reference model can reach within a small scope.

In every state it evaluates I2, L5 and L6, on every transition I1, I4, L6, L7 and L8 and what the
event says about the visible tokens, and where the scope asks for it every forbidden event must
be rejected for the right reason. The first fault ends a search; since the search is breadth-first,
the history that leads to it is a shortest one.

States that differ by a symmetry are visited once (see `canonical`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations

from . import model
from .alphabet import ALLOWED, Bounds, forbidden
from .breach import Breach
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
from .laws import (
    i1_conservation,
    i2_unique_mapping,
    l5_accounting,
    l6_read_set,
    l7_write_safety,
    l8_sharing,
)
from .model import Reason, Rejected
from .planning import i4_planning
from .state import Payload, State

Step = Callable[[State, Event], State | Rejected]
Visible = Mapping[str, Mapping[int, Payload | None]]
EVERY_KIND = tuple(ALLOWED)


# Judging one state and one transition -----------------------------------------------------------


def state_faults(state: State) -> Iterator[str]:
    """Breaches of the laws that look at one state; the read set is that of a step that computes
    nothing."""
    yield from _messages(i2_unique_mapping(state))
    yield from _messages(l5_accounting(state))
    for req_id in state.requests:
        yield from _messages(l6_read_set(state, model.read_set(state, req_id, queries=0)))


def transition_faults(
    before: State, event: Event, after: State, *, seen: Visible | None = None
) -> Iterator[str]:
    """Breaches of the laws about a transition; `seen` is `visible(before)`, if it is at hand."""
    seen, sees = model.visible(before) if seen is None else seen, model.visible(after)
    match event:
        case Append() | Recycle():
            entries = model.writes(before, event)
            yield from _messages(l7_write_safety(model.allotted(before, event), entries))
            read = model.read_set(after, event.req_id, queries=len(entries))
            yield from _messages(l6_read_set(after, read))
        case MoveTokens(plan):
            version = before.requests[plan.req_id].version
            yield from _messages(i4_planning(before, plan, version=version))
    # Equal maps cannot breach I1, nor equal memories L8: the two are about differences.
    if isinstance(event, MoveTokens | Release | Cache | Uncache) and sees != seen:
        for req_id in seen:
            one, other = seen[req_id], sees.get(req_id, {})
            yield from _messages(i1_conservation(one, other, req_id=req_id))
    if before.memory != after.memory:
        yield from _messages(l8_sharing(*model.guarded(before, after)))
    yield from visibility_faults(before, event, seen=seen, sees=sees)


def visibility_faults(
    before: State, event: Event, *, seen: Visible, sees: Visible
) -> Iterator[str]:
    """The visible map changes by exactly what the event says, and names the right tokens."""
    expected = {req_id: dict(tokens) for req_id, tokens in seen.items()}
    match event:
        case Evict(req_id, token_ids):
            for token in token_ids:
                del expected[req_id][token]
        case Append(req_id) | Recycle(req_id):
            first = before.requests[req_id].logical_len if req_id in before.requests else 0
            count = len(event.slots) if isinstance(event, Append) else 1
            mine = expected.setdefault(req_id, {})
            for token in range(first, first + count):
                mine[token] = sees[req_id].get(token)
        case Finish(req_id) | Preempt(req_id):
            del expected[req_id]
    if sees != expected:
        yield f"visible tokens are {sees}, not {expected}"
    for req_id, tokens in sees.items():
        for token, payload in tokens.items():
            if payload is None or payload.token_id != token:
                yield f"request {req_id!r} sees {payload} as token {token}"


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

    - Table versions are left out. The model only compares a plan's version with the table's, and
      the plans tried are made from the table at hand.
    - Request ids are interchangeable: the model compares them for equality only, and the order of
      the tables by id decides nothing. The smallest code over all orders of the requests stands
      for all; only orders by shape are tried, because a shape names no request.
    - So are the blocks besides the null block: the model compares ids for equality and computes
      slots from them, which follow. Owned blocks are named in the order of the block lists; the
      rest by all that the model knows of them, so that those which tie are alike.
    - What lies in a slot counts only if a live token is there or the block is cached. Nothing else
      is ever looked at: moves copy live tokens, a hit takes cached blocks, only a block full of
      live tokens is cached, and everything else is written before it is read.
    """
    if len(requests) == 1:
        return _code(state, requests)
    shapes: dict[str, tuple[object, ...]] = dict.fromkeys(requests, ())
    for table in state.tables:
        shapes[table.req_id] = (table.live, len(table.blocks), table.physical_len)
    orders = permutations(sorted(requests, key=shapes.__getitem__))
    by_shape = sorted(shapes.values())
    return min(
        _code(state, order) for order in orders if [shapes[req_id] for req_id in order] == by_shape
    )


def _code(state: State, order: tuple[str, ...]) -> bytes:
    """The state with requests and blocks named in order. Every part has a length that is fixed by
    the scope or stands before it, so different states have different codes. ValueError if a
    number is beyond a byte, which no scope should be."""
    pool, size = state.pool, state.pool.block_size
    first = {req_id: 64 * index + 1 for index, req_id in enumerate(order)}
    tables = {table.req_id: table for table in state.tables}
    flags = [0] * pool.num_blocks
    for bit, blocks in enumerate((pool.free, pool.headroom, pool.held, pool.cached)):
        for block in blocks:
            flags[block] += 1 << bit
    content = [0] * len(state.memory)
    kept = {slot for table in state.tables for slot in table.live_slots()}
    kept.update(slot for block in pool.cached for slot in range(block * size, (block + 1) * size))
    for slot in kept:
        if (payload := state.memory[slot]) is not None:
            content[slot] = first[payload.writer] + payload.token_id
    facts = [
        (flag, refs, *content[block * size : block * size + size])
        for block, (flag, refs) in enumerate(zip(flags, pool.refs, strict=True))
    ]
    named = {0: 0}
    for req_id in order:
        if req_id in tables:
            for block in tables[req_id].blocks:
                named.setdefault(block, len(named))
    rest = [block for block in range(pool.num_blocks) if block not in named]
    for block in sorted(rest, key=facts.__getitem__):
        named[block] = len(named)
    code: list[int] = []
    for req_id in order:
        table = tables.get(req_id)
        if table is None:
            code.append(255)
            continue
        code += (len(table.blocks), len(table.slots), table.physical_len)
        code += [named[block] for block in table.blocks]
        code += [named[s // size] * size + s % size + 1 if s >= 0 else 0 for s in table.slots]
        code += table.live
    for block in named:
        code += facts[block]
    return bytes(code)


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
    scope, seen = report.scope, model.visible(state)
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
