"""What each allowed event does, on examples small enough to check by eye. Blocks of 2 slots."""

from __future__ import annotations

import vtoken_spec as spec
from vtoken_spec import (
    NO_SLOT,
    Allocate,
    Append,
    Cache,
    Evict,
    Hit,
    Move,
    MoveTokens,
    Plan,
    Recycle,
    Release,
)

SIX = (Allocate("a", (1, 2, 3)), Append("a", (2, 3, 4, 5, 6, 7)))
"""Request a: tokens 0-5 in blocks 1-3."""
SHARED = (*SIX, Cache((1,)), Hit("b", (1,)), Allocate("b", (4,)), Append("b", (8,)))
"""Block 1 is a's and b's; b has token 2 of its own in block 4."""


def run(*events: spec.Event, headroom: tuple[int, ...] = ()) -> spec.State:
    state = spec.State.initial(num_blocks=7, block_size=2, headroom=headroom)
    for event in events:
        after = spec.step(state, event)
        assert isinstance(after, spec.State), after
        state = after
    return state


def table(state: spec.State, req_id: str = "a") -> spec.RequestState:
    return state.requests[req_id]


def seen(state: spec.State, req_id: str = "a") -> list[int]:
    return [token for token, _ in spec.reads(state, req_id)]


def test_eviction_changes_liveness_only_and_leaves_holes() -> None:
    before, after = run(*SIX), run(*SIX, Evict("a", (1, 2)))
    assert table(after).slots == table(before).slots
    assert table(after).physical_len == 6
    assert after.pool == before.pool
    assert after.memory == before.memory
    assert seen(after) == [0, 3, 4, 5]


def test_releasing_a_middle_block_shortens_the_physical_order_by_a_whole_block() -> None:
    state = run(*SIX, Evict("a", (2, 3)), Release("a", (2,)))
    assert table(state).blocks == (1, 3)
    assert table(state).physical_len == 4
    assert table(state).slots == (2, 3, NO_SLOT, NO_SLOT, 6, 7)
    assert 2 in state.pool.free


def test_releasing_the_last_block_takes_only_what_was_used_of_it() -> None:
    newest_in_block_1 = (Evict("a", (0, 2)), Recycle("a", 2), Evict("a", (3, 4)))
    five = (Allocate("a", (1, 2, 3)), Append("a", (2, 3, 4, 5, 6)))
    state = run(*five, *newest_in_block_1)
    state = spec.step(state, Release("a", (3,)))  # type: ignore[assignment]
    assert table(state).physical_len == 4
    state = spec.step(state, Release("a", (2,)))  # type: ignore[assignment]
    assert table(state).physical_len == 2
    assert table(state).blocks == (1,)
    assert seen(state) == [1, 5]


def test_a_recycled_hole_reclaims_the_dead_token_that_left_it() -> None:
    state = run(*SIX, Evict("a", (1,)), Recycle("a", 3))
    assert table(state).slots == (2, NO_SLOT, 4, 5, 6, 7, 3)
    assert table(state).physical_len == 6
    assert spec.read_set(state, "a", queries=1).slots == (2, 3, 4, 5, 6, 7)
    assert seen(state) == [0, 2, 3, 4, 5, 6]


def test_a_tail_fill_moves_payloads_returns_the_block_and_trims_the_end() -> None:
    moves = (Move(5, 7, 3), Move(4, 6, 4))
    plan = Plan("a", 0, (1, 2, 3), moves, released=(3,), purpose="reclaim")
    state = run(*SIX, Evict("a", (1, 2)), MoveTokens(plan))
    assert table(state).blocks == (1, 2)
    assert table(state).slots == (2, NO_SLOT, NO_SLOT, 5, 4, 3)
    assert table(state).physical_len == 4
    assert state.memory[3] == spec.Payload("a", 5)
    assert state.memory[6] is None
    assert state.pool.free == {3, 4, 5, 6}


def test_a_dense_plan_without_moves_trims_dead_tokens_off_the_end() -> None:
    history = (*SIX, Evict("a", (0,)), Recycle("a", 2), Evict("a", (4, 5)))
    plan = Plan("a", 1, (1, 2, 3), (), released=(), purpose="dense")
    state = run(*history, MoveTokens(plan))
    assert table(state).physical_len == 4
    assert table(state).blocks == (1, 2, 3)
    assert table(state).slots == (NO_SLOT, 3, 4, 5, NO_SLOT, NO_SLOT, 2)
    assert isinstance(spec.step(state, Append("a", (6,))), spec.State)


def test_an_evacuation_draws_from_the_headroom() -> None:
    moves = (Move(0, 2, 12), Move(5, 7, 13))
    plan = Plan("a", 0, (1, 2, 3), moves, released=(1, 3), purpose="reclaim")
    state = run(*SIX, Evict("a", (1, 4)), MoveTokens(plan), headroom=(6,))
    assert table(state).blocks == (6, 2)
    assert state.pool.headroom == frozenset()
    assert state.pool.free == {1, 3, 4, 5}
    assert dict(spec.reads(state, "a"))[0] == spec.Payload("a", 0)


def test_allotted_blocks_join_the_end_of_the_list_and_hold_nothing_yet() -> None:
    state = run(*SIX, Allocate("a", (5,)))
    assert table(state).blocks == (1, 2, 3, 5)
    assert table(state).physical_len == 6
    assert state.pool.free == {4, 6}
    assert state.memory == run(*SIX).memory


def test_a_hit_prefix_is_shared_and_not_written() -> None:
    before, after = run(*SIX, Cache((1, 2))), run(*SIX, Cache((1, 2)), Hit("b", (1, 2)))
    assert after.pool.refs == (0, 2, 2, 1, 0, 0, 0)
    assert after.memory == before.memory
    assert spec.reads(after, "b") == spec.reads(before, "a")[:4]
    assert table(after, "b").physical_len == 4


def test_what_follows_a_hit_is_written_behind_it() -> None:
    state = run(*SHARED)
    assert spec.reads(state, "b")[0] == (0, spec.Payload("a", 0))
    assert spec.reads(state, "b")[2] == (2, spec.Payload("b", 2))
    before = run(*SHARED[:-1])
    assert [w.slot for w in spec.writes(before, Append("b", (8,)))] == [8]


def test_a_shared_block_is_free_only_when_its_last_reference_goes() -> None:
    state = run(*SHARED, Evict("a", (0, 1)), Release("a", (1,)))
    assert 1 not in state.pool.free
    assert seen(state, "b") == [0, 1, 2]
    state = spec.step(state, spec.Finish("b"))  # type: ignore[assignment]
    assert 1 in state.pool.free


def test_a_cached_block_keeps_its_payload_while_free_and_can_be_hit() -> None:
    state = run(*SIX, Cache((1,)), spec.Finish("a"))
    assert 1 in state.pool.free
    hit = spec.step(state, Hit("b", (1,)))
    assert isinstance(hit, spec.State)
    assert 1 not in hit.pool.free
    forgotten = spec.step(state, spec.Uncache((1,)))
    assert isinstance(forgotten, spec.State)
    assert set(forgotten.memory) == {None}


def test_appending_skips_the_rest_of_a_protected_block_that_a_trim_left_at_the_end() -> None:
    history = (
        Allocate("a", (1, 2, 3)),
        Append("a", (2, 3, 4, 5, 6)),
        Cache((2,)),
        Evict("a", (0, 3)),
        MoveTokens(Plan("a", 0, (1, 2, 3), (Move(4, 6, 2),), (), "dense")),
    )
    state = run(*history)
    assert table(state).physical_len == 3
    assert isinstance(spec.step(state, Append("a", (5,))), spec.Rejected)
    after = spec.step(state, Append("a", (6,)))
    assert isinstance(after, spec.State)
    assert table(after).physical_len == 5
    assert spec.read_set(after, "a", queries=1).slots == (2, 3, 4, 6)


def test_a_preempted_request_comes_back_with_an_empty_table_and_every_token() -> None:
    """S10: nothing of it counts as reclaimed, and what was evicted is live again."""
    gone = run(*SIX, Evict("a", (2, 3)), Release("a", (2,)), spec.Preempt("a"))
    assert (gone.tables, gone.pool, gone.preempted) == ((), run().pool, {"a"})
    back = spec.step(gone, spec.Resume("a"))
    assert isinstance(back, spec.State)
    assert table(back) == spec.RequestState("a")
    assert back.preempted == frozenset()
    again = run(*SIX, spec.Preempt("a"), spec.Resume("a"), *SIX)
    assert again == run(*SIX)


def test_a_resumed_request_can_hit_what_it_cached_before() -> None:
    state = run(*SIX, Cache((1,)), spec.Preempt("a"), spec.Resume("a"), Hit("a", (1,)))
    assert spec.reads(state, "a") == [(0, spec.Payload("a", 0)), (1, spec.Payload("a", 1))]


def test_a_preempted_request_can_finish_without_coming_back() -> None:
    assert run(*SIX, spec.Preempt("a"), spec.Finish("a")) == run()


def test_headroom_is_set_aside_and_given_back() -> None:
    state = run(spec.Reserve((2, 5)))
    assert (state.pool.free, state.pool.headroom) == ({1, 3, 4, 6}, {2, 5})
    assert run(spec.Reserve((2, 5)), spec.Unreserve((5, 2))) == run()


def test_attention_changes_nothing() -> None:
    state = run(*SIX, Evict("a", (1, 2)))
    assert spec.step(state, spec.Attend(spec.ReadSet("a", (2, 5, 6, 7), (5,)))) == state


def test_states_are_values() -> None:
    assert run(*SIX) == run(*SIX)
    assert len({run(*SIX), run(*SIX), run()}) == 2
