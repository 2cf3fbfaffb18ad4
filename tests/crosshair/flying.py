"""Contracts for symbolic execution: one step of the reference model from every state of one shape
with a plan in flight.

Shape: blocks of two slots; request "a" had tokens 0 to 3 in blocks 1 and 2 when the plan was made,
of which 0 and 3 were live, and has gained block 4 with token 4 since. The plan moves tokens 0 and 3
to block 3, which was headroom, and releases blocks 1 and 2. Symbolic are which copies have
happened, whether the compute stream has waited, whether the plan was aborted, which of its tokens
were evicted meanwhile, and the arguments of the event (numbers from -2 to 10). As in `contracts.py`
each function returns whether the step was accepted exactly when it should be and broke no law.
"""

from __future__ import annotations

from dataclasses import replace

from contracts import is_right

import vtoken_spec as spec
from vtoken_spec import Flight, Move, Payload, Plan, PoolState, RequestState, State

SIZE = 2
PLAN = Plan("a", 0, (1, 2), (Move(0, 2, 6), Move(3, 5, 7)), (1, 2), "reclaim")


def flying(
    l0: bool = True,
    l3: bool = True,
    *,
    c0: bool = False,
    c1: bool = False,
    waited: bool = False,
    aborted: bool = False,
) -> State:
    """The shape above."""
    none: frozenset[int] = frozenset()
    pool = PoolState(6, SIZE, frozenset({5}), none, frozenset({3}), none, (0, 1, 1, 0, 1, 0))
    live = (l0, False, False, l3, True)
    table = RequestState("a", (1, 2, 4), (2, 3, 4, 5, 8), live, 5)
    t0, t1, t2, t3, t4 = (Payload("a", token) for token in range(5))
    landed = (t0 if c0 else None, t3 if c1 else None)
    memory = (None, None, t0, t1, t2, t3, *landed, t4, None, None, None)
    copied = frozenset(index for index, done in enumerate((c0, c1)) if done)
    return State(pool, (table,), memory, (Flight(PLAN, copied, waited, aborted),))


# From the preparation to the commit ---------------------------------------------------------------


def prepared(l0: bool, l1: bool, l2: bool, target: int) -> bool:
    """
    Before: block 3 is headroom and block 4 free. A plan goes into flight that moves the newest
    token out of block 2 into a hole of block 1, if nothing else is live in block 2.
    pre: -2 <= target <= 10
    post: _
    """
    plan = Plan("a", 0, (1, 2), (Move(3, 5, target),), (2,), "reclaim")
    allowed = not l2 and ((target == 2 and not l0) or (target == 3 and not l1))
    return is_right(grounded(l0, l1, l2), spec.Prepare(plan), allowed=allowed)


def prepared_into_headroom(l0: bool, l1: bool, l2: bool) -> bool:
    """
    The plan of the shape goes into flight if it moves all that is live, and that only.
    post: _
    """
    return is_right(grounded(l0, l1, l2), spec.Prepare(PLAN), allowed=l0 and not l1 and not l2)


def grounded(l0: bool, l1: bool, l2: bool) -> State:
    none: frozenset[int] = frozenset()
    pool = PoolState(5, SIZE, frozenset({4}), frozenset({3}), none, none, (0, 1, 1, 0, 0))
    table = RequestState("a", (1, 2), (2, 3, 4, 5), (l0, l1, l2, True), 4)
    tokens = tuple(Payload("a", token) for token in range(4))
    return State(pool, (table,), (None, None, *tokens, None, None, None, None))


def copy(c0: bool, c1: bool, aborted: bool, index: int) -> bool:
    """
    Any move that has not happened yet can happen, whatever was aborted; no other.
    pre: -2 <= index <= 10
    post: _
    """
    before = flying(c0=c0, c1=c1, aborted=aborted)
    allowed = (index == 0 and not c0) or (index == 1 and not c1)
    return is_right(before, spec.Copy("a", index), allowed=allowed)


def copies_in_any_order(first: int, l0: bool) -> bool:
    """
    Whichever copy comes first: after the wait, the commit leaves every live token its payload.
    pre: 0 <= first <= 1
    post: _
    """
    state = flying(l0)
    for event in (spec.Copy("a", first), spec.Copy("a", 1 - first), spec.Wait("a")):
        after = spec.step(state, event)
        if isinstance(after, spec.Rejected):
            return False
        state = after
    return is_right(state, spec.Commit("a"), allowed=True)


def wait(c0: bool, c1: bool, waited: bool, aborted: bool) -> bool:
    """
    The compute stream is behind the copies once all of them have happened, and waits once.
    pre: not waited or (c0 and c1 and not aborted)
    post: _
    """
    before = flying(c0=c0, c1=c1, waited=waited, aborted=aborted)
    return is_right(before, spec.Wait("a"), allowed=c0 and c1 and not waited)


def commit(l0: bool, l3: bool, c0: bool, c1: bool, waited: bool, aborted: bool) -> bool:
    """
    A plan is committed after the wait and unless it was aborted, whatever was evicted meanwhile.
    pre: not waited or (c0 and c1 and not aborted)
    post: _
    """
    before = flying(l0, l3, c0=c0, c1=c1, waited=waited, aborted=aborted)
    return is_right(before, spec.Commit("a"), allowed=waited)


def abort(l0: bool, c0: bool, c1: bool, waited: bool, aborted: bool) -> bool:
    """
    A plan can be aborted at any moment, once.
    pre: not waited or (c0 and c1 and not aborted)
    post: _
    """
    before = flying(l0, c0=c0, c1=c1, waited=waited, aborted=aborted)
    return is_right(before, spec.Abort("a"), allowed=not aborted)


# What the steps do meanwhile ----------------------------------------------------------------------


def finish_in_flight(l0: bool, c0: bool, c1: bool, waited: bool, aborted: bool) -> bool:
    """
    A request can end at any moment.
    pre: not waited or (c0 and c1 and not aborted)
    post: _
    """
    before = flying(l0, c0=c0, c1=c1, waited=waited, aborted=aborted)
    return is_right(before, spec.Finish("a"), allowed=True)


def preempt_in_flight(l0: bool, c0: bool, c1: bool, waited: bool, aborted: bool) -> bool:
    """
    A request can be preempted at any moment.
    pre: not waited or (c0 and c1 and not aborted)
    post: _
    """
    before = flying(l0, c0=c0, c1=c1, waited=waited, aborted=aborted)
    return is_right(before, spec.Preempt("a"), allowed=True)


def append_in_flight(l0: bool, c0: bool, slot: int) -> bool:
    """
    A token goes to the physical end and nowhere else.
    pre: -2 <= slot <= 10
    post: _
    """
    return is_right(flying(l0, c0=c0), spec.Append("a", (slot,)), allowed=slot == 9)


def evict_in_flight(l0: bool, l3: bool, c0: bool, token: int) -> bool:
    """
    A token dies whose copy is running, or has happened.
    pre: -2 <= token <= 10
    post: _
    """
    allowed = (token == 0 and l0) or (token == 3 and l3)
    return is_right(flying(l0, l3, c0=c0), spec.Evict("a", (token,)), allowed=allowed)


def allocate_in_flight(block: int) -> bool:
    """
    Only a free block is handed out, not one that is held.
    pre: -2 <= block <= 10
    post: _
    """
    return is_right(flying(), spec.Allocate("b", (block,)), allowed=block == 5)


def recycle_in_flight(c0: bool, waited: bool, aborted: bool, slot: int) -> bool:
    """
    No hole is recycled while a plan is in flight, be it aborted.
    pre: not (waited and aborted)
    pre: -2 <= slot <= 10
    post: _
    """
    before = flying(c0=c0 or waited, c1=waited, waited=waited, aborted=aborted)
    return is_right(before, spec.Recycle("a", slot), allowed=False)


def recycle_beside_another_copy(l1: bool, c0: bool, slot: int) -> bool:
    """
    The plan is of "b", which is gone: a hole is recycled unless one of its copies reads it.
    pre: -2 <= slot <= 10
    post: _
    """
    state = flying(l0=False, c0=c0, aborted=True)
    live = (False, l1, False, True, True)
    table = replace(state.tables[0], live=live)
    flight = replace(state.flights[0], plan=replace(PLAN, req_id="b"))
    before = replace(state, tables=(table,), flights=(flight,))
    allowed = (slot == 3 and not l1) or slot == 4
    return is_right(before, spec.Recycle("a", slot), allowed=allowed)


def attend_in_flight(c0: bool, c1: bool, waited: bool, slot: int) -> bool:
    """
    Attention reads token 0 where it was, also while it is copied, and not where it will be.
    pre: not waited or (c0 and c1)
    pre: -2 <= slot <= 10
    post: _
    """
    before = flying(c0=c0, c1=c1, waited=waited)
    return is_right(before, spec.Attend(spec.ReadSet("a", (slot, 5, 8), (4,))), allowed=slot == 2)
