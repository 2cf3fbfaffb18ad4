"""The reclaimer's step, call by call: what a scheduler relies on between them."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.core import Reclaimer, ReclaimMode
from vtoken.testing.pool import FakePool


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@pytest.fixture
def pool() -> FakePool:
    return FakePool(num_blocks=10, block_size=4)


def serving(pool: FakePool, mode: ReclaimMode = ReclaimMode.EAGER) -> Reclaimer:
    """Request "a" with 11 tokens in three blocks."""
    reclaimer = Reclaimer(block_size=4, mode=mode, pool=pool)
    assert pool.extend("a", 3)
    reclaimer.schedule("a", pool.lists["a"], 11)
    reclaimer.end_step()
    return reclaimer


def test_need_counts_positions_and_a_recycled_hole_needs_none(pool: FakePool) -> None:
    reclaimer = serving(pool)
    assert reclaimer.physical_need("new", 7) == 7
    assert reclaimer.physical_need("a", 11) == 11
    assert reclaimer.physical_need("a", 12) == 12
    assert reclaimer.physical_need("a", 15) == 15
    reclaimer.evict("a", ids(1))
    reclaimer.prepare("a", pending=1)
    assert reclaimer.physical_need("a", 12) == 11
    assert reclaimer.physical_need("a", 13) == 13  # several tokens go to the physical end


def test_a_hole_that_was_not_taken_is_forgotten_at_the_end_of_the_step(pool: FakePool) -> None:
    """Claim: a request that was planned for and not scheduled needs a position again, until it
    is planned for anew."""
    reclaimer = serving(pool)
    reclaimer.evict("a", ids(1))
    reclaimer.prepare("a", pending=1)
    reclaimer.end_step()
    assert reclaimer.physical_need("a", 12) == 12
    layout = reclaimer.schedule("a", [], 12)
    assert reclaimer.tables["a"].slot_of(11) == pool.lists["a"][2] * 4 + 3
    assert layout.holes


def test_without_reclamation_nothing_is_recycled(pool: FakePool) -> None:
    reclaimer = serving(pool, ReclaimMode.OFF)
    reclaimer.evict("a", ids(1))
    reclaimer.prepare("a", pending=1)
    assert reclaimer.physical_need("a", 12) == 12
    assert reclaimer.take_orders().changes == []
    assert reclaimer.counters.recycled == 0


def test_changes_are_handed_out_once(pool: FakePool) -> None:
    reclaimer = serving(pool)
    reclaimer.evict("a", ids(0, 1, 2, 3))
    reclaimer.prepare("a", pending=5)
    (change,) = reclaimer.take_orders().changes
    assert change.blocks == pool.lists["a"] == reclaimer.tables["a"].blocks.tolist()
    assert len(change.dropped) == 1
    assert reclaimer.take_orders().changes == []


@pytest.mark.parametrize("returns", [False, True])
def test_a_late_plan_of_a_request_that_left_is_dropped(pool: FakePool, returns: bool) -> None:
    """Claim: also when the request comes back under its id before the worker is told."""
    reclaimer = serving(pool)
    reclaimer.evict("a", ids(0, 1, 2, 3))
    reclaimer.prepare("a", pending=1)
    before = reclaimer.counters.as_dict()
    reclaimer.drop("a")
    pool.release("a")
    if returns:
        assert pool.extend("a", 1)
        reclaimer.schedule("a", pool.lists["a"], 3)
    assert reclaimer.take_orders().changes == []
    assert reclaimer.physical_need("a", 4) == 4
    assert reclaimer.counters.as_dict() == before
    reclaimer.drop("a")
    reclaimer.drop("a")
    assert reclaimer.meter.now.as_dict() == dict.fromkeys(reclaimer.meter.now.as_dict(), 0)


def test_counters_say_what_happened(pool: FakePool) -> None:
    reclaimer = serving(pool)
    reclaimer.evict("a", ids(1))
    reclaimer.prepare("a", pending=1)
    reclaimer.schedule("a", [], 12)
    reclaimer.take_orders()
    reclaimer.end_step()
    reclaimer.evict("a", ids(4, 5, 6))
    reclaimer.prepare("a", pending=1)
    (change,) = reclaimer.take_orders().changes
    assert change.token_ids.tolist() == [7]  # alone in its block, where the next token goes
    assert reclaimer.counters.as_dict() == {
        "evicted": 4,
        "recycled": 1,
        "moved": 1,
        "copied": 1,
        "released_blocks": 0,
        "plans": 1,
        "aborted_plans": 0,
        "recomputed_requests": 0,
    }
