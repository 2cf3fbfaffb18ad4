"""The model's relocation: plans applied in step order, and plans in flight beside the steps.

A plan in flight goes through `Prepare`, one `Copy` per move at any moment, `Wait` and `Commit`;
or `Abort`, and `Wait` for what is still being copied. Happens-before is in the state: a copy that
the compute stream has not waited for may be running at this very moment, so the blocks it touches
are nobody else's (L11) and nothing reads or writes its slots (I3, L7).
"""

from __future__ import annotations

from dataclasses import replace

from . import planning
from .events import Abort, Commit, Copy, MoveTokens, Prepare, Wait
from .reasons import Reason, Rejected, no
from .state import Flight, RequestState, State
from .view import Plan


def move_tokens(state: State, event: MoveTokens) -> State | Rejected:
    plan = event.plan
    table = state.requests.get(plan.req_id)
    if table is None:
        return no(Reason.UNKNOWN_REQUEST, plan.req_id)
    if problem := _plan_problem(state, plan, version=table.version):
        return problem
    moved = _trimmed(_switched(state, table, plan), block_size=state.pool.block_size)
    if moved == table:
        return no(Reason.NOTHING_TO_DO, plan.req_id)
    memory = list(state.memory)
    for move in plan.moves:
        memory[move.dst] = state.memory[move.src]
    return _with_layout(state, plan, moved, memory=tuple(memory))


def prepare(state: State, event: Prepare) -> State | Rejected:
    plan = event.plan
    table = state.requests.get(plan.req_id)
    if table is None:
        return no(Reason.UNKNOWN_REQUEST, plan.req_id)
    if not plan.moves:
        return no(Reason.NOTHING_TO_DO, f"{plan.req_id}: nothing to copy")
    if problem := _plan_problem(state, plan, version=table.version, in_flight=True):
        return problem
    flight = Flight(plan)
    drawn = flight.drawn(block_size=state.pool.block_size)
    pool = replace(state.pool, headroom=state.pool.headroom - drawn, held=state.pool.held | drawn)
    return state.with_flight(plan.req_id, flight).settled(pool=pool)


def copy(state: State, event: Copy) -> State | Rejected:
    flight = state.flight(event.req_id)
    if flight is None:
        return no(Reason.NOT_IN_FLIGHT, event.req_id)
    if not 0 <= event.index < len(flight.plan.moves) or event.index in flight.copied:
        return no(Reason.BAD_COPY, f"{event.req_id}: move {event.index}")
    move = flight.plan.moves[event.index]
    memory = list(state.memory)
    memory[move.dst] = state.memory[move.src]
    copied = replace(flight, copied=flight.copied | {event.index})
    return state.with_flight(event.req_id, copied).settled(memory=tuple(memory))


def wait(state: State, event: Wait) -> State | Rejected:
    flight = state.flight(event.req_id)
    if flight is None:
        return no(Reason.NOT_IN_FLIGHT, event.req_id)
    if flight.waited:
        return no(Reason.NOTHING_TO_DO, event.req_id)
    if len(flight.copied) < len(flight.plan.moves):
        return no(Reason.COPY_PENDING, event.req_id)
    if flight.aborted:
        return _ended(state, flight)
    return state.with_flight(event.req_id, replace(flight, waited=True)).settled()


def commit(state: State, event: Commit) -> State | Rejected:
    flight = state.flight(event.req_id)
    if flight is None:
        return no(Reason.NOT_IN_FLIGHT, event.req_id)
    if flight.aborted:
        return no(Reason.ABORTED, event.req_id)
    if not flight.waited:
        return no(Reason.NOT_WAITED, event.req_id)
    return switch(state, flight)


def switch(state: State, flight: Flight) -> State:
    """The state after the commit of `flight`, whether or not its copies are complete."""
    table = state.requests[flight.req_id]
    moved, size = _switched(state, table, flight.plan), state.pool.block_size
    # The physical end stays where it is: behind what was drawn and all that was kept or gained.
    shift = len(moved.blocks) - len(table.blocks)
    lost = set(table.slots) - set(moved.places(block_size=size))
    moved = replace(moved.reclaimed(lost), physical_len=table.physical_len + shift * size)
    return _with_layout(state.with_flight(flight.req_id, None), flight.plan, moved)


def abort(state: State, event: Abort) -> State | Rejected:
    flight = state.flight(event.req_id)
    if flight is None:
        return no(Reason.NOT_IN_FLIGHT, event.req_id)
    if flight.aborted:
        return no(Reason.ABORTED, event.req_id)
    return aborted(state, event.req_id)


def aborted(state: State, req_id: str) -> State:
    """The state without a committable plan of the request; one whose copies may still be running
    stays in flight."""
    flight = state.flight(req_id)
    if flight is None:
        return state
    if flight.waited:
        return _ended(state, flight)
    return state.with_flight(req_id, replace(flight, aborted=True)).settled()


# Inside ---------------------------------------------------------------------------------------


def _ended(state: State, flight: Flight) -> State:
    """Nothing can touch the slots of this flight any more: headroom that it drew is headroom."""
    drawn = flight.drawn(block_size=state.pool.block_size)
    pool = replace(state.pool, held=state.pool.held - drawn, headroom=state.pool.headroom | drawn)
    return state.with_flight(flight.req_id, None).settled(pool=pool)


def _plan_problem(
    state: State, plan: Plan, *, version: int, in_flight: bool = False
) -> Rejected | None:
    """The first breach of I4 decides: for a plan, rejection is the law itself."""
    parts = [
        (Reason.IN_FLIGHT, planning.i4_apart(state, plan)),
        (Reason.STALE_PLAN, planning.i4_snapshot(state, plan, version=version)),
        (Reason.BAD_SOURCE, planning.i4_sources(state, plan)),
        (Reason.BAD_TARGET, planning.i4_targets(state, plan)),
        (Reason.PROTECTED_BLOCK, planning.i4_writable(state, plan)),
        (Reason.BAD_RELEASE, planning.i4_released(state, plan)),
        (Reason.BAD_ORDER, planning.i4_order(state, plan)),
        (Reason.NO_GAIN, planning.i4_gain(state, plan)),
    ]
    if in_flight:
        parts.append((Reason.AT_THE_END, planning.i4_end(state, plan)))
    for reason, breaches in parts:
        for breach in breaches:
            return no(reason, breach.message)
    return None


def _switched(state: State, table: RequestState, plan: Plan) -> RequestState:
    """The table after `plan`. A token evicted since the plan was made does not move: it stays a
    hole, or goes with its block. Blocks gained since stay at the end."""
    gained = table.blocks[len(plan.blocks) :]
    blocks = (*(plan.order or planning.blocks_after(state, plan)), *gained)
    targets = {move.token_id: move.dst for move in plan.moves if table.live[move.token_id]}
    cleared = table.reclaimed(targets.values())
    slots = tuple(targets.get(token, slot) for token, slot in enumerate(cleared.slots))
    return replace(cleared, blocks=blocks, slots=slots)


def _with_layout(
    state: State, plan: Plan, table: RequestState, *, memory: tuple[object, ...] | None = None
) -> State:
    drawn = set(table.blocks) - set(state.requests[plan.req_id].blocks)
    return state.settled(
        pool=state.pool.taken(drawn).given_back(plan.released),
        memory=memory,  # type: ignore[arg-type]
        table=replace(table, version=table.version + 1),
    )


def _trimmed(table: RequestState, *, block_size: int) -> RequestState:
    """The physical length ends after the last live slot; dead tokens behind it, and those whose
    block has left the request, are reclaimed."""
    places, live = table.places(block_size=block_size), table.live_slots()
    end = max((index for index, slot in enumerate(places) if slot in live), default=-1) + 1
    lost = set(table.slots) - set(places[:end])
    return replace(table.reclaimed(lost), physical_len=end)
