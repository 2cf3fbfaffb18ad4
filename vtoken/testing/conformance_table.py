"""The conformance suite of a token table: random histories beside the reference model.

After every call the state is judged by the spec's own predicates, then compared with the model's.
A second table is given every eviction the other way, in bulk or one by one, and has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import vtoken_spec as spec
from vtoken.errors import InvariantViolation, Rejected
from vtoken.testing.conformance import (
    ConformanceError,
    ConformanceReport,
    Failure,
    said,
    shortest,
)
from vtoken.testing.conformance_calls import drawn_history, initial, simpler
from vtoken.testing.conformance_model import (
    ApplyMoves,
    Call,
    EvictMany,
    EvictOne,
    Refusal,
    Sync,
    TokenTableLike,
    answer,
)
from vtoken_spec import RequestState, State

__all__ = ["check_token_table"]

TableFactory = Callable[[int], TokenTableLike]


def check_token_table(
    factory: TableFactory, *, examples: int = 200, seed: int = 0
) -> ConformanceReport:
    """Hold a token table to the laws and to the reference model.

    Args:
        factory: `factory(block_size)` makes an empty table.
        examples: histories, of 30 calls each, three tenths of them wrong ones.
        seed: of the first; the others follow in numbers.

    Raises:
        ConformanceError: with the shortest history found.
    """
    report = ConformanceReport("token table")
    for number in range(seed, seed + examples):
        size, history = drawn_history(number)
        failure = _run(factory, size, history, report)
        if failure is not None:
            again = f"check_token_table(factory, examples=1, seed={number})"
            raise _shown(factory, size, history, failure, again)
        report.histories += 1
    return report


@dataclass(frozen=True, slots=True)
class _Seen:
    """One request as the implementation shows it, copied; a `RequestView`."""

    req_id: str
    logical_len: int
    physical_len: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    live: tuple[bool, ...]
    version: object = None

    def without_version(self) -> tuple[object, ...]:
        return self.logical_len, self.physical_len, self.blocks, self.slots, self.live

    def payloads(self, state: State) -> dict[int, spec.Payload | None]:
        """Live id -> what lies in its slot, in the model's memory."""
        pairs = enumerate(zip(self.slots, self.live, strict=True))
        return {token: state.memory[slot] for token, (slot, alive) in pairs if alive}


@dataclass(frozen=True, slots=True)
class _View:
    """A `StateView`: the implementation's requests in the model's pool."""

    pool: spec.PoolState
    requests: Mapping[str, _Seen]
    flights: tuple[spec.FlightView, ...] = ()


_Tables = Mapping[str, _Seen]


def _seen(table: TokenTableLike) -> dict[str, _Seen]:
    seen = {}
    for req_id in list(table):
        view = table[req_id]
        seen[req_id] = _Seen(
            str(view.req_id),
            int(view.logical_len),
            int(view.physical_len),
            tuple(int(block) for block in view.blocks),
            tuple(int(slot) for slot in view.slots),
            tuple(bool(alive) for alive in view.live),
            getattr(view, "version", None),
        )
    return seen


# One history ------------------------------------------------------------------------------------


def _run(
    factory: TableFactory,
    size: int,
    history: Sequence[Call],
    report: ConformanceReport | None = None,
) -> Failure | None:
    """The first failure of a history, None if there is none."""
    state, at = initial(size), -1
    try:
        table, twin = factory(size), factory(size)
        seen = _seen(table)
        for at, call in enumerate(history):
            after = answer(state, call)
            if isinstance(after, Refusal):
                law = _refused(table, call, after, seen)
                if report is not None and after.verdict == "refuse":
                    report.rejections[after.reason] += 1
            else:
                law = _accepted(table, twin, call, (state, after), seen)
                state, seen = after, _seen(table)
                if report is not None:
                    report.operations[_kind(call, after)] += 1
            if law is not None:
                return Failure(*law, at)
    except Exception as error:
        return Failure("error", f"{type(error).__name__}: {error}", at)
    return None


def _kind(call: Call, after: State) -> str:
    name = str(call).partition("(")[0]
    if isinstance(call, Sync) and after.pool.ref_count(call.block_ids[0]) > 1:
        return f"{name} behind a shared prefix"
    return name


_Fault = tuple[str, str]


def _refused(table: TokenTableLike, call: Call, refusal: Refusal, before: _Tables) -> _Fault | None:
    """The call is refused by the right kind of error, and nothing is another than before."""
    if refusal.verdict == "open":
        return None
    allowed: tuple[type[Exception], ...] = (Rejected,)
    if isinstance(call, ApplyMoves):  # a planner's fault rather than a caller's
        allowed = (Rejected, InvariantViolation)
    why = f"{refusal.reason} ({refusal.detail})"
    raised = True
    try:
        call.on(table)
    except allowed:
        pass
    except Exception as error:
        return "rejection", f"raised {type(error).__name__} ({error}), not Rejected, when {why}"
    else:
        raised = False
    if not raised and refusal.verdict == "refuse":
        return "rejection", f"was accepted, although {why}"
    after = _seen(table)
    if after != before:
        law = "atomicity" if isinstance(call, ApplyMoves) else "unchanged"
        what = "was refused and changed" if raised else "has nothing to do and changed"
        return law, f"{what} {_difference(before, after)}"
    return None


def _accepted(
    table: TokenTableLike,
    twin: TokenTableLike,
    call: Call,
    states: tuple[State, State],
    before: _Tables,
) -> _Fault | None:
    try:
        result = call.on(table)
    except Exception as error:
        return "acceptance", f"was refused: {type(error).__name__}: {error}"
    seen = _seen(table)
    for fault in _judged(call, states, before, seen, result):
        return fault
    try:
        for other in _other_way(call):
            other.on(twin)
    except Exception as error:
        return "bulk", f"the other way, it was refused: {type(error).__name__}: {error}"
    others = _seen(twin)
    if _bare(others) != _bare(seen):
        return "bulk", f"the other way, it changes {_difference(seen, others)}"
    return None


def _other_way(call: Call) -> Sequence[Call]:
    match call:
        case EvictMany(req_id, token_ids):
            return [EvictOne(req_id, token) for token in token_ids]
        case EvictOne(req_id, token_id):
            return [EvictMany(req_id, (token_id,))]
        case _:
            return [call]


# Laws -------------------------------------------------------------------------------------------


def _judged(
    call: Call, states: tuple[State, State], before: _Tables, seen: _Tables, result: object
) -> Iterator[_Fault]:
    """Faults of the state after an accepted call, those with the most to say first."""
    state, after = states
    if seen.keys() != after.requests.keys():
        what = f"there are requests {sorted(seen)}, not {sorted(after.requests)}"
        yield "model", what
        return
    for breach in spec.i2_unique_mapping(_View(after.pool, seen)):
        yield breach.law, said(breach)
    if isinstance(call, ApplyMoves):
        yield from _judged_move(call, states, before, seen)
    for req_id, request in seen.items():
        slots = [s for s, alive in zip(request.slots, request.live, strict=True) if alive]
        read = spec.ReadSet(req_id, slots, ())
        for breach in spec.l6_read_set(after, read):
            yield breach.law, f"reading the live tokens' slots: {said(breach)}"
    for req_id, request in seen.items():
        yield from _compared(request, after.requests[req_id])
    if isinstance(call, Sync):
        known = state.requests.get(call.req_id, RequestState(call.req_id)).logical_len
        expected = list(after.requests[call.req_id].slots[known:])
        given = [int(slot) for slot in result]  # type: ignore[attr-defined]
        if given != expected:
            what = f"the new tokens would be written to slots {given}, and are in {expected}"
            yield "L7", what


def _judged_move(
    call: ApplyMoves, states: tuple[State, State], before: _Tables, seen: _Tables
) -> Iterator[_Fault]:
    """I1 with the model's memory, in which the moves have been copied as they were given."""
    req_id = call.req_id
    old, new = before[req_id].payloads(states[0]), seen[req_id].payloads(states[1])
    for breach in spec.i1_conservation(old, new, req_id=req_id):
        yield breach.law, said(breach)
    version = seen[req_id].version
    if version is not None and version == before[req_id].version:
        what = f"version {version} is the same after the moves: a stale plan would not be noticed"
        yield "I4", what


def _compared(request: _Seen, model: RequestState) -> Iterator[_Fault]:
    for name in ("req_id", "logical_len", "physical_len", "blocks", "slots", "live"):
        expected, found = getattr(model, name), getattr(request, name)
        if expected != found:
            what = f"request {model.req_id!r}: {name} is {found}, and {expected} in the model"
            yield "model", what


def _bare(tables: _Tables) -> dict[str, tuple[object, ...]]:
    """Two ways to the same table may count its versions differently."""
    return {req_id: request.without_version() for req_id, request in tables.items()}


def _difference(before: _Tables, after: _Tables) -> str:
    if before.keys() != after.keys():
        return f"the requests from {sorted(before)} to {sorted(after)}"
    for req_id, old in before.items():
        for name in _Seen.__slots__:
            one, other = getattr(old, name), getattr(after[req_id], name)
            if one != other:
                return f"{name} of request {req_id!r} from {one} to {other}"
    return "nothing"


# Showing ----------------------------------------------------------------------------------------


def _shown(
    factory: TableFactory, size: int, history: Sequence[Call], failure: Failure, again: str
) -> ConformanceError:
    """The error, with a shorter history that fails by the same law."""
    law = failure.law

    def fails(candidate: Sequence[Call]) -> bool:
        found = _run(factory, size, candidate)
        return found is not None and found.law == law

    calls = shortest(history[: failure.at + 1], fails, simpler=simpler)
    for smaller in range(1, size):
        found = _run(factory, smaller, calls)
        if found is not None and found.law == law:
            size = smaller
            break
    # A table that fails only now and then is shown as it was seen first.
    found = _run(factory, size, calls)
    if found is None or found.law != law:
        calls, found = list(history[: failure.at + 1]), failure
    lines = (f"table = factory({size})", *_in_words(size, calls[: found.at + 1]))
    return ConformanceError(law, found.message, lines, again)


def _in_words(size: int, calls: Sequence[Call]) -> Iterator[str]:
    state = initial(size)
    width = max((len(str(call)) for call in calls), default=0)
    for call in calls:
        after = answer(state, call)
        words = _words(call, state, after)
        state = state if isinstance(after, Refusal) else after
        yield f"table.{call!s:<{width}}  # {words}"


def _words(call: Call, state: State, after: State | Refusal) -> str:
    if isinstance(after, Refusal):
        if after.verdict == "either":
            return "nothing to do"
        return f"to be refused: {after.reason}"
    match call:
        case Sync(req_id):
            known = state.requests.get(req_id, RequestState(req_id)).logical_len
            slots = after.requests[req_id].slots[known:]
            return f"tokens from {known} on, in slots {', '.join(map(str, slots))}"
        case EvictOne(req_id, token_id):
            return f"leaves a hole, slot {state.requests[req_id].slots[token_id]}"
        case EvictMany(req_id, tokens):
            slots = tuple(state.requests[req_id].slots[token] for token in tokens)
            return f"leaves holes, slots {', '.join(map(str, slots))}"
        case ApplyMoves(req_id, moves):
            old, new = state.requests[req_id].slots, after.requests[req_id].slots
            return ", ".join(f"slot {old[t]} to slot {new[t]}" for t, _ in moves)
        case _:
            return "it is forgotten"
