"""A plan in flight gains the most blocks that can be gained, with the fewest moves for them, and
breaks nothing that I4 asks of it.

The brute force tries every set of blocks to empty. Scope: blocks of 2-4 slots, at most 7 blocks of
which any whole ones are shared, any liveness, at most 2 blocks of headroom, any bound on the moves;
wholly dead blocks have been released before, as the reclaimer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vtoken_spec as spec
from vtoken.core import BackgroundParams, EvacuationPlan, Flight, RequestTable, plan_evacuation
from vtoken.core.planner import plan_release
from vtoken.testing.harness import FakeEngine
from vtoken.testing.pool import FakePool


@dataclass
class Case:
    """A table, the pool that its blocks are in, and the bounds on a plan for it. Implements
    `vtoken_spec.StateView`."""

    table: RequestTable
    pool: FakePool
    max_moves: int
    copy_out: bool

    @property
    def requests(self) -> dict[str, RequestTable]:
        return {"a": self.table}

    @property
    def flights(self) -> list[Flight]:
        return []

    @property
    def writable(self) -> np.ndarray:
        return self.pool.private(self.table.blocks)

    def plan(self) -> EvacuationPlan | None:
        return plan_evacuation(
            self.table,
            self.writable,
            max_moves=self.max_moves,
            spare=self.pool.headroom,
            copy_out=self.copy_out,
        )

    def places(self, index: int) -> tuple[int, int]:
        """Live tokens and holes in the block at list index `index`, read off the slots."""
        size, live = self.pool.block_size, set(self.table.live_slots().tolist())
        used = range(index * size, min((index + 1) * size, self.table.physical_len))
        count = sum(self.table.slot_at(position) in live for position in used)
        return count, len(used) - count


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(2, 4))
    count, rng = draw(st.integers(2, 7)), draw(st.randoms(use_true_random=False))
    pool = FakePool(num_blocks=12, block_size=size)
    pool.extend("a", count)
    blocks = pool.lists["a"]
    rng.shuffle(blocks)
    table = RequestTable("a", size)
    table.append(blocks, count * size - draw(st.integers(0, size - 1)))
    dense = draw(st.sampled_from([0.2, 0.5, 0.8]))
    dead = [token for token in range(table.logical_len - 1) if rng.random() > dense]
    table.evict(np.array(dead, dtype=np.int32))
    for _ in range(draw(st.integers(0, 2))):
        if table.num_holes:
            table.append([], table.logical_len + 1, hole=int(rng.choice(table.hole_positions())))
    shared = [block for block in blocks[: table.physical_len // size] if rng.random() < 0.4]
    pool.adopt("b", shared, len(shared))
    for block in blocks:
        if rng.random() < 0.2:
            pool.cache(block, ("of", block))
    released = plan_release(table)
    if released is not None:
        dropped = table.set_layout(*released)
        pool.set_blocks("a", table.blocks.tolist(), dropped)
    pool.reserve(draw(st.integers(0, 2)))
    return Case(table, pool, draw(st.integers(1, 12) | st.just(1 << 30)), draw(st.booleans()))


def every_choice(case: Case) -> Iterator[tuple[int, int]]:
    """Blocks gained and minus the tokens moved, of every set of blocks that can be emptied."""
    size, writable = case.pool.block_size, case.writable
    places = [case.places(index) for index in range(case.table.num_blocks)]
    emptied = range(case.table.physical_len // size)
    for many in range(1, len(emptied) + 1):
        for chosen in combinations(emptied, many):
            if not all(writable[index] or case.copy_out for index in chosen):
                continue
            stay = [i for i in range(len(places)) if writable[i] and i not in chosen]
            moves, holes = sum(places[i][0] for i in chosen), sum(places[i][1] for i in stay)
            draws = -(-max(0, moves - holes) // size)
            if moves <= case.max_moves and draws <= len(case.pool.headroom) and many > draws:
                yield many - draws, -moves


@settings(max_examples=600)
@given(case=cases())
def test_no_choice_of_blocks_gains_more_or_gains_the_same_with_fewer_moves(case: Case) -> None:
    """Claim: the plan is as good as the best of all; where nothing is to be gained, there is
    none."""
    plan, best = case.plan(), max(every_choice(case), default=None)
    found = None
    if plan is not None:
        found = (len(plan.released) - len(plan.drawn), -len(plan.token_ids))
    assert found == best


@settings(max_examples=600)
@given(case=cases())
def test_a_plan_keeps_i4_and_its_copies_need_no_order_among_themselves(case: Case) -> None:
    """Claim: I4 holds of the plan as it goes into flight, once the blocks that it names have left
    the prefix cache: so its targets lie before the physical end or in headroom, and it gains a
    block. No source is a target, so the pieces of a plan may run in any order."""
    plan = case.plan()
    if plan is None:
        return
    table = case.table
    assert len(plan.token_ids) == len(plan.sources) == len(plan.targets) > 0
    assert set(plan.targets // table.block_size) == {*plan.written, *plan.drawn}
    assert not set(plan.sources.tolist()) & set(plan.targets.tolist())
    case.pool.uncache(np.array(plan.written, dtype=np.int32))  # raises if one of them is shared
    flight = Flight(1, "a", plan, table.blocks.tolist(), step=0)
    found = spec.i4_planning(case, flight.plan, version=table.version, in_flight=True)
    assert [breach.message for breach in found] == []


@settings(max_examples=200)
@given(case=cases())
def test_planning_changes_nothing_and_gives_the_same_plan_twice(case: Case) -> None:
    before, version, free = case.table.snapshot(), case.table.version, case.pool.free
    one, other = case.plan(), case.plan()
    after = case.table.snapshot()
    assert (case.table.version, case.pool.free) == (version, free)
    for name in ("blocks", "slots", "live"):
        assert getattr(before, name).tolist() == getattr(after, name).tolist()
    for name in ("token_ids", "sources", "targets", "released", "drawn", "written"):
        assert np.array_equal(getattr(one, name, ()), getattr(other, name, ()))


def made(*dead: int, size: int, length: int) -> RequestTable:
    table = RequestTable("a", size)
    table.append(range(1, -(-length // size) + 1), length)
    table.evict(np.array(dead, dtype=np.int32))
    return table


def test_a_shared_block_needs_less_room_than_a_private_one_with_fewer_tokens() -> None:
    """Given three holes in two private blocks, and a shared block of three live tokens; when one
    can be emptied; then it is the shared one, although the emptiest private one has only two: its
    own two holes would go with it, and one hole elsewhere does not hold them."""
    table = made(0, 4, 5, 8, size=4, length=13)  # live: 3 (shared), 2, 3; the end is in the fourth
    writable = np.array([False, True, True, True])
    plan = plan_evacuation(table, writable, max_moves=99, copy_out=True)
    assert plan is not None
    assert plan.released == [1]
    assert plan.token_ids.tolist() == [1, 2, 3]
    assert plan_evacuation(table, writable, max_moves=99) is None


@pytest.mark.parametrize("spare", [(), (9,), (9, 8)])
def test_headroom_is_drawn_only_where_that_gains_a_block(spare: tuple[int, ...]) -> None:
    """Given two shared blocks with a live token each and no hole elsewhere; when they are copied
    out; then it takes one block of headroom to gain one, and a second one is left alone. Private
    blocks never need any."""
    table = made(0, 2, size=2, length=5)
    plan = plan_evacuation(
        table, np.array([False, False, True]), max_moves=99, spare=spare, copy_out=True
    )
    assert (plan is None) == (spare == ())
    if plan is not None:
        assert (plan.released, plan.drawn, plan.targets.tolist()) == ([1, 2], [9], [18, 19])
    mine = plan_evacuation(table, np.ones(3, dtype=np.bool_), max_moves=99, spare=spare)
    assert mine is not None
    assert (mine.released, mine.drawn) == ([1], [])


# Bulk eviction ----------------------------------------------------------------------------------


def parts(lives: list[int], most: int) -> int:
    """How many plans of at most `most` tokens it takes to empty the blocks one by one."""
    count, left = 0, 0
    for live in lives:
        if live > left:
            count, left = count + 1, most
        left -= live
    return count


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("most", [16, 40, 1 << 30])
def test_a_bulk_eviction_is_packed_within_the_stated_steps(
    seed: int, delay: int, most: int
) -> None:
    """Given B=16 and 75 % of 400 tokens dead at random; when plans move at most `most` tokens; then
    within `delay + 1` steps for each of the plans that it takes to empty the emptiest blocks one by
    one, the request has at most one block more than its live tokens fill. Without a delay it is one
    step more, if wholly dead blocks are released in the first. No plan moves a token in vain."""
    size, params = 16, BackgroundParams(commit_delay=delay, moves_per_plan=most)
    engine = FakeEngine(mode="background", block_size=size, num_blocks=60, background=params)
    engine.add("a", prompt_len=400)
    engine.step()
    table, counters = engine.table("a"), engine.reclaimer.counters
    dead = np.random.default_rng(seed).choice(399, size=300, replace=False)
    engine.evict("a", dead)
    lives = np.bincount(np.delete(np.arange(400), dead) // size)
    emptied = np.sort(lives[lives > 0])[: np.count_nonzero(lives) - -(-100 // size)].tolist()
    plans = parts(emptied, most)
    for _ in range(plans * (delay + 1) + (delay == 0 and 0 in lives)):
        engine.step()
    engine.verify()
    assert table.num_blocks <= -(-table.num_live // size) + 1
    assert counters.plans == plans
    assert counters.moved == sum(emptied)
