"""Step functions of the reference model with one fault each: what a search must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import vtoken_spec as spec
from vtoken_spec import State, relocation
from vtoken_spec.model import step as right_step

Outcome = State | spec.Rejected
BrokenStep = Callable[[State, spec.Event], Outcome]


def forgetful_recycle(state: State, event: spec.Event) -> Outcome:
    """A recycled hole is not taken from the dead token that left it."""
    after = right_step(state, event)
    if isinstance(event, spec.Recycle) and isinstance(after, State):
        old, table = state.requests[event.req_id], after.requests[event.req_id]
        table = replace(table, slots=(*old.slots, event.slot))
        return after.settled(pool=after.pool, memory=after.memory, table=table)
    return after


def freeing_release(state: State, event: spec.Event) -> Outcome:
    """A released block becomes free although another request still has it."""
    after = right_step(state, event)
    if isinstance(event, spec.Release) and isinstance(after, State):
        pool = replace(after.pool, free=after.pool.free.union(event.blocks))
        return replace(after, pool=pool)
    return after


def copyless_move(state: State, event: spec.Event) -> Outcome:
    """The table is switched, but nothing has been copied."""
    after = right_step(state, event)
    if isinstance(event, spec.MoveTokens) and isinstance(after, State):
        return after.settled(pool=after.pool, memory=state.memory)
    return after


def rewriting_hit(state: State, event: spec.Event) -> Outcome:
    """The tokens adopted from the prefix cache are written once more."""
    after = right_step(state, event)
    if isinstance(event, spec.Hit) and isinstance(after, State):
        memory = list(after.memory)
        for token, slot in enumerate(after.requests[event.req_id].slots):
            memory[slot] = spec.Payload(event.req_id, token)
        return replace(after, memory=tuple(memory))
    return after


def evicting_the_last(state: State, event: spec.Event) -> Outcome:
    """The last computed token can be evicted."""
    after = right_step(state, event)
    if isinstance(after, spec.Rejected) and after.reason is spec.Reason.LAST_TOKEN:
        assert isinstance(event, spec.Evict)
        table = state.requests[event.req_id]
        table = replace(table, live=(*table.live[:-1], False))
        return state.settled(pool=state.pool, memory=state.memory, table=table)
    return after


def gainless_plan(state: State, event: spec.Event) -> Outcome:
    """A plan that frees nothing is accepted."""
    after = right_step(state, event)
    if isinstance(after, spec.Rejected) and after.reason is spec.Reason.NO_GAIN:
        assert isinstance(event, spec.MoveTokens)
        return right_step(state, replace(event, plan=replace(event.plan, purpose="dense")))
    return after


def early_commit(state: State, event: spec.Event) -> Outcome:
    """A plan is committed although its copies have not been waited for."""
    after = right_step(state, event)
    if isinstance(after, spec.Rejected) and after.reason is spec.Reason.NOT_WAITED:
        flight = state.flight(event.req_id)  # type: ignore[union-attr]
        assert flight is not None
        return relocation.switch(state, flight)
    return after


def waitless_read(state: State, event: spec.Event) -> Outcome:
    """Attention may read what a copy is still writing."""
    after = right_step(state, event)
    pending = isinstance(after, spec.Rejected) and after.reason is spec.Reason.COPY_PENDING
    return state if pending and isinstance(event, spec.Attend) else after


def unfenced_finish(state: State, event: spec.Event) -> Outcome:
    """The blocks of a request that ends are free although its copies may still be running."""
    after = right_step(state, event)
    if isinstance(event, spec.Finish | spec.Preempt) and isinstance(after, State):
        pool = after.pool
        loose = replace(pool, free=pool.free | pool.held, held=frozenset())
        return replace(after, pool=loose)
    return after


def lost_headroom(state: State, event: spec.Event) -> Outcome:
    """Headroom that an aborted plan drew does not come back."""
    after = right_step(state, event)
    if isinstance(event, spec.Wait) and isinstance(after, State):
        drawn = after.pool.headroom - state.pool.headroom
        return replace(after, pool=replace(after.pool, headroom=after.pool.headroom - drawn))
    return after


def endless_wait(state: State, event: spec.Event) -> Outcome:
    """A wait for copies is never over."""
    after = right_step(state, event)
    if isinstance(event, spec.Wait) and isinstance(after, State):
        return state
    return after


def recycling_in_flight(state: State, event: spec.Event) -> Outcome:
    """A hole is recycled although a copy in flight may go there."""
    after = right_step(state, event)
    refused = isinstance(event, spec.Recycle) and isinstance(after, spec.Rejected)
    if refused and after.reason is spec.Reason.IN_FLIGHT:  # type: ignore[union-attr]
        others = replace(state, flights=())
        alone = right_step(others, event)
        if isinstance(alone, State):
            return replace(alone, flights=state.flights)
    return after


ALL: tuple[BrokenStep, ...] = (
    forgetful_recycle,
    freeing_release,
    copyless_move,
    rewriting_hit,
    evicting_the_last,
    gainless_plan,
    early_commit,
    waitless_read,
    unfenced_finish,
    lost_headroom,
    endless_wait,
    recycling_in_flight,
)
