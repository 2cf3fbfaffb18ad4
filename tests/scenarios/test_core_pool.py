"""A pool that is nearly empty, on the core with real bytes and no engine.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from support.scene import ORDERS, Scene, caught, nothing_waits
from vtoken.errors import InvariantViolation
from vtoken.testing.device import Strategy
from vtoken.testing.harness import ByteFault, FakeEngine, Step
from vtoken.testing.pool import FakePool, PoolFault

MODES = ("off", "eager", "background")
B = 4


def targets(step: Step) -> set[int]:
    """Blocks that the step's plans copy into."""
    return {int(slot) // B for change in step.changes for slot in change.targets}


# S08 --------------------------------------------------------------------------------------------


def pool_with_a_cached_block(mode: str) -> tuple[FakeEngine, int]:
    """Three usable blocks, all free; one of them, X, is cached: the first of family 0's prompts."""
    made = FakeEngine(mode=mode, block_size=B, num_blocks=4)
    made.add("z", prompt_len=B, family=0)
    made.step()
    block = int(made.table("z").blocks[0])
    made.finish("z")
    made.step()
    assert made.pool.num_free == 3
    assert made.pool.is_cached(block)
    return made, block


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["hit first", "hit last"])
def test_s08_a_block_that_one_request_hits_is_not_given_to_another(mode: str, order: str) -> None:
    """Given a pool of 3 free blocks, X among them cached; when A, which hits X, and B, which needs
    a block, are admitted in one step, in either order; then A has X and B has not, and X is no
    plan's target for as long as it is cached or shared."""
    made, block = pool_with_a_cached_block(mode)
    arriving = {"A": (B + 1, 0), "B": (2, 1)}
    for name in ("A", "B") if order == "hit first" else ("B", "A"):
        prompt_len, family = arriving[name]
        made.add(name, prompt_len=prompt_len, family=family)
    made.step()
    assert block in made.table("A").blocks
    assert block not in made.table("B").blocks
    made.verify()
    for victims in ([1], [0], [2, 4]):
        made.evict("A", victims)
        before = made.pool.is_cached(block) or made.pool.ref_count(block) > 1
        step = made.schedule()
        kept = made.pool.is_cached(block) or made.pool.ref_count(block) > 1
        assert block not in targets(step) or (before and not kept), "uncached first, then written"
        made.execute(step)
        made.verify()


@pytest.mark.parametrize("mode", MODES)
def test_s08_a_block_that_was_hit_is_not_there_for_a_request_that_needs_all_three(
    mode: str,
) -> None:
    """Given the same; when B needs all three blocks and comes behind A; then it waits, and X stays
    A's. When it comes before A; then it gets X, and A is looked up again and finds nothing."""
    made, block = pool_with_a_cached_block(mode)
    made.add("A", prompt_len=B + 1, family=0)
    made.add("B", prompt_len=3 * B, family=1)
    made.step()
    assert [request.req_id for request in made.waiting] == ["B"]
    assert block in made.table("A").blocks
    made.verify()
    made, block = pool_with_a_cached_block(mode)
    made.add("B", prompt_len=3 * B, family=1)
    made.add("A", prompt_len=B + 1, family=0)
    made.step()
    assert block in made.table("B").blocks
    assert [request.req_id for request in made.waiting] == ["A"]
    made.verify()
    made.finish("B")
    (row,) = made.schedule().rows
    assert (row.req_id, row.start, row.count) == ("A", 0, B + 1)  # every token is computed


class StalePool(FakePool):
    """Remembers what was hit before, and does not notice that the block is another's by now."""

    def lookup(self, keys: Sequence[tuple[Hashable, ...]]) -> list[int]:
        hits = getattr(self, "remembered", None)
        return super().lookup(keys) if hits is None or not keys else hits


def test_s08_the_control_that_uses_an_old_lookup_is_caught() -> None:
    """Given a lookup that was made before B took X; when A is admitted with it; then it is seen:
    the tests above can fail."""
    made, block = pool_with_a_cached_block("eager")
    made.pool.__class__ = StalePool
    made.add("B", prompt_len=2 * B + 1, family=1)
    made.step()
    assert block in made.table("B").blocks
    made.finish("B")
    made.pool.remembered = [block]  # type: ignore[attr-defined]
    made.add("A", prompt_len=B + 1, family=0)
    with pytest.raises((ByteFault, InvariantViolation, PoolFault)):
        made.step()


# S05 --------------------------------------------------------------------------------------------


def fewest_preemptions(made: FakeEngine) -> int:
    """How many of the running requests, from the last, have to go for the others to decode on."""
    lists, pool = made.pool.lists, made.pool
    needs = [
        -(-made.reclaimer.physical_need(r.req_id, r.computed + 1) // B) - len(lists[r.req_id])
        for r in made.running
    ]
    held = [len(lists[request.req_id]) for request in made.running]
    count = len(needs)
    stay = max(k for k in range(count + 1) if sum(needs[:k]) <= pool.num_free + sum(held[k:]))
    return count - stay


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("usable", [3, 4, 5])
def test_s05_only_as_many_are_preempted_as_have_to_be(mode: str, usable: int) -> None:
    """Given three running requests whose next tokens need a block each, and 0 to 2 free blocks;
    when allocations fail; then as few are preempted as can be, from the last, each step computes
    tokens, and within 3 * 9 steps each has had its 9 tokens."""
    made = FakeEngine(mode=mode, block_size=B, num_blocks=usable + 1)
    names = ["r0", "r1", "r2"]
    for number, name in enumerate(names):
        made.add(name, prompt_len=B, family=number)
    made.step()
    assert len(made.running) == 3
    done: list[str] = []
    steps = 0
    while len(done) < 3:
        steps += 1
        assert steps <= 3 * 9
        want, before = fewest_preemptions(made), made.preemptions
        order = [request.req_id for request in made.running]
        computed = made.step()
        made.verify()
        assert made.preemptions - before == want
        kept = order[: len(order) - want]
        assert [request.req_id for request in made.running][: len(kept)] == kept
        assert sum(computed.values()) > 0
        for request in [r for r in made.running if r.computed >= 9]:
            made.finish(request.req_id)
            done.append(request.req_id)
    assert done == names
    assert made.preemptions > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", [1, 2, 3])
def test_s05_an_allocation_that_fails_for_once_costs_one_request_one_turn(
    mode: str, which: int
) -> None:
    """Given three running requests and enough free blocks; when the allocation of one of them
    fails for once; then the last is preempted and nobody else, the others have their tokens in the
    same step, and it is back in the next."""
    made = FakeEngine(mode=mode, block_size=B, num_blocks=12)
    for number in range(3):
        made.add(f"r{number}", prompt_len=B, family=number)
    made.step()
    made.pool.fail_at = {made.pool.allocations + which}
    assert sorted(made.step()) == ["r0", "r1"]
    assert [request.req_id for request in made.waiting] == ["r2"]
    assert sorted(made.step()) == ["r0", "r1", "r2"]
    made.verify()
    assert made.preemptions == 1


def test_s05_reclamation_spares_the_preemption() -> None:
    """Given the same three in a pool without a free block; when each forgets two tokens before its
    next needs a block; then with reclamation nobody is preempted, and without it somebody is."""
    preempted = {}
    for mode in MODES:
        made = FakeEngine(mode=mode, block_size=B, num_blocks=4)
        for number in range(3):
            made.add(f"r{number}", prompt_len=B, family=number)
        made.step()
        for number in range(3):
            made.evict(f"r{number}", [0, 2])
        for _ in range(2):
            made.step()
            made.verify()
        preempted[mode] = made.preemptions
    assert preempted["eager"] == preempted["background"] == 0 < preempted["off"]


# The fence of a block that copies may still touch is a wait in the step that hands it on, so that a
# block that a preemption gives back helps in the same step. What a plan draws, or will give back at
# its commit, helps nobody meanwhile.


def all_in_flight(
    strategy: Strategy = "copies last", seed: int = 0, *, level: int = 3, usable: int = 9
) -> Scene:
    """Three requests with a plan in flight each, and `usable - 9` free blocks; their next tokens
    need a block each."""
    scene = Scene(strategy, seed, num_blocks=usable, level=level, commit_delay=6)
    made = scene.engine
    for number in range(3):
        made.add(f"r{number}", prompt_len=3 * B, family=number)
    scene.step()
    for request in made.running:
        made.evict(request.req_id, [1, 2, 3, 5, 6, 7])
    scene.step(skip=["r0", "r1", "r2"])
    assert len(made.reclaimer.flights) == 3
    return scene


def starved(strategy: Strategy = "copies last", seed: int = 0, **kwargs: int) -> Scene:
    """The same, until each has had 21 tokens."""
    scene = all_in_flight(strategy, seed, **kwargs)
    made, steps = scene.engine, 0
    while made.running or made.waiting:
        steps += 1
        assert steps <= 3 * 12
        want, before = fewest_preemptions(made), made.preemptions
        step = scene.step()
        assert made.preemptions - before == want
        assert step.rows, "nobody computes a token"
        for request in [r for r in made.running if r.computed >= 21]:
            made.finish(request.req_id)
    assert made.preemptions > 0
    return scene


@pytest.mark.parametrize("usable", [9, 10, 11])
@pytest.mark.parametrize(("strategy", "seed"), ORDERS)
def test_s05_plans_in_flight_cost_nobody_more_than_has_to_be(
    strategy: Strategy, seed: int, usable: int
) -> None:
    """Given three requests with a plan in flight each, and 0 to 2 free blocks for their next
    tokens; when allocations fail; then as few are preempted as can be, their plans' blocks are
    another's in the same step, each step computes tokens, and within 3 * 12 steps each has had its
    21."""
    scene = starved(strategy, seed, usable=usable)
    assert scene.engine.reclaimer.counters.aborted_plans > 0
    assert scene.leaves_nothing()
    assert scene.end() == (True, set())


@pytest.mark.parametrize("which", [1, 2, 3])
@pytest.mark.parametrize(("strategy", "seed"), ORDERS)
def test_s05_an_allocation_that_fails_for_once_aborts_one_plan(
    strategy: Strategy, seed: int, which: int
) -> None:
    """Given the same with enough free blocks; when the allocation of one of them fails for once;
    then the last is preempted with its plan, which is waited for, and nobody else; the others'
    plans are committed, and it is back in the next step."""
    scene = all_in_flight(strategy, seed, usable=16)
    made = scene.engine
    made.pool.fail_at = {made.pool.allocations + which}
    step = scene.step()
    assert sorted(row.req_id for row in step.rows) == ["r0", "r1"]
    assert (step.orders.waits, step.changes) == ([3], [])
    assert sorted(row.req_id for row in scene.step().rows) == ["r0", "r1", "r2"]
    for _ in range(4):
        scene.step()
    counters = made.reclaimer.counters
    assert (counters.plans, counters.aborted_plans, counters.moved) == (3, 1, 2)
    assert scene.end() == (True, set())
    assert scene.leaves_nothing()


def test_s05_nobody_is_preempted_for_want_of_a_block_that_is_set_aside() -> None:
    """Given three requests whose next tokens need a block each, and three free blocks that are set
    aside as headroom; when the first asks; then they are given back, and everybody runs."""
    scene = Scene(num_blocks=6, headroom=3)
    made = scene.engine
    for number in range(3):
        made.add(f"r{number}", prompt_len=B - 1, family=number)
    for _ in range(2):
        scene.step()
    assert (made.pool.num_free, len(made.pool.headroom)) == (0, 3)
    assert sorted(row.req_id for row in scene.step().rows) == ["r0", "r1", "r2"]
    assert made.preemptions == 0
    assert scene.end() == (True, set())


def test_s05_the_control_that_waits_for_no_copy_is_caught() -> None:
    """Given the same; when a preempted request's blocks are another's and nothing waits for its
    copies; then that is caught."""
    found = caught(starved, nothing_waits)
    assert found["copies last"][0] is False
    assert all("L11" in laws for _, laws in found.values())


# S10 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_s10_a_preempted_request_comes_back_with_every_token(mode: str) -> None:
    """Given a request that evicted and reclaimed; when it is preempted and resumed; then its table
    is gone at preemption, nothing is reclaimed at resume, and every token is live again."""
    made = FakeEngine(mode=mode, block_size=B, num_blocks=12)
    made.add("a", prompt_len=14)
    made.step()
    made.evict("a", [0, 1, 2, 3, 6, 9])
    made.step()
    assert made.table("a").reclaimed > 0
    made.preempt("a")
    assert "a" not in made.reclaimer.tables
    assert made.pool.num_free == 11
    made.step()
    table = made.table("a")
    assert (table.reclaimed, table.num_live, table.logical_len) == (0, 16, 16)
    made.verify()
    made.evict("a", [5, 6, 7, 8])
    for _ in range(6):
        made.step()
        made.verify()
        assert made.table("a").reclaimed >= 0
