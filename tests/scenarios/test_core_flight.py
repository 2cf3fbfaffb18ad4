"""What has to come before what while plans are in flight, on the core with real bytes and a device
that runs everything at the worst moment its dependencies allow.

Each test's name carries the scenario's id; its docstring says given, when, and what is right. The
controls leave one dependency out: under the strategy that is worst for it the bytes are wrong, and
under every strategy the order that was recorded breaks a law.
"""

from __future__ import annotations

import pytest

from support.mutation import applied, mutant
from support.scene import (
    ORDERS,
    Scene,
    caught,
    event_before_the_last_piece,
    launch_does_not_wait,
    nothing_waits,
)
from vtoken.errors import InvariantViolation
from vtoken.testing.device import Strategy

B = 4
SPARSE = [1, 2, 3, 5, 6, 7]
"""Of two blocks, all tokens but the first: one block is to be gained with one move."""
THINNED = [0, 1, 2, 4, 5, 6]

every_order = pytest.mark.parametrize(("strategy", "seed"), ORDERS)


def slots_of(*blocks: int) -> set[int]:
    return {block * B + offset for block in blocks for offset in range(B)}


# S02, S19: headroom -----------------------------------------------------------------------------


def headroom_just_freed(
    strategy: Strategy = "copies last", seed: int = 0, *, level: int = 3, read: bool = True
) -> Scene:
    """Requests "a" and "c" share two blocks. Block X is of "b", whose attention over it has not
    finished (or, unless `read`, X has not even been cleared for it). "b" ends, X becomes headroom,
    and a plan of "a" copies its tokens out of the shared blocks into X; then it is committed."""
    scene = Scene(
        strategy, seed, num_blocks=5, level=level, headroom=1, commit_delay=1, copy_out=True
    )
    made = scene.engine
    for name, prompt_len, family in (("c", 9, 0), ("a", 9, 0), ("b", 2, 1)):
        made.add(name, prompt_len=prompt_len, family=family)
    scene.step()
    (block,) = made.table("b").blocks.tolist()
    if read:
        scene.settle()
        scene.step(skip="ac")
    made.finish("b")
    made.evict("a", THINNED)
    (order,) = scene.step().orders.launches
    assert order.req_id == "a"
    assert set(order.targets.tolist()) <= slots_of(block)
    (change,) = scene.step().changes
    assert change.blocks[0] == block
    return scene


@every_order
def test_s02_a_copy_into_a_block_comes_behind_its_last_reader(
    strategy: Strategy, seed: int
) -> None:
    """Given a reader of block X that has not finished; when its request ends, and X, headroom by
    then, becomes the target of a copy; then the copy is ordered behind the reader, who sees its
    own bytes, and the new owner sees the copied ones."""
    scene = headroom_just_freed(strategy, seed)
    assert scene.end() == (True, set())
    assert scene.leaves_nothing()


def test_s02_the_controls_that_leave_a_wait_out_are_caught() -> None:
    found = caught(headroom_just_freed, launch_does_not_wait)
    assert found["copies first"] == (False, {"I3", "L11"})
    assert all(laws == {"I3", "L11"} for _, laws in found.values())
    found = caught(headroom_just_freed, nothing_waits)
    assert found["copies last"] == (False, {"I3"})
    assert all(laws == {"I3"} for _, laws in found.values())


@every_order
def test_s19_a_fresh_block_is_cleared_before_it_is_copied_to_and_read_after_it(
    strategy: Strategy, seed: int
) -> None:
    """Given a block that was allotted fresh, and is to be cleared and written in a step that has
    not run; when it becomes headroom and the target of a copy; then the order is clear, write,
    copy, attention."""
    scene = headroom_just_freed(strategy, seed, read=False)
    assert scene.end() == (True, set())
    (drawn,) = {int(block) for block in scene.engine.table("a").blocks[:1]}
    kinds = [op.kind for op in scene.ops(slots_of(drawn))]
    assert kinds[0] == "zero"
    assert kinds.index("zero") < kinds.index("write") < kinds.index("copy")
    assert "attend" in kinds[kinds.index("copy") :]
    assert kinds.count("zero") == 1, "nor is it cleared again for the request that drew it"


def test_s19_the_controls_that_leave_a_wait_out_are_caught() -> None:
    def scene(strategy: Strategy, **kwargs: int) -> Scene:
        return headroom_just_freed(strategy, read=False, **kwargs)

    found = caught(scene, launch_does_not_wait)
    assert found["copies first"] == (False, {"I3", "L11"})
    assert all(laws == {"I3", "L11"} for _, laws in found.values())
    found = caught(scene, nothing_waits)
    assert found["copies last"] == (False, {"I3"})


def emptied_and_handed_on(
    strategy: Strategy = "copies last", seed: int = 0, *, level: int = 3
) -> Scene:
    """A plan of "a" empties block X; in the step of its commit X is fresh for "b"."""
    scene = Scene(strategy, seed, num_blocks=5, level=level, commit_delay=2)
    made = scene.engine
    made.add("a", prompt_len=17)
    scene.step()
    made.evict("a", SPARSE)
    (order,) = scene.step().orders.launches
    (block,) = {int(slot) // B for slot in order.sources}
    scene.step()
    made.add("b", prompt_len=3, family=1)
    step = scene.step()
    assert step.orders.waits == [order.flight]
    assert block in step.fresh
    scene.step()
    return scene


@every_order
def test_s19_a_block_that_a_plan_empties_is_copied_before_it_is_cleared_for_its_next_owner(
    strategy: Strategy, seed: int
) -> None:
    """Given a block that a plan in flight copies out of; when the plan is committed and the block
    is fresh for another request in the same step; then the copy comes first, the clearing and the
    new owner's writes after it."""
    scene = emptied_and_handed_on(strategy, seed)
    assert scene.end() == (True, set())
    assert scene.leaves_nothing()


def test_s19_the_control_in_which_a_block_is_cleared_before_it_is_copied_is_caught() -> None:
    found = caught(emptied_and_handed_on, nothing_waits)
    assert found["copies last"] == (False, {"I3", "L11"})
    assert all(laws == {"I3", "L11"} for _, laws in found.values())


# S03 --------------------------------------------------------------------------------------------


def source_just_written(
    strategy: Strategy = "copies last", seed: int = 0, *, level: int = 3
) -> Scene:
    """A prompt comes in chunks of 5; between two of them most of the first tokens die, and a plan
    copies one that a step wrote that has not run. The step of the launch writes as well."""
    scene = Scene(strategy, seed, num_blocks=8, level=level, commit_delay=2)
    made = scene.engine
    made.add("a", prompt_len=23)
    written = {int(slot) for _ in range(2) for slot in scene.step(cap=5).rows[0].layout.new_slots}
    made.evict("a", SPARSE)
    step = scene.step(cap=5)
    (order,), (row,) = step.orders.launches, step.rows
    sources = set(order.sources.tolist())
    assert sources <= written
    assert not {*sources, *order.targets.tolist()} & set(row.layout.new_slots.tolist())
    for _ in range(3):
        scene.step(cap=5)
    assert made.reclaimer.counters.moved == 1
    return scene


@every_order
def test_s03_a_copy_waits_for_the_write_of_its_source(strategy: Strategy, seed: int) -> None:
    """Given a token that is written by a step that has not run; when a plan copies it; then the
    copy waits for the write, and attention sees what was written, before the commit and after.
    What the launch's own step writes is no source or target: the plan was made before it."""
    scene = source_just_written(strategy, seed)
    assert scene.end() == (True, set())
    assert scene.leaves_nothing()


def test_s03_the_controls_that_leave_a_wait_out_are_caught() -> None:
    found = caught(source_just_written, launch_does_not_wait)
    assert found["copies first"] == (False, {"I3", "L11"})
    assert all(laws == {"I3", "L11"} for _, laws in found.values())
    found = caught(source_just_written, nothing_waits)
    assert found["copies last"] == (False, {"I3"})
    assert all(laws == {"I3"} for _, laws in found.values())


# S04 --------------------------------------------------------------------------------------------


def ended_in_flight(
    strategy: Strategy = "copies last", seed: int = 0, *, level: int = 3, end: str = "finish"
) -> Scene:
    """A plan of "a" is in flight and a later step that includes "a" is scheduled; "a" ends, its
    blocks go to "b", and only then the steps run."""
    scene = Scene(strategy, seed, num_blocks=5, level=level, commit_delay=3)
    made = scene.engine
    made.add("a", prompt_len=17)
    scene.step()
    made.evict("a", SPARSE)
    (order,) = scene.step().orders.launches
    including = made.schedule()
    touched = {int(slot) // B for slot in (*order.sources, *order.targets)}
    getattr(made, end)("a")
    made.waiting.clear()  # it comes back another time
    made.add("b", prompt_len=17, family=1)
    following = made.schedule()
    assert touched <= set(made.table("b").blocks.tolist())
    assert following.orders.waits == [order.flight]
    for step in (including, following):
        scene.run(step)
    scene.step()
    return scene


@pytest.mark.parametrize("end", ["finish", "preempt"])
@every_order
def test_s04_a_request_that_ends_with_a_plan_in_flight_harms_nobody(
    strategy: Strategy, seed: int, end: str
) -> None:
    """Given a plan in flight and a scheduled step that includes its request; when the request
    finishes, is aborted or preempted, and another gets its blocks; then the step reads the old
    bytes, the copies come before the new owner's writes, and nobody's bytes change."""
    scene = ended_in_flight(strategy, seed, end=end)
    assert scene.end() == (True, set())
    assert scene.leaves_nothing()


@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_s04_the_control_that_does_not_wait_for_an_aborted_plan_is_caught(end: str) -> None:
    found = caught(ended_in_flight, nothing_waits, end=end)
    assert found["copies last"] == (False, {"L11"})
    assert all(laws == {"L11"} for _, laws in found.values())


# S26 --------------------------------------------------------------------------------------------


def died_in_flight(strategy: Strategy = "copies last", seed: int = 0, *, level: int = 3) -> Scene:
    """A plan copies from one block of "a" into another, and a step that reads both has not run; all
    tokens of both die; "b" needs a block in every step."""
    scene = Scene(strategy, seed, num_blocks=6, level=level, commit_delay=2)
    made = scene.engine
    made.add("a", prompt_len=17)
    scene.step()
    made.evict("a", SPARSE)
    (order,) = scene.step().orders.launches
    (source,), (target,) = (
        {int(slot) // B for slot in side} for side in (order.sources, order.targets)
    )
    made.evict("a", [0, 4])
    made.add("b", prompt_len=B, family=1)
    scene.step()
    assert not {source, target} & set(made.pool.free), "in flight: both are kept"
    made.grow("b", B - 1)
    scene.step()  # commit: the source comes back, and "b" gets it
    assert source in made.table("b").blocks
    assert target in made.table("a").blocks
    made.grow("b", B - 1)
    scene.step(skip="a")  # the target is released, as any block without a live token
    assert target in made.table("b").blocks
    assert made.reclaimer.counters.released_blocks == 2
    return scene


@every_order
def test_s26_blocks_that_die_in_flight_come_back_once_and_behind_the_copies(
    strategy: Strategy, seed: int
) -> None:
    """Given a plan in flight from one block to another, and an outstanding step that reads both;
    when all tokens of both die; then neither comes back before the copies have been waited for,
    each comes back once, and whoever gets one writes it behind the copies and the readers."""
    scene = died_in_flight(strategy, seed)
    assert scene.end() == (True, set())
    assert scene.leaves_nothing()


def test_s26_the_controls_are_caught() -> None:
    """Given the same; when nothing waits for the copies; then wrong bytes are seen and L11 is
    broken; when blocks are released in flight; then the plan is no longer of this table."""
    found = caught(died_in_flight, nothing_waits)
    assert found["copies last"] == (False, {"L11"})
    assert all(laws == {"L11"} for _, laws in found.values())
    early = mutant(
        "released in flight",
        "vtoken.core.in_flight:PlansInFlight._reclaim_beside",
        "if flying.is_due(flight):",
        "self._release_only(table)\n        if flying.is_due(flight):",
        "I4",
    )
    with applied(early), pytest.raises(InvariantViolation, match="I4"):
        died_in_flight()


# S28 --------------------------------------------------------------------------------------------


def large_plan(strategy: Strategy = "copies last", seed: int = 0, *, level: int = 1) -> Scene:
    """Half of 200 tokens die, all over; plans move at most 5, copied in pieces of 2."""
    scene = Scene(
        strategy, seed, num_blocks=60, level=level, threshold=0.01, commit_delay=1, moves_per_plan=5
    )
    made = scene.engine
    made.add("a", prompt_len=200)
    scene.step()
    made.evict("a", [token for token in range(198) if token % 3 < 2 - token % 2])
    for _ in range(30):
        before = made.table("a").num_blocks
        step = scene.step()
        for order in step.orders.launches:
            assert 0 < len(order.token_ids) <= 5
        for change in step.changes:
            assert change.only_released or len(change.token_ids) > 0
            assert len(change.blocks) < before, "each part gives a block back"
    return scene


@every_order
def test_s28_a_plan_larger_than_its_share_is_split_and_each_part_gives_a_block_back(
    strategy: Strategy, seed: int
) -> None:
    """Given a request of which far more is to be moved than one plan may; when plans are made; then
    each moves at most its share, in pieces of at most the workspace, and gives a block back, until
    the request has at most one block more than its live tokens fill."""
    scene = large_plan(strategy, seed)
    made, counters = scene.engine, scene.engine.reclaimer.counters
    copies = [op for op in scene.device.log if op.kind == "copy"]
    assert max(len(op.writes) for op in copies) == made.mover.batch_tokens == 2
    assert scene.end() == (True, set())
    assert counters.plans > 5
    assert counters.moved == sum(len(op.writes) for op in copies) > 5 * B
    assert made.table("a").num_blocks <= -(-made.table("a").num_live // B) + 1


def test_s28_the_control_that_does_not_wait_for_the_last_piece_is_caught() -> None:
    found = caught(large_plan, event_before_the_last_piece)
    assert found["copies last"][0] is False
    assert all("I3" in laws for _, laws in found.values())
