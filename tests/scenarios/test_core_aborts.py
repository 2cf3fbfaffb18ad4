"""Plans that are aborted while copies are outstanding, on the core with real bytes and a device
that runs everything at the worst moment its dependencies allow.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
"""

from __future__ import annotations

import pytest

from support.scene import ORDERS, Scene, caught, nothing_waits
from vtoken.testing.device import Strategy

B = 4
THINNED = [0, 1, 2, 4, 5, 6]
"""Of two blocks, all tokens but the last."""
OUTSTANDING = ("both", "the other's", "its own", "neither")


# S14 --------------------------------------------------------------------------------------------


def two_copies_out_of_one_block(
    strategy: Strategy = "copies last",
    seed: int = 0,
    *,
    level: int = 3,
    outstanding: str = "both",
    end: str = "finish",
) -> Scene:
    """Requests "a" and "c" share blocks X and Y, and a plan of each copies out of both, into
    headroom. "a" ends while some of the copies are outstanding; the plan of "c" is committed later,
    and "d" waits for as many blocks as are only there with X and Y."""
    scene = Scene(
        strategy, seed, num_blocks=6, level=level, headroom=2, commit_delay=4, copy_out=True
    )
    made, pool = scene.engine, scene.engine.pool
    for name in "ca":
        made.add(name, prompt_len=9)
    scene.step()
    scene.step()
    shared = set(made.table("a").blocks[:2].tolist())
    assert len(pool.headroom) == 2
    # Whose copies are to be complete goes first.
    order = {"the other's": ["a", "c"], "its own": ["c", "a"]}.get(outstanding, ["ac"])
    for names in order:
        scene.settle()
        for name in names:
            made.evict(name, THINNED)
        step = scene.step(skip="ac")
        assert [launch.req_id for launch in step.orders.launches] == sorted(names, reverse=True)
        assert {
            int(slot) // B for launch in step.orders.launches for slot in launch.sources
        } == shared
    if outstanding == "neither":
        scene.settle()
    getattr(made, end)("a")
    made.waiting.clear()
    made.add("d", prompt_len=13, family=1)
    assert (len(pool.headroom), len(pool.held)) == (1, 1)
    committed = False
    while not committed:
        assert [pool.ref_count(block) for block in shared] == [1, 1]
        assert not shared & set(pool.free)
        assert [request.req_id for request in made.waiting] == ["d"]
        step = scene.step(skip="c")
        committed = bool(step.changes)
    assert shared < set(made.table("d").blocks.tolist())
    assert shared < set(step.fresh)
    scene.step(skip="d")
    return scene


@pytest.mark.parametrize("end", ["finish", "preempt"])
@pytest.mark.parametrize("outstanding", OUTSTANDING)
@pytest.mark.parametrize(("strategy", "seed"), ORDERS)
def test_s14_blocks_of_an_aborted_plan_come_back_once_behind_the_last_copy(
    strategy: Strategy, seed: int, outstanding: str, end: str
) -> None:
    """Given copies of two requests' plans out of the same blocks; when one of them is aborted while
    both, only the other's, only its own or none are outstanding; then the blocks come back once,
    with the other's commit, their next owner writes them behind all copies, the headroom of the
    aborted plan is headroom again, and nothing is left over."""
    scene = two_copies_out_of_one_block(strategy, seed, outstanding=outstanding, end=end)
    assert scene.end() == (True, set())
    assert scene.engine.reclaimer.counters.aborted_plans == 1
    assert scene.leaves_nothing()


@pytest.mark.parametrize("outstanding", OUTSTANDING[:3])
def test_s14_the_control_that_waits_for_no_copy_is_caught(outstanding: str) -> None:
    """Given the same; when nothing waits; then the new owner's writes race with the copies."""
    found = caught(two_copies_out_of_one_block, nothing_waits, outstanding=outstanding)
    assert found["copies last"][0] is False
    assert all(laws == {"I3", "L11"} for _, laws in found.values())
