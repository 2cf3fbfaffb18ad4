"""An event that is not allowed is rejected with the reason a caller needs, and nothing else
happens. One small history per reason; blocks of 2 slots, 7 blocks, block 7 is headroom."""

from __future__ import annotations

from typing import get_args

import pytest

import vtoken_spec as spec
from vtoken_spec import (
    Abort,
    Allocate,
    Append,
    Attend,
    Cache,
    Commit,
    Copy,
    Evict,
    Finish,
    Hit,
    Move,
    MoveTokens,
    Plan,
    Preempt,
    Prepare,
    ReadSet,
    Reason,
    Recycle,
    Release,
    Reserve,
    Resume,
    Uncache,
    Unreserve,
    Wait,
)

FIVE = (Allocate("a", (1, 2, 3)), Append("a", (2, 3, 4, 5, 6)))
"""Request a: tokens 0-4 in blocks 1-3; slot 7 is unused."""
SHARED = (*FIVE, Cache((1, 2)), Hit("b", (1,)), Allocate("b", (4,)), Append("b", (8,)))
"""Block 1 is a's and b's, block 2 is cached."""


def run(*events: spec.Event) -> spec.State:
    state = spec.State.initial(num_blocks=8, block_size=2, headroom=(7,))
    for event in events:
        after = spec.step(state, event)
        assert isinstance(after, spec.State), after
        state = after
    return state


def plan(*moves: tuple[int, int, int], **changes: object) -> MoveTokens:
    """A dense plan for request a of `FIVE`."""
    fields: dict[str, object] = {
        "req_id": "a",
        "version": 0,
        "blocks": (1, 2, 3),
        "released": (),
        "purpose": "dense",
    }
    fields.update(changes)
    return MoveTokens(Plan(moves=tuple(Move(*move) for move in moves), **fields))  # type: ignore[arg-type]


def prepared(*moves: tuple[int, int, int], **changes: object) -> Prepare:
    """A plan for request a of `FIVE` that goes into flight."""
    return Prepare(plan(*moves, **{"purpose": "reclaim", **changes}).plan)


FLYING = (*FIVE, Evict("a", (1, 2)), prepared((3, 5, 3), released=(2,)))
"""Token 3 is being copied from slot 5 to slot 3; block 2 will go."""
LANDED = (*FLYING, Copy("a", 0))
WAITED = (*LANDED, Wait("a"))
LEFT = (
    *SHARED[:-2],
    Uncache((1, 2)),
    Evict("a", (2, 3)),
    prepared((0, 2, 4), (1, 3, 5), released=(1,)),
    Finish("a"),
    *SHARED[-2:],
)
"""Copies out of block 1 may be running for a, which is gone; the block is b's alone."""
OLD_PLACES = ReadSet("a", (2, 5, 6), (4,))
"""What attention is given of `FLYING`."""


CASES: list[tuple[Reason, tuple[spec.Event, ...], spec.Event]] = [
    (Reason.UNKNOWN_REQUEST, (), Evict("a", (0,))),
    (Reason.UNKNOWN_REQUEST, (), Append("a", (2,))),
    (Reason.UNKNOWN_REQUEST, (), Recycle("a", 2)),
    (Reason.UNKNOWN_REQUEST, (), Release("a", (1,))),
    (Reason.UNKNOWN_REQUEST, (), Attend(ReadSet("a", (), ()))),
    (Reason.UNKNOWN_REQUEST, (), plan()),
    (Reason.UNKNOWN_REQUEST, (), prepared((4, 6, 7))),
    (Reason.UNKNOWN_REQUEST, (*FIVE, Finish("a")), Finish("a")),
    (Reason.UNKNOWN_REQUEST, (*FIVE, Preempt("a")), Preempt("a")),
    (Reason.UNKNOWN_REQUEST, (*FIVE, Preempt("a")), Append("a", (2,))),
    (Reason.UNKNOWN_REQUEST, (*FIVE, Preempt("a")), plan((4, 6, 7))),
    (Reason.UNKNOWN_REQUEST, (*FIVE, Preempt("a"), Finish("a")), Finish("a")),
    (Reason.NOTHING_TO_DO, (), Allocate("a", ())),
    (Reason.NOTHING_TO_DO, (), Hit("a", ())),
    (Reason.NOTHING_TO_DO, (), Reserve(())),
    (Reason.NOTHING_TO_DO, (), Unreserve(())),
    (Reason.NOTHING_TO_DO, FIVE, Append("a", ())),
    (Reason.NOTHING_TO_DO, FIVE, Evict("a", ())),
    (Reason.NOTHING_TO_DO, FIVE, Release("a", ())),
    (Reason.NOTHING_TO_DO, FIVE, Cache(())),
    (Reason.NOTHING_TO_DO, FIVE, Uncache(())),
    (Reason.NOTHING_TO_DO, FIVE, plan()),
    (Reason.NOTHING_TO_DO, (*FIVE, Evict("a", (0, 1))), prepared(released=(1,))),
    (Reason.NOTHING_TO_DO, WAITED, Wait("a")),
    (Reason.DUPLICATE, (), Allocate("a", (1, 1))),
    (Reason.DUPLICATE, SHARED, Hit("c", (1, 1))),
    (Reason.DUPLICATE, (), Reserve((1, 1))),
    (Reason.DUPLICATE, (), Unreserve((7, 7))),
    (Reason.DUPLICATE, FIVE, Evict("a", (1, 1))),
    (Reason.DUPLICATE, FIVE, Cache((1, 1))),
    (Reason.DUPLICATE, SHARED, Uncache((1, 1))),
    (Reason.DUPLICATE, (*FIVE, Evict("a", (0, 1))), Release("a", (1, 1))),
    (Reason.UNKNOWN_TOKEN, FIVE, Evict("a", (0, -1))),
    (Reason.NOT_COMPUTED, FIVE, Evict("a", (0, 5))),
    (Reason.NOT_COMPUTED, (Allocate("a", (1,)),), Evict("a", (0,))),
    (Reason.DEAD_TOKEN, (*FIVE, Evict("a", (1,))), Evict("a", (0, 1))),
    (Reason.LAST_TOKEN, FIVE, Evict("a", (0, 4))),
    (Reason.BAD_SLOTS, (Allocate("a", (1,)),), Append("a", (3,))),
    (Reason.BAD_SLOTS, (Allocate("a", (1,)),), Append("a", (2, 3, 4))),
    (Reason.BAD_SLOTS, (*FIVE, Allocate("a", (4,))), Append("a", (7, 9))),
    (Reason.BAD_SLOTS, (*FIVE, Evict("a", (0,))), Append("a", (2,))),
    (Reason.BAD_HIT, SHARED, Hit("c", (2,))),
    (Reason.BAD_HIT, SHARED, Hit("c", (2, 1))),
    (Reason.BAD_HIT, SHARED, Hit("a", (1,))),
    (Reason.BAD_HIT, (*SHARED, Allocate("c", (5,))), Hit("c", (1,))),
    (Reason.NOT_CACHED, FIVE, Hit("b", (1,))),
    (Reason.NOT_CACHED, SHARED, Hit("c", (1, 3))),
    (Reason.NOT_CACHED, FIVE, Uncache((1,))),
    (Reason.BAD_READ, FIVE, Attend(ReadSet("a", (2, 3, 4, 5), (4,)))),
    (Reason.BAD_READ, FIVE, Attend(ReadSet("a", (2, 3, 4, 5, 6, 7), (4,)))),
    (Reason.BAD_READ, FIVE, Attend(ReadSet("a", (2, 3, 4, 5, 6), (5,)))),
    (Reason.BAD_READ, WAITED, Attend(ReadSet("a", (2, 3, 6), (4,)))),
    (Reason.BAD_READ, (*WAITED, Commit("a")), Attend(OLD_PLACES)),
    (Reason.NOT_A_HOLE, FIVE, Recycle("a", 3)),
    (Reason.NOT_A_HOLE, FIVE, Recycle("a", 7)),
    (Reason.PROTECTED_BLOCK, (*SHARED, Evict("a", (2,))), Recycle("a", 4)),
    (Reason.PROTECTED_BLOCK, (*SHARED, Evict("b", (1,))), Recycle("b", 3)),
    (Reason.PROTECTED_BLOCK, (*SHARED, Evict("a", (2,))), plan((4, 6, 4))),
    (Reason.PROTECTED_BLOCK, (*SHARED, Uncache((1,)), Evict("a", (0,))), plan((4, 6, 2))),
    (Reason.NOT_FREE, FIVE, Allocate("b", (1,))),
    (Reason.NOT_FREE, FIVE, Reserve((1,))),
    (Reason.NOT_FREE, (), Allocate("a", (7,))),
    (Reason.NOT_FREE, (), Reserve((7,))),
    (Reason.NOT_FREE, (), Allocate("a", (0,))),
    (Reason.NOT_FREE, (), Allocate("a", (-1,))),
    (Reason.NOT_FREE, (*FLYING, Finish("a")), Allocate("b", (2,))),
    (Reason.NOT_FREE, (*LANDED, Finish("a")), Allocate("b", (1,))),
    (Reason.NOT_OWNED, FIVE, Recycle("a", 8)),
    (Reason.NOT_OWNED, FIVE, Recycle("a", -1)),
    (Reason.NOT_OWNED, FIVE, Release("a", (4,))),
    (Reason.NOT_OWNED, FIVE, Cache((4,))),
    (Reason.NOT_RESERVED, FIVE, Unreserve((1,))),
    (Reason.NOT_RESERVED, FIVE, Unreserve((4,))),
    (Reason.LIVE_BLOCK, (*FIVE, Evict("a", (0,))), Release("a", (1,))),
    (Reason.CACHED_BLOCK, SHARED, Cache((1,))),
    (Reason.CACHED_BLOCK, (*FIVE, Cache((1,)), Finish("a")), Allocate("b", (1,))),
    (Reason.CACHED_BLOCK, (*FIVE, Cache((1,)), Finish("a")), Reserve((1,))),
    (Reason.NOT_CACHEABLE, FIVE, Cache((3,))),
    (Reason.NOT_CACHEABLE, (*FIVE, Evict("a", (0,))), Cache((2,))),
    (Reason.STALE_PLAN, FIVE, plan((4, 6, 7), version=1)),
    (Reason.STALE_PLAN, FIVE, plan((4, 6, 7), blocks=(2, 1, 3))),
    (Reason.STALE_PLAN, (*FIVE, Evict("a", (1,)), Recycle("a", 3)), plan((4, 6, 7))),
    (Reason.STALE_PLAN, (*FIVE, Allocate("a", (4,))), plan((4, 6, 7))),
    (Reason.STALE_PLAN, FIVE, prepared((4, 6, 7), version=1)),
    (Reason.BAD_SOURCE, FIVE, plan((4, 5, 7))),
    (Reason.BAD_SOURCE, (*FIVE, Evict("a", (0,))), plan((0, 2, 7))),
    (Reason.BAD_SOURCE, FIVE, plan((9, 6, 7))),
    (Reason.BAD_SOURCE, (*FIVE, Evict("a", (0,))), plan((4, 6, 7), (4, 6, 2))),
    (Reason.BAD_TARGET, FIVE, plan((4, 6, 5))),
    (Reason.BAD_TARGET, FIVE, plan((4, 6, 6))),
    (Reason.BAD_TARGET, FIVE, plan((4, 6, 8))),
    (Reason.BAD_TARGET, FIVE, plan((4, 6, 1))),
    (Reason.BAD_TARGET, FIVE, plan((3, 5, 7), (4, 6, 7))),
    (
        Reason.BAD_TARGET,
        (*LEFT, Evict("b", (0,))),
        plan((2, 8, 2), req_id="b", blocks=(1, 4)),
    ),
    (Reason.BAD_RELEASE, FIVE, plan(released=(1,))),
    (Reason.BAD_RELEASE, FIVE, plan((4, 6, 14), released=(4,))),
    (Reason.BAD_RELEASE, FIVE, plan((4, 6, 14), released=(3, 3))),
    (Reason.BAD_ORDER, FIVE, plan((4, 6, 7), order=(4,))),
    (Reason.BAD_ORDER, FIVE, plan((4, 6, 7), order=(3, 3, 4))),
    (Reason.NO_GAIN, FIVE, plan((4, 6, 7), purpose="reclaim")),
    (Reason.NO_GAIN, FIVE, plan((4, 6, 14), released=(3,), purpose="reclaim")),
    (Reason.NO_GAIN, (*FIVE, Evict("a", (1,))), prepared((3, 5, 3))),
    (Reason.AT_THE_END, (*FIVE, Evict("a", (0,))), prepared((1, 3, 7), released=(1,))),
    (Reason.AT_THE_END, (*FIVE, Evict("a", (0,))), prepared((4, 6, 2), released=(3,))),
    (
        Reason.AT_THE_END,
        (*FIVE, Evict("a", (1, 2))),
        prepared((3, 5, 3), released=(2,), order=(1, 3)),
    ),
    (Reason.IN_FLIGHT, FLYING, prepared((3, 5, 3), released=(2,))),
    (Reason.IN_FLIGHT, FLYING, plan((4, 6, 7))),
    (Reason.IN_FLIGHT, FLYING, Recycle("a", 4)),
    (Reason.IN_FLIGHT, FLYING, Release("a", (2,))),
    (Reason.IN_FLIGHT, WAITED, Recycle("a", 4)),
    (Reason.IN_FLIGHT, (*FLYING, Abort("a")), plan((4, 6, 7))),
    (
        Reason.IN_FLIGHT,
        (*FLYING, Finish("a"), Allocate("a", (4, 5)), Append("a", (8, 9)), Evict("a", (0,))),
        Recycle("a", 8),
    ),
    (Reason.NOT_IN_FLIGHT, FIVE, Copy("a", 0)),
    (Reason.NOT_IN_FLIGHT, FIVE, Wait("a")),
    (Reason.NOT_IN_FLIGHT, FIVE, Commit("a")),
    (Reason.NOT_IN_FLIGHT, FIVE, Abort("a")),
    (Reason.NOT_IN_FLIGHT, (*WAITED, Commit("a")), Commit("a")),
    (Reason.NOT_IN_FLIGHT, (*LANDED, Finish("a"), Wait("a")), Wait("a")),
    (Reason.NOT_IN_FLIGHT, (*WAITED, Finish("a")), Commit("a")),
    (Reason.ABORTED, (*FLYING, Abort("a")), Abort("a")),
    (Reason.ABORTED, (*LANDED, Abort("a")), Commit("a")),
    (Reason.ABORTED, (*LANDED, Preempt("a"), Resume("a")), Commit("a")),
    (Reason.BAD_COPY, FLYING, Copy("a", -1)),
    (Reason.BAD_COPY, FLYING, Copy("a", 1)),
    (Reason.BAD_COPY, LANDED, Copy("a", 0)),
    (Reason.COPY_PENDING, FLYING, Wait("a")),
    (Reason.COPY_PENDING, (*FLYING, Finish("a")), Wait("a")),
    (Reason.COPY_PENDING, FLYING, Attend(ReadSet("a", (2, 3, 5, 6), (4,)))),
    (Reason.COPY_PENDING, LANDED, Attend(ReadSet("a", (2, 3, 6), (4,)))),
    (Reason.COPY_PENDING, (*LEFT, Evict("b", (0,))), Recycle("b", 2)),
    (
        Reason.COPY_PENDING,
        (*LEFT, Evict("b", (0, 1)), plan(req_id="b", blocks=(1, 4), order=(4, 1))),
        Append("b", (9, 2)),
    ),
    (Reason.NOT_WAITED, FLYING, Commit("a")),
    (Reason.NOT_WAITED, LANDED, Commit("a")),
    (Reason.PREEMPTED, (*FIVE, Preempt("a")), Allocate("a", (1,))),
    (Reason.PREEMPTED, (*FIVE, Cache((1,)), Preempt("a")), Hit("a", (1,))),
    (Reason.NOT_PREEMPTED, (), Resume("a")),
    (Reason.NOT_PREEMPTED, FIVE, Resume("a")),
    (Reason.NOT_PREEMPTED, (*FIVE, Preempt("a"), Resume("a")), Resume("a")),
    (Reason.NOT_PREEMPTED, (*FIVE, Preempt("a"), Finish("a")), Resume("a")),
]


@pytest.mark.parametrize(("reason", "history", "event"), CASES)
def test_a_forbidden_event_is_rejected_with_its_reason(
    reason: Reason, history: tuple[spec.Event, ...], event: spec.Event
) -> None:
    answer = spec.step(run(*history), event)
    assert isinstance(answer, spec.Rejected), f"accepted: {event}"
    assert answer.reason is reason, answer.detail
    assert answer.detail.startswith(reason.value)


def test_every_reason_has_a_case() -> None:
    assert {reason for reason, _, _ in CASES} == set(Reason)


def test_every_event_has_a_case_and_a_pending_copy_stands_in_the_way_of_four() -> None:
    events = {type(event) for _, _, event in CASES}
    assert events == set(get_args(spec.Event))
    pending = {type(event) for reason, _, event in CASES if reason is Reason.COPY_PENDING}
    assert pending == {Wait, Attend, Recycle, Append}


def test_what_attention_is_given_of_a_plan_in_flight_is_accepted() -> None:
    """The control of the rejected reads."""
    for history in (FLYING, LANDED, WAITED):
        assert spec.step(run(*history), Attend(OLD_PLACES)) == run(*history)


@pytest.mark.parametrize("bad", [{"num_blocks": 1}, {"block_size": 0}, {"headroom": (0,)}])
def test_a_pool_that_cannot_exist_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no such pool"):
        spec.State.initial(**{"num_blocks": 4, "block_size": 2, **bad})  # type: ignore[arg-type]
