"""What a plan in flight does and keeps from others, on examples small enough to check by eye.

Blocks of 2 slots, 7 blocks, unless a test says otherwise.
"""

from __future__ import annotations

import pytest

import vtoken_spec as spec
from vtoken_spec import (
    NO_SLOT,
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
    Resume,
    Uncache,
    Wait,
)
from vtoken_spec.alphabet import ALLOWED, Bounds
from vtoken_spec.explore import progress_faults

SIX = (Allocate("a", (1, 2, 3)), Append("a", (2, 3, 4, 5, 6, 7)))
"""Request a: tokens 0-5 in blocks 1-3."""
HOLED = (*SIX, Evict("a", (1, 2)))
FILL = Plan("a", 0, (1, 2, 3), (Move(5, 7, 3), Move(4, 6, 4)), released=(3,), purpose="reclaim")
"""The tail of `HOLED` into its holes."""
COPIED = (Copy("a", 1), Copy("a", 0))
SPARSE = (*SIX, Evict("a", (1, 4)))
AWAY = Plan("a", 0, (1, 2, 3), (Move(0, 2, 12), Move(5, 7, 13)), released=(1, 3), purpose="reclaim")
"""Two half-empty blocks of `SPARSE` into block 6, which is headroom."""


def run(
    *events: spec.Event, blocks: int = 7, size: int = 2, headroom: tuple[int, ...] = ()
) -> spec.State:
    state = spec.State.initial(num_blocks=blocks, block_size=size, headroom=headroom)
    return then(state, *events)


def then(state: spec.State, *events: spec.Event) -> spec.State:
    for event in events:
        after = spec.step(state, event)
        assert isinstance(after, spec.State), after
        state = after
    return state


def refused(state: spec.State, event: spec.Event) -> Reason:
    answer = spec.step(state, event)
    assert isinstance(answer, spec.Rejected), f"accepted: {event}"
    return answer.reason


def seen(state: spec.State) -> list[int]:
    return [token for token, _ in spec.reads(state, "a")]


# From the preparation to the commit ---------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_prepared_copied_waited_for_and_committed_a_plan_does_what_it_does_at_once(
    order: tuple[int, ...],
) -> None:
    copies = tuple(Copy("a", index) for index in order)
    state = run(*HOLED, Prepare(FILL), *copies, Wait("a"), Commit("a"))
    assert state == run(*HOLED, MoveTokens(FILL))
    assert state.requests["a"].slots == (2, NO_SLOT, NO_SLOT, 5, 4, 3)


def test_attention_reads_the_old_places_until_the_commit_and_the_new_ones_after() -> None:
    old, new = Attend(ReadSet("a", (2, 5, 6, 7), (5,))), Attend(ReadSet("a", (2, 3, 4, 5), (5,)))
    state = run(*HOLED)
    for event in (Prepare(FILL), *COPIED, Wait("a")):
        state = then(state, event, old)
        assert refused(state, new) in (Reason.COPY_PENDING, Reason.BAD_READ)
    state = then(state, Commit("a"), new)
    assert refused(state, old) is Reason.BAD_READ


def test_tokens_and_blocks_gained_in_flight_stay_where_they_are() -> None:
    gained = (Allocate("a", (4,)), Append("a", (8,)))
    state = run(*HOLED, Prepare(FILL), Copy("a", 0), *gained, Copy("a", 1), Wait("a"), Commit("a"))
    table = state.requests["a"]
    assert table.blocks == (1, 2, 4)
    assert table.slots == (2, NO_SLOT, NO_SLOT, 5, 4, 3, 8)
    assert table.physical_len == 5
    assert dict(spec.reads(state, "a"))[6] == spec.Payload("a", 6)


def test_a_token_evicted_in_flight_does_not_move_and_goes_with_its_block() -> None:
    state = run(*HOLED, Prepare(FILL), *COPIED, Evict("a", (4,)), Wait("a"), Commit("a"))
    table = state.requests["a"]
    assert table.slots == (2, NO_SLOT, 4, 5, NO_SLOT, 3), "the hole at slot 4 is token 2's still"
    assert table.blocks == (1, 2)
    assert seen(state) == [0, 3, 5]


def test_where_no_token_moved_to_stays_a_hole() -> None:
    history = (*HOLED, Prepare(FILL), *COPIED, Allocate("a", (4,)), Append("a", (8,)))
    state = run(*history, Evict("a", (3, 4, 5)), Wait("a"), Commit("a"))
    table = state.requests["a"]
    assert table.blocks == (1, 2, 4)
    assert table.slots == (2, 3, 4, 5, NO_SLOT, NO_SLOT, 8)
    assert table.physical_len == 5


# Headroom -----------------------------------------------------------------------------------------


def test_headroom_is_held_in_flight_and_comes_first_at_the_commit() -> None:
    state = run(*SPARSE, Prepare(AWAY), headroom=(6,))
    assert (state.pool.headroom, state.pool.held) == (frozenset(), {6})
    assert state.pool.ref_count(6) == 0
    assert state.requests["a"].blocks == (1, 2, 3)
    gained = (Allocate("a", (4,)), Append("a", (8,)))
    state = then(state, *COPIED, *gained, Wait("a"), Commit("a"))
    assert state.requests["a"].blocks == (6, 2, 4)
    assert state.requests["a"].physical_len == 5
    assert (state.pool.headroom, state.pool.held) == (frozenset(), frozenset())
    assert (state.pool.ref_count(6), state.pool.free) == (1, {1, 3, 5})
    assert seen(state) == [0, 2, 3, 5, 6]


def test_a_commit_leaves_the_physical_end_in_its_block() -> None:
    """Nothing is trimmed: slot 7, which the newest token has left, is a hole before the end."""
    plan = Plan("a", 0, (1, 2, 3), (Move(3, 5, 2), Move(5, 7, 3)), released=(2,), purpose="reclaim")
    dead = (*SIX, Evict("a", (0, 1, 2)))
    state = run(*dead, Prepare(plan), *COPIED, Wait("a"), Commit("a"))
    assert (state.requests["a"].blocks, state.requests["a"].physical_len) == ((1, 3), 4)
    assert isinstance(spec.step(state, Recycle("a", 7)), spec.State)
    assert run(*dead, MoveTokens(plan)).requests["a"].physical_len == 3


def test_unused_slots_of_the_last_block_stay_unused() -> None:
    five = (Allocate("a", (1, 2, 3)), Append("a", (2, 3, 4, 5, 6)), Evict("a", (1, 2)))
    plan = Plan("a", 0, (1, 2, 3), (Move(0, 2, 12), Move(3, 5, 13)), (1, 2), "reclaim")
    state = run(*five, Prepare(plan), *COPIED, Wait("a"), Commit("a"), headroom=(6,))
    assert (state.requests["a"].blocks, state.requests["a"].physical_len) == ((6, 3), 3)
    assert refused(state, Recycle("a", 7)) is Reason.NOT_A_HOLE
    assert isinstance(spec.step(state, Append("a", (7,))), spec.State)


# Aborts -------------------------------------------------------------------------------------------


def test_an_abort_before_the_wait_keeps_everything_held_until_the_wait() -> None:
    state = run(*SPARSE, Prepare(AWAY), Copy("a", 0), Abort("a"), headroom=(6,))
    assert (state.pool.headroom, state.pool.held) == (frozenset(), {6})
    assert refused(state, Wait("a")) is Reason.COPY_PENDING
    assert refused(state, Commit("a")) is Reason.ABORTED
    state = then(state, Copy("a", 1))
    assert state.pool.held == {6}
    assert then(state, Wait("a")) == run(*SPARSE, headroom=(6,))


def test_an_abort_after_the_wait_gives_the_headroom_back_at_once() -> None:
    flown = (Prepare(AWAY), *COPIED, Wait("a"))
    assert run(*SPARSE, *flown, Abort("a"), headroom=(6,)) == run(*SPARSE, headroom=(6,))


def test_an_aborted_plan_keeps_its_table_from_being_restructured_until_the_wait() -> None:
    state = run(*HOLED, Prepare(FILL), Abort("a"))
    for event in (Recycle("a", 3), Prepare(FILL), MoveTokens(FILL), spec.Release("a", (1,))):
        assert refused(state, event) is Reason.IN_FLIGHT
    state = then(state, *COPIED, Wait("a"))
    assert isinstance(spec.step(state, Recycle("a", 3)), spec.State)
    assert isinstance(spec.step(state, Prepare(FILL)), spec.State)


# Requests that end in flight ----------------------------------------------------------------------


@pytest.mark.parametrize("end", [Finish("a"), Preempt("a")])
def test_blocks_of_a_request_that_ends_in_flight_are_held_until_the_wait(end: spec.Event) -> None:
    one = Plan("a", 0, (1, 2, 3), (Move(3, 5, 3),), released=(2,), purpose="reclaim")
    state = run(*HOLED, Prepare(one), end)
    assert "a" not in state.requests
    assert state.pool.held == {1, 2}
    assert state.pool.free == {3, 4, 5, 6}, "no copy touches block 3"
    assert sum(state.pool.refs) == 0
    state = then(state, Copy("a", 0))
    assert state.pool.held == {1, 2}
    state = then(state, Wait("a"))
    assert state == run(*SIX, end)


@pytest.mark.parametrize("end", [Finish("a"), Preempt("a")])
def test_a_request_that_ends_after_the_wait_leaves_nothing_held(end: spec.Event) -> None:
    flown = (Prepare(AWAY), *COPIED, Wait("a"), end)
    assert run(*SPARSE, *flown, headroom=(6,)) == run(*SIX, end, headroom=(6,))


def test_headroom_of_a_request_that_ends_in_flight_comes_back_as_headroom() -> None:
    state = run(*SPARSE, Prepare(AWAY), Finish("a"), headroom=(6,))
    assert (state.pool.held, state.pool.free) == ({1, 3, 6}, {2, 4, 5})
    assert then(state, *COPIED, Wait("a")) == run(headroom=(6,))


def test_a_request_can_be_back_while_copies_of_its_former_self_are_running() -> None:
    """S10 in flight: its table is empty, and the old copies land in nothing that is its own."""
    state = run(*HOLED, Prepare(FILL), Preempt("a"), Resume("a"))
    assert state.requests["a"] == spec.RequestState("a")
    assert state.pool.held == {1, 2, 3}
    state = then(state, Allocate("a", (4,)), Append("a", (8, 9)), *COPIED)
    assert refused(state, Commit("a")) is Reason.ABORTED
    state = then(state, Wait("a"))
    assert (state.pool.free, state.pool.held) == ({1, 2, 3, 5, 6}, frozenset())
    assert spec.reads(state, "a") == [(0, spec.Payload("a", 0)), (1, spec.Payload("a", 1))]


# Sharing ------------------------------------------------------------------------------------------


def test_the_source_of_a_running_copy_is_kept_from_the_only_owner_that_is_left() -> None:
    """Regression: a copies out of a block that it shares with b, and finishes with the copy still
    running; b, now the block's only owner, must not write the source before the wait. Blocks of
    1 slot, 3 of them."""
    state = run(
        Allocate("a", (1,)),
        Append("a", (1,)),
        Allocate("a", (2,)),
        Append("a", (2,)),
        Cache((1,)),
        Hit("b", (1,)),
        Uncache((1,)),
        Allocate("a", (3,)),
        MoveTokens(Plan("a", 0, (1, 2, 3), (Move(1, 2, 3),), (), "dense")),
        Prepare(Plan("a", 1, (1, 2, 3), (Move(0, 1, 2),), (1,), "reclaim")),
        Finish("a"),
        Allocate("b", (3,)),
        Append("b", (3,)),
        Evict("b", (0,)),
        blocks=4,
        size=1,
    )
    assert (state.pool.refs[1], state.pool.held) == (1, {2})
    recycle, onto = Recycle("b", 1), Plan("b", 0, (1, 3), (Move(1, 3, 1),), (3,), "reclaim")
    turn = MoveTokens(Plan("b", 0, (1, 3), (), (), "dense", order=(3, 1)))
    append = Append("b", (1,))
    landed = then(state, Copy("a", 0))
    for running in (state, landed):
        assert refused(running, recycle) is Reason.COPY_PENDING
        assert refused(running, MoveTokens(onto)) is Reason.BAD_TARGET
        assert refused(then(running, turn), append) is Reason.COPY_PENDING
    waited = then(landed, Wait("a"))
    assert isinstance(spec.step(waited, recycle), spec.State)
    assert isinstance(spec.step(waited, MoveTokens(onto)), spec.State)
    assert isinstance(spec.step(then(waited, turn), append), spec.State)


def test_a_plan_copies_out_of_a_shared_block_and_leaves_the_other_owner_alone() -> None:
    shared = (*SIX, Cache((1,)), Hit("b", (1,)), Evict("a", (2, 3)))
    plan = Plan("a", 0, (1, 2, 3), (Move(0, 2, 4), Move(1, 3, 5)), released=(1,), purpose="reclaim")
    state = run(*shared, Prepare(plan), *COPIED, Wait("a"), Commit("a"))
    assert state.pool.refs == (0, 1, 1, 1, 0, 0, 0)
    assert spec.reads(state, "b") == [(0, spec.Payload("a", 0)), (1, spec.Payload("a", 1))]
    assert seen(state) == [0, 1, 4, 5]


def test_a_copy_for_a_request_that_is_gone_can_delay_what_comes_back_but_not_for_ever() -> None:
    """L10 with blocks of 3: two of b's three holes are being read by copies for a, which has
    finished; until the wait no plan of b frees a block, and after it one does."""
    state = run(
        Allocate("a", (1, 2, 3)),
        Append("a", tuple(range(3, 12))),
        Cache((1, 2)),
        Hit("b", (1, 2)),
        Uncache((1, 2)),
        Evict("a", (1, 2, 4, 5, 6, 7)),
        Prepare(Plan("a", 0, (1, 2, 3), (Move(0, 3, 9), Move(3, 6, 10)), (1, 2), "reclaim")),
        Finish("a"),
        Allocate("b", (4,)),
        Append("b", (12, 13, 14)),
        Evict("b", (0, 3, 6)),
        size=3,
    )
    bounds = Bounds(("b",))
    assert spec.reclaimable_blocks(state, state.requests["b"]) == 1
    assert not list(ALLOWED["preparations"](state, bounds))
    assert not list(progress_faults(state, bounds, spec.step))
    waited = then(state, *COPIED, Wait("a"))
    assert list(ALLOWED["preparations"](waited, bounds))
