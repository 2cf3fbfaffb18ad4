"""Negative controls: each contract here is false, and symbolic execution must refute it."""

from __future__ import annotations

from dataclasses import replace

from flying import flying

import vtoken_spec as spec
from support import broken_steps
from support.broken_steps import Outcome
from vtoken_spec import Move, Payload, Plan, PoolState, RequestState, State
from vtoken_spec.explore import state_faults, transition_faults

COMMIT = spec.Commit("a")


def _state(live: tuple[bool, ...]) -> State:
    """Request "a" with four tokens in blocks 1 and 2 of two slots each; block 3 is free."""
    none: frozenset[int] = frozenset()
    pool = PoolState(4, 2, frozenset({3}), none, none, none, (0, 1, 1, 0))
    payloads = tuple(Payload("a", token) for token in range(4))
    table = RequestState("a", (1, 2), (2, 3, 4, 5), live, 4)
    return State(pool, (table,), (None, None, *payloads, None, None))


def _lawful(before: State, event: spec.Event, after: Outcome) -> bool:
    if isinstance(after, spec.Rejected):
        return True
    return not [*transition_faults(before, event, after), *state_faults(after)]


def recycle_that_forgets(l0: bool, l1: bool, slot: int) -> bool:
    """
    pre: -2 <= slot <= 8
    post: _
    """
    before, event = _state((l0, l1, True, True)), spec.Recycle("a", slot)
    return _lawful(before, event, broken_steps.forgetful_recycle(before, event))


def move_that_copies_nothing(l0: bool, target: int) -> bool:
    """
    pre: -2 <= target <= 8
    post: _
    """
    plan = Plan("a", 0, (1, 2), (Move(3, 5, target),), (), "dense")
    before, event = _state((l0, True, True, True)), spec.MoveTokens(plan)
    return _lawful(before, event, broken_steps.copyless_move(before, event))


def eviction_of_any_token(l0: bool, token: int) -> bool:
    """
    pre: -2 <= token <= 8
    post: _
    """
    before = _state((l0, True, True, True))
    after = broken_steps.evicting_the_last(before, spec.Evict("a", (token,)))
    return isinstance(after, spec.Rejected) or after.tables[0].live[-1]


def commit_before_the_wait(c0: bool, c1: bool) -> bool:
    """
    post: _
    """
    before = flying(c0=c0, c1=c1)
    return _lawful(before, COMMIT, broken_steps.early_commit(before, COMMIT))


def commit_after_a_wait_for_some(c0: bool, c1: bool) -> bool:
    """
    The wait is over as soon as one of the copies has happened.
    pre: c0 or c1
    post: _
    """
    state = flying(c0=c0, c1=c1)
    hasty = replace(state, flights=(replace(state.flights[0], waited=True),))
    return _lawful(hasty, COMMIT, spec.step(hasty, COMMIT))


def finish_that_frees_at_once(c0: bool, c1: bool) -> bool:
    """
    post: _
    """
    before, event = flying(c0=c0, c1=c1), spec.Finish("a")
    return _lawful(before, event, broken_steps.unfenced_finish(before, event))


def recycling_beside_a_plan(slot: int) -> bool:
    """
    pre: -2 <= slot <= 10
    post: _
    """
    before, event = flying(), spec.Recycle("a", slot)
    return _lawful(before, event, broken_steps.recycling_in_flight(before, event))


def slots_after_a_forgotten_clear(s0: int, s1: int, s2: int, s3: int) -> tuple[int, ...]:
    """
    pre: s0 >= 0 and s1 >= 0 and s2 >= 0 and s3 >= 0
    pre: s0 != s1 and s0 != s2 and s0 != s3 and s1 != s2 and s1 != s3 and s2 != s3
    post: all(_[i] != _[j] for i in range(5) for j in range(i))
    """
    return (*RequestState("a", (), (s0, s1, s2, s3), (True, False, True, True)).slots, s1)


def split_that_swaps(block: int, offset: int, size: int) -> tuple[int, int]:
    """
    pre: block >= 0
    pre: 0 <= offset < size
    post: _ == (block, offset)
    """
    slot = block * size + offset
    return slot % size, slot // size


def blocks_for_one_too_many(tokens: int, size: int) -> int:
    """
    pre: tokens >= 0
    pre: size >= 1
    post: (_ - 1) * size < tokens
    """
    return tokens // size + 1


def runs_that_touch(s0: int, s1: int) -> list[tuple[int, int]]:
    """
    pre: 0 <= s0 < s1
    post: all(a + n < b for (a, n), (b, _n) in zip(_, _[1:]))
    """
    return [(s0, 1), (s1, 1)]
