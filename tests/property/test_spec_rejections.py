"""An event that is not allowed is rejected with the reason a caller needs, and nothing else
happens. One small history per reason; blocks of 2 slots, 7 blocks, block 7 is headroom."""

from __future__ import annotations

from dataclasses import replace

import pytest

import vtoken_spec as spec
from vtoken_spec import Append, Cache, Evict, Move, MoveTokens, Plan, Reason, Recycle, Release

FIVE = Append("a", (2, 3, 4, 5, 6), (1, 2, 3))
"""Request a: tokens 0-4 in blocks 1-3; slot 7 is unused."""
SHARED = (FIVE, Cache((1, 2)), Append("b", (2, 3, 8), (1, 4), adopted=2))
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


def replaced_order(event: spec.MoveTokens, order: tuple[int, ...]) -> spec.MoveTokens:
    """The same plan with another block order."""
    return spec.MoveTokens(replace(event.plan, order=order))


CASES: list[tuple[Reason, tuple[spec.Event, ...], spec.Event]] = [
    (Reason.UNKNOWN_REQUEST, (), Evict("a", (0,))),
    (Reason.UNKNOWN_REQUEST, (), Recycle("a", 2)),
    (Reason.UNKNOWN_REQUEST, (), Release("a", (1,))),
    (Reason.UNKNOWN_REQUEST, (), plan()),
    (Reason.UNKNOWN_REQUEST, (FIVE, spec.Finish("a")), spec.Finish("a")),
    (Reason.UNKNOWN_REQUEST, (FIVE, spec.Preempt("a")), spec.Preempt("a")),
    (Reason.UNKNOWN_REQUEST, (FIVE, spec.Preempt("a")), plan((4, 6, 7))),
    (Reason.NOTHING_TO_DO, (), Append("a", (), (1,))),
    (Reason.NOTHING_TO_DO, (FIVE,), Evict("a", ())),
    (Reason.NOTHING_TO_DO, (FIVE,), Release("a", ())),
    (Reason.NOTHING_TO_DO, (FIVE,), Cache(())),
    (Reason.NOTHING_TO_DO, (FIVE,), spec.Uncache(())),
    (Reason.NOTHING_TO_DO, (FIVE,), plan()),
    (Reason.DUPLICATE, (), Append("a", (2, 3, 4), (1, 1))),
    (Reason.DUPLICATE, (FIVE,), Evict("a", (1, 1))),
    (Reason.DUPLICATE, (FIVE,), Cache((1, 1))),
    (Reason.DUPLICATE, (FIVE, Evict("a", (0, 1))), Release("a", (1, 1))),
    (Reason.UNKNOWN_TOKEN, (FIVE,), Evict("a", (0, -1))),
    (Reason.NOT_COMPUTED, (FIVE,), Evict("a", (0, 5))),
    (Reason.DEAD_TOKEN, (FIVE, Evict("a", (1,))), Evict("a", (0, 1))),
    (Reason.LAST_TOKEN, (FIVE,), Evict("a", (0, 4))),
    (Reason.BAD_SLOTS, (), Append("a", (3,), (1,))),
    (Reason.BAD_SLOTS, (), Append("a", (2, 3, 4), (1,))),
    (Reason.BAD_SLOTS, (FIVE,), Append("a", (7, 9), (4,))),
    (Reason.BAD_SLOTS, (FIVE, Evict("a", (0,))), Append("a", (2,))),
    (Reason.BAD_ADOPTION, SHARED, Append("c", (2,), (1,), adopted=1)),
    (Reason.BAD_ADOPTION, SHARED, Append("c", (4, 5), (2,), adopted=2)),
    (Reason.BAD_ADOPTION, SHARED, Append("c", (3, 2), (1,), adopted=2)),
    (Reason.BAD_ADOPTION, SHARED, Append("c", (2, 3), (1,), adopted=-2)),
    (Reason.BAD_ADOPTION, (FIVE, Cache((1,))), Append("a", (2, 3), (1,), adopted=2)),
    (Reason.NOT_CACHED, (FIVE,), Append("b", (2, 3), (1,), adopted=2)),
    (Reason.NOT_CACHED, (FIVE,), spec.Uncache((1,))),
    (Reason.NOT_A_HOLE, (FIVE,), Recycle("a", 3)),
    (Reason.NOT_A_HOLE, (FIVE,), Recycle("a", 7)),
    (Reason.PROTECTED_BLOCK, (*SHARED, Evict("a", (2,))), Recycle("a", 4)),
    (Reason.PROTECTED_BLOCK, (*SHARED, Evict("b", (1,))), Recycle("b", 3)),
    (Reason.PROTECTED_BLOCK, (*SHARED, Evict("a", (2,))), plan((4, 6, 4))),
    (Reason.PROTECTED_BLOCK, (*SHARED, spec.Uncache((1,)), Evict("a", (0,))), plan((4, 6, 2))),
    (Reason.NOT_FREE, (FIVE,), Append("b", (2,), (1,))),
    (Reason.NOT_FREE, (), Append("a", (14,), (7,))),
    (Reason.NOT_FREE, (), Append("a", (0,), (0,))),
    (Reason.NOT_FREE, (), Append("a", (-2,), (-1,))),
    (Reason.NOT_FREE, (FIVE, Evict("a", (0,))), Recycle("a", 2, (3,))),
    (Reason.NOT_OWNED, (FIVE,), Recycle("a", 8)),
    (Reason.NOT_OWNED, (FIVE,), Recycle("a", -1)),
    (Reason.NOT_OWNED, (FIVE,), Release("a", (4,))),
    (Reason.NOT_OWNED, (FIVE,), Cache((4,))),
    (Reason.LIVE_BLOCK, (FIVE, Evict("a", (0,))), Release("a", (1,))),
    (Reason.CACHED_BLOCK, SHARED, Cache((1,))),
    (Reason.CACHED_BLOCK, (FIVE, Cache((1,)), spec.Finish("a")), Append("b", (2,), (1,))),
    (Reason.NOT_CACHEABLE, (FIVE,), Cache((3,))),
    (Reason.NOT_CACHEABLE, (FIVE, Evict("a", (0,))), Cache((2,))),
    (Reason.STALE_PLAN, (FIVE,), plan((4, 6, 7), version=1)),
    (Reason.STALE_PLAN, (FIVE,), plan((4, 6, 7), blocks=(2, 1, 3))),
    (Reason.STALE_PLAN, (FIVE, Evict("a", (1,)), Recycle("a", 3)), plan((4, 6, 7))),
    (Reason.BAD_SOURCE, (FIVE,), plan((4, 5, 7))),
    (Reason.BAD_SOURCE, (FIVE, Evict("a", (0,))), plan((0, 2, 7))),
    (Reason.BAD_SOURCE, (FIVE,), plan((9, 6, 7))),
    (Reason.BAD_SOURCE, (FIVE, Evict("a", (0,))), plan((4, 6, 7), (4, 6, 2))),
    (Reason.BAD_TARGET, (FIVE,), plan((4, 6, 5))),
    (Reason.BAD_TARGET, (FIVE,), plan((4, 6, 6))),
    (Reason.BAD_TARGET, (FIVE,), plan((4, 6, 8))),
    (Reason.BAD_TARGET, (FIVE,), plan((4, 6, 1))),
    (Reason.BAD_TARGET, (FIVE,), plan((3, 5, 7), (4, 6, 7))),
    (Reason.BAD_RELEASE, (FIVE,), plan(released=(1,))),
    (Reason.BAD_RELEASE, (FIVE,), plan((4, 6, 14), released=(4,))),
    (Reason.BAD_RELEASE, (FIVE,), plan((4, 6, 14), released=(3, 3))),
    (Reason.BAD_ORDER, (FIVE,), replaced_order(plan((4, 6, 7)), (4,))),
    (Reason.BAD_ORDER, (FIVE,), replaced_order(plan((4, 6, 7)), (3, 3, 4))),
    (Reason.NO_GAIN, (FIVE,), plan((4, 6, 7), purpose="reclaim")),
    (Reason.NO_GAIN, (FIVE,), plan((4, 6, 14), released=(3,), purpose="reclaim")),
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


@pytest.mark.parametrize("bad", [{"num_blocks": 1}, {"block_size": 0}, {"headroom": (0,)}])
def test_a_pool_that_cannot_exist_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no such pool"):
        spec.State.initial(**{"num_blocks": 4, "block_size": 2, **bad})  # type: ignore[arg-type]
