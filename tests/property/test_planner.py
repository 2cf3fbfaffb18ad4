"""Relocation plans are the cheapest that make the view dense, and never touch a frozen block.

"Frozen" is a block that others refer to as well. The brute force tries every choice of kept
blocks and of the partial one. Scope: blocks of 1-4 slots, at most 6 blocks, any liveness.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.checks.online import OnlineChecker
from vtoken.core import NO_SLOT, DensePlan, RequestTable, plan_dense, releasable_blocks
from vtoken.core.planner import plan_release
from vtoken.errors import InvariantViolation
from vtoken.testing.pool import FakePool


@dataclass
class Case:
    table: RequestTable
    writable: np.ndarray
    recycle: bool

    @property
    def size(self) -> int:
        return self.table.block_size

    def live_places(self, index: int) -> list[bool]:
        """Liveness per offset of the block at list index `index`, read off the slots."""
        live = set(self.table.live_slots().tolist())
        first = int(self.table.blocks[index]) * self.size
        return [first + offset in live for offset in range(self.size)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 4))
    length = draw(st.integers(2, 6 * size))
    count = -(-length // size)
    blocks = draw(st.permutations(range(1, 8)))[:count]
    table = RequestTable("a", size)
    table.append(blocks, length)
    dense, rng = draw(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9])), draw(st.randoms())
    dead = [token for token in range(length - 1) if rng.random() > dense] or [0]
    table.evict(np.array(dead, dtype=np.int32))
    whole = length // size  # only full blocks can be shared
    writable = [draw(st.booleans()) or i >= whole for i in range(count)]
    return Case(table, np.array(writable), draw(st.booleans()))


def fewest_moves(case: Case, positions: int) -> int:
    """Live tokens in writable blocks that have to leave their place, over all choices of blocks
    for the first `positions` places."""
    places = {
        index: case.live_places(index)
        for index in range(case.table.num_blocks)
        if case.writable[index]
    }
    total = sum(sum(live) for live in places.values())
    kept = -(-positions // case.size)
    fill = positions - (kept - 1) * case.size
    best = total if kept == 0 else None
    for chosen in combinations(places, kept):
        for last in chosen:
            stay = sum(sum(places[b]) for b in chosen if b != last) + sum(places[last][:fill])
            best = total - stay if best is None else min(best, total - stay)
    assert best is not None
    return best


def apply(table: RequestTable, plan: DensePlan) -> None:
    table.move(plan.token_ids, plan.targets)
    table.set_layout(plan.keep, plan.physical_len)


@settings(max_examples=400)
@given(case=cases())
def test_a_plan_has_the_fewest_moves_and_makes_the_view_dense(case: Case) -> None:
    """Claim: no choice of kept blocks needs fewer moves; afterwards the only hole that may be
    filled is the one for the next token; every live token keeps a slot."""
    table, size = case.table, case.size
    live_before = table.live.copy()
    frozen = [i for i in range(table.num_blocks) if not case.writable[i] and table.block_live[i]]
    usable = [i for i in range(table.num_blocks) if case.writable[i] and table.block_live[i]]
    lives = sorted((int(table.block_live[i]) for i in usable), reverse=True)
    frozen_ids = table.blocks[frozen].tolist()
    frozen_slots = {t: s for t, s in enumerate(table.slots.tolist()) if s // size in frozen_ids}
    expect_hole = case.recycle and sum(lives) < len(usable) * size
    plan = plan_dense(table, case.writable, recycle=case.recycle)
    if plan is None:
        assert len(usable) + len(frozen) == table.num_blocks
        assert holes_in_private(case) == 0
        return
    assert plan.version == table.version

    appended = plan.hole < 0 and expect_hole and holes_in_private(case) > 0
    positions = plan.physical_len - len(frozen) * size + appended
    assert len(plan.token_ids) == fewest_moves(case, positions)
    kept = -(-positions // size)
    lower = sum(lives) - sum(lives[:kept])
    assert lower <= len(plan.token_ids) < lower + max(size, 1)
    written = set(plan.written.tolist())
    assert written <= set(usable)
    assert {int(p) // size for p in plan.targets} <= written
    hole_slot = table.slot_at(plan.hole) if plan.hole >= 0 else NO_SLOT

    apply(table, plan)
    assert table.live.tolist() == live_before.tolist()
    assert (table.slots[table.live] != NO_SLOT).all()
    assert len(set(table.live_slots().tolist())) == table.num_live
    # Frozen blocks come as they were; all tokens in them, dead ones too, keep their slots.
    assert set(frozen_ids) <= set(table.blocks.tolist())
    assert all(table.slot_of(token) == slot for token, slot in frozen_slots.items())
    left = table.slots_at(table.hole_positions()).tolist()
    assert [s for s in left if s // size not in frozen_ids] == [s for s in [hole_slot] if s >= 0]
    assert table.num_blocks == len(frozen) + kept
    if expect_hole:
        room = table.num_blocks * size - table.physical_len
        assert plan.hole >= 0 or room > 0, "the next token would need a block for nothing"


def holes_in_private(case: Case) -> int:
    positions = case.table.hole_positions()
    return int(case.writable[positions // case.size].sum())


@settings(max_examples=200)
@given(case=cases())
def test_planning_changes_nothing_and_gives_the_same_plan_twice(case: Case) -> None:
    before, version = case.table.snapshot(), case.table.version
    plans = [plan_dense(case.table, case.writable, recycle=False) for _ in range(2)]
    after = case.table.snapshot()
    assert case.table.version == version
    for name in ("blocks", "slots", "live"):
        assert getattr(before, name).tolist() == getattr(after, name).tolist()
    if plans[0] is None:
        assert plans[1] is None
        return
    assert plans[1] is not None
    for name in ("token_ids", "targets", "keep", "written"):
        assert getattr(plans[0], name).tolist() == getattr(plans[1], name).tolist()


@pytest.mark.parametrize("size", [2, 4, 16])
def test_steady_state_makes_no_move(size: int) -> None:
    """Claim: at a fixed budget, one eviction and one new token per step cost no copy and no block,
    whatever the victim."""
    rng = np.random.default_rng(size)
    table = RequestTable("a", size)
    count = 5
    table.append(range(1, count + 1), size * count)
    private = np.ones(count, dtype=np.bool_)
    recycled = 0
    for _ in range(200):
        victim = rng.choice(np.flatnonzero(table.live)[:-1])
        table.evict(np.array([victim], dtype=np.int32))
        plan = plan_dense(table, private, recycle=True)
        assert plan is not None
        assert len(plan.token_ids) == 0
        assert plan.keep.tolist() == list(range(count))
        if plan.hole < 0:
            table.set_layout(plan.keep, plan.physical_len)
        table.append([], table.logical_len + 1, hole=plan.hole if plan.hole >= 0 else None)
        recycled += plan.hole >= 0
        assert table.num_holes == 0
    assert recycled > 150


def test_a_hole_in_a_shared_block_is_left_and_a_private_one_is_recycled() -> None:
    table = RequestTable("a", 2)
    table.append([1, 2, 3], 6)
    table.evict(np.array([1, 2], dtype=np.int32))  # one hole each in blocks 1 and 2
    plan = plan_dense(table, np.array([False, True, True]), recycle=True)
    assert plan is not None
    assert table.slot_at(plan.hole) == 4
    assert plan.written.tolist() == [1]
    assert len(plan.token_ids) == 0


def test_full_blocks_and_a_dead_one_leave_nothing_to_recycle() -> None:
    """Claim: when every block that stays is full, the dead one is released and the next token is
    appended."""
    table = RequestTable("a", 2)
    table.append([1, 2], 4)
    table.evict(np.array([0, 1], dtype=np.int32))
    plan = plan_dense(table, np.array([True, True]), recycle=True)
    assert plan is not None
    assert (plan.keep.tolist(), plan.hole, plan.physical_len) == ([1], -1, 2)


def test_the_partial_block_is_the_one_whose_tokens_already_lie_in_front() -> None:
    """Claim: 3 tokens at the back of one block and 2 at the front of another: keeping the second
    as the partial block costs one move less than keeping the fuller one."""
    table = RequestTable("a", 4)
    table.append([1, 2, 3], 12)
    dead = [0, 6, 7]  # block 1: . x x x   block 2: x x . .   block 3: full
    table.evict(np.array(dead, dtype=np.int32))
    plan = plan_dense(table, np.ones(3, dtype=np.bool_), recycle=False)
    assert plan is not None
    assert len(plan.token_ids) == 1
    assert plan.keep.tolist()[-1] == 1


def test_a_block_that_would_push_a_fuller_one_out_is_not_the_partial_one() -> None:
    """Claim: with 2, 1 and 4 live tokens, all in front, and room for 4 + 3, the block of 2 is the
    partial one, although the block of 1 would keep all it has as well."""
    table = RequestTable("a", 4)
    table.append([1, 2, 3], 12)
    table.evict(np.array([2, 3, 5, 6, 7], dtype=np.int32))
    plan = plan_dense(table, np.ones(3, dtype=np.bool_), recycle=False)
    assert plan is not None
    assert plan.token_ids.tolist() == [4]
    assert plan.keep.tolist() == [2, 0]


def test_a_plan_of_an_older_table_is_refused() -> None:
    """Claim (I4): a plan made before a hole was recycled is not applied after it, at any level."""
    for level in (1, 2, 3):
        table = RequestTable("a", 2)
        table.append([1, 2], 4)
        checker = OnlineChecker(level=level)
        checker.bind(_View(FakePool(num_blocks=4, block_size=2), table))
        table.evict(np.array([1], dtype=np.int32))
        plan = plan_dense(table, np.ones(2, dtype=np.bool_), recycle=False)
        assert plan is not None
        checker.planned(table, plan)
        table.append([], 5, hole=1)
        with pytest.raises(InvariantViolation, match="version") as caught:
            checker.planned(table, plan)
        assert caught.value.law == "I4"


class _View:
    def __init__(self, pool: FakePool, table: RequestTable) -> None:
        self.pool, self.requests, self.flights = pool, {table.req_id: table}, ()


@settings(max_examples=200)
@given(case=cases(), spare=st.integers(0, 2))
def test_a_release_takes_exactly_the_dead_blocks_and_moves_nothing(case: Case, spare: int) -> None:
    """Claim: whole-block release gives back the blocks without a live token, and no slot of a
    live token changes. Blocks behind the physical end count as dead."""
    table = case.table
    table._append_blocks(range(20, 20 + spare))
    live, slots = table.live.copy(), table.live_slots().tolist()
    in_use = {slot // case.size for slot in slots}
    dead = [block for block in table.blocks.tolist() if block not in in_use]
    holes = [p for p in table.hole_positions() if int(table.blocks[p // case.size]) in in_use]
    assert table.blocks[releasable_blocks(table)].tolist() == dead
    planned = plan_release(table)
    if planned is None:
        assert dead == []
        return
    assert table.set_layout(*planned) == dead
    assert table.live_slots().tolist() == slots
    assert table.live.tolist() == live.tolist()
    assert table.num_holes == len(holes)
