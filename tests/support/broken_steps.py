"""Step functions of the reference model with one fault each: what a search must find."""

from __future__ import annotations

from dataclasses import replace

import vtoken_spec as spec
from vtoken_spec import State

Outcome = State | spec.Rejected


def forgetful_recycle(state: State, event: spec.Event) -> Outcome:
    """A recycled hole is not taken from the dead token that left it."""
    after = spec.step(state, event)
    if isinstance(event, spec.Recycle) and isinstance(after, State):
        old, table = state.requests[event.req_id], after.requests[event.req_id]
        table = replace(table, slots=(*old.slots, event.slot))
        return after.settled(pool=after.pool, memory=after.memory, table=table)
    return after


def freeing_release(state: State, event: spec.Event) -> Outcome:
    """A released block becomes free although another request still has it."""
    after = spec.step(state, event)
    if isinstance(event, spec.Release) and isinstance(after, State):
        pool = replace(after.pool, free=after.pool.free.union(event.blocks))
        return replace(after, pool=pool)
    return after


def copyless_move(state: State, event: spec.Event) -> Outcome:
    """The table is switched, but nothing has been copied."""
    after = spec.step(state, event)
    if isinstance(event, spec.MoveTokens) and isinstance(after, State):
        return after.settled(pool=after.pool, memory=state.memory)
    return after


def rewriting_hit(state: State, event: spec.Event) -> Outcome:
    """The tokens adopted from the prefix cache are written once more."""
    after = spec.step(state, event)
    if isinstance(event, spec.Append) and isinstance(after, State):
        memory = list(after.memory)
        for token, slot in enumerate(event.slots[: event.adopted]):
            memory[slot] = spec.Payload(event.req_id, token)
        return replace(after, memory=tuple(memory))
    return after


def evicting_the_last(state: State, event: spec.Event) -> Outcome:
    """The last computed token can be evicted."""
    after = spec.step(state, event)
    if isinstance(after, spec.Rejected) and after.reason is spec.Reason.LAST_TOKEN:
        assert isinstance(event, spec.Evict)
        table = state.requests[event.req_id]
        table = replace(table, live=(*table.live[:-1], False))
        return state.settled(pool=state.pool, memory=state.memory, table=table)
    return after


def gainless_plan(state: State, event: spec.Event) -> Outcome:
    """A plan that frees nothing is accepted."""
    after = spec.step(state, event)
    if isinstance(after, spec.Rejected) and after.reason is spec.Reason.NO_GAIN:
        assert isinstance(event, spec.MoveTokens)
        return spec.step(state, replace(event, plan=replace(event.plan, purpose="dense")))
    return after
