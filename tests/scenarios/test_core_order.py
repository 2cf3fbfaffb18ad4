"""What has to come before what, on the core with real bytes and no engine.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from vtoken.errors import InvariantViolation
from vtoken.testing.harness import POISON, ByteFault, FakeEngine, Step
from vtoken.testing.walk import act, pool_blocks

MODES = ("off", "eager", "background")
B = 4
CAUGHT = (ByteFault, InvariantViolation)


def blocks_of(slots: np.ndarray, size: int = B) -> set[int]:
    return set((slots // size).tolist())


# S01 --------------------------------------------------------------------------------------------


def live_after_each_step(requests: int, *, steps: int) -> list[list[int]]:
    """Live ids of request "0" among `requests`, two steps ahead of the worker all the time."""
    made = FakeEngine(mode="eager", block_size=B, num_blocks=5 * requests + 1)
    rngs = {str(n): np.random.default_rng(n) for n in range(requests)}
    for number in range(requests):
        made.add(str(number), prompt_len=5 + number % 7, family=number)
    ahead: list[Step] = [made.schedule()]
    seen = []
    for _ in range(steps):
        for name, rng in rngs.items():
            table = made.table(name)
            excess = table.num_live + 1 - 2 * B
            if excess > 0:
                made.evict(name, rng.choice(made.evictable(name), excess, replace=False))
        ahead.append(made.schedule())
        for row in ahead[-1].rows:
            table = made.table(row.req_id)
            old = table.live.copy()
            old[row.start :] = False
            assert not set(row.layout.new_slots.tolist()) & set(table.slots[old].tolist())
        made.execute(ahead.pop(0))
        seen.append(np.flatnonzero(made.table("0").live).tolist())
    for step in ahead:
        made.execute(step)
    made.verify()
    return seen


def test_s01_slots_prepared_ahead_are_free_and_neighbours_do_not_matter() -> None:
    """Given B=4 and a budget of 8; when each step is prepared before the one before it has run,
    with 1, 40 and 100 requests that all evict; then no write slot is a live slot, and what a
    request sees does not depend on its batch neighbours."""
    alone = live_after_each_step(1, steps=14)
    assert len(alone[-1]) == 2 * B
    assert alone == live_after_each_step(40, steps=14) == live_after_each_step(100, steps=14)


# S04 --------------------------------------------------------------------------------------------


def scheduled_then_gone(mode: str, end: str) -> tuple[FakeEngine, Step, Step]:
    """A step that includes "a"; and the next, in which "a" has ended and "b" has its blocks."""
    made = FakeEngine(mode=mode, block_size=B, num_blocks=7)
    made.add("a", prompt_len=11, family=0)
    made.add("c", prompt_len=6, family=2)
    made.step()
    made.evict("a", [1, 2, 5])
    including = made.schedule()
    blocks = set(made.table("a").blocks.tolist())
    if end == "finish":
        made.finish("a")
    else:
        made.preempt("a")
        made.waiting.clear()  # it comes back another time
    made.add("b", prompt_len=15, family=1)
    following = made.schedule()
    assert blocks & set(made.table("b").blocks.tolist())
    return made, including, following


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_s04_a_step_that_includes_a_request_that_ended_harms_nobody(mode: str, end: str) -> None:
    """Given a scheduled step that includes a request; when the request finishes, is aborted or
    preempted before that step has run, and another gets its blocks; then the step reads the old
    bytes, the new owner's come behind it, and nobody's change."""
    made, including, following = scheduled_then_gone(mode, end)
    made.execute(including)
    made.execute(following)
    made.verify()
    for name in ("b", "c"):
        made.finish(name)
    made.step()
    assert sorted(made.pool.free) == list(range(1, 7))


@pytest.mark.parametrize("mode", MODES)
def test_s04_the_control_in_which_the_new_owner_writes_first_is_caught(mode: str) -> None:
    """Given the same; when the new owner's writes come before the step that includes the old one;
    then wrong bytes are seen: the order of execution is the fence, and the test above can fail."""
    made, including, following = scheduled_then_gone(mode, "finish")
    for told in (following.gone, following.finished, following.changes):
        told.clear()  # "a" keeps its old row: only the new owner's writes run early
    following.rows = [row for row in following.rows if row.req_id == "b"]
    made.execute(following)
    with pytest.raises(CAUGHT):
        made.execute(including)


# S19 --------------------------------------------------------------------------------------------
# In step order it is copy, zero, write, attention: a fresh block is never copied to, but it may be
# copied from. A block of headroom that was fresh for another request is cleared before it is copied
# to: test_core_flight.py. `run` takes the names of blocks to clear first.


def run(made: FakeEngine, step: Step, *, zeroed_first: frozenset[int] = frozenset()) -> None:
    """Run a step and look at every byte; the worker zeroes some blocks before it copies."""
    step.fresh = [block for block in step.fresh if block not in zeroed_first]
    made.cache[:, sorted(zeroed_first)] = POISON
    made.execute(step)
    made.verify()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 4])
def test_s19_no_plan_copies_into_a_block_that_is_fresh_in_the_same_step(
    mode: str, size: int
) -> None:
    """Given walks in pools that run out; when requests get fresh blocks in the steps in which
    plans copy; then no target lies in a fresh block, while sources do: a block that a plan emptied
    is handed on at once."""
    seen: Counter[str] = Counter()
    for seed in range(12):
        rng, names = random.Random(seed), Counter[str]()
        made = FakeEngine(
            mode=mode, block_size=size, num_blocks=pool_blocks(size, ample=False), level=1
        )
        for _ in range(60):
            act(made, rng, names=names)
            step = made.schedule(cap=rng.choice([1, size, 99]))
            fresh = set(step.fresh)
            for copies in [*step.changes, *step.orders.launches]:
                assert not blocks_of(copies.targets, size) & fresh
                seen["copies beside fresh blocks"] += bool(len(copies.targets) and fresh)
                seen["sources in fresh blocks"] += bool(blocks_of(copies.sources, size) & fresh)
            made.execute(step)
            made.verify()
    assert mode == "off" or min(seen.values()) > 10


def emptied_and_handed_on() -> tuple[FakeEngine, Step, frozenset[int]]:
    """A step in which a plan of "a" empties a block that is fresh for "b" at once."""
    made = FakeEngine(mode="eager", block_size=B, num_blocks=4)
    made.add("a", prompt_len=12, family=0)
    made.step()
    made.evict("a", [1, 2, 5, 9, 10])
    made.add("b", prompt_len=3, family=1)
    step = made.schedule()
    (change,) = step.changes
    fresh = frozenset(step.fresh)
    assert blocks_of(change.sources) & fresh
    return made, step, fresh


def test_s19_copies_out_of_a_block_come_before_it_is_zeroed_for_its_next_owner() -> None:
    """Given a block that a plan empties and that is fresh for another request in the same step;
    when the worker copies, zeroes, writes and attends in this order; then every byte is right.
    When it zeroes first; then that is caught."""
    made, step, _ = emptied_and_handed_on()
    run(made, step)
    made, step, fresh = emptied_and_handed_on()
    with pytest.raises(CAUGHT):
        run(made, step, zeroed_first=fresh)


def test_s19_a_block_that_was_copied_to_must_not_be_zeroed_behind_the_copy() -> None:
    """Given the same step, were the block that the plan copies into fresh as well; when the worker
    zeroes it behind the copy; then that is caught."""
    made, step, _ = emptied_and_handed_on()
    (change,) = step.changes
    step.fresh += blocks_of(change.targets)
    with pytest.raises(CAUGHT):
        run(made, step)
