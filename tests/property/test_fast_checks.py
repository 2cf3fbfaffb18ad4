"""The vectorised forms of the laws give the same verdict as the spec's predicates.

Healthy views come from the fake engine; most are then broken in one or two places by a fault
that a table, a pool or a runner could have. Both verdicts are counted, so a generator that no
longer breaks anything fails the test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

import vtoken_spec as spec
from vtoken.checks import fast
from vtoken.testing.harness import FakeEngine
from vtoken_spec import laws

VIEWS = 1500


@dataclass
class Pool:
    num_blocks: int
    block_size: int
    free: list[int]
    refs: list[int]
    headroom: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def ref_count(self, block: int) -> int:
        return self.refs[block]

    def is_cached(self, block: int) -> bool:
        return False


@dataclass
class Request:
    req_id: str
    logical_len: int
    physical_len: int
    blocks: list[int]
    slots: list[int]
    live: list[bool]


@dataclass
class View:
    pool: Pool
    requests: dict[str, Request]


def healthy(seed: int) -> View:
    """A view to break; the same seed gives an equal one."""
    return deepcopy(_healthy(seed))


@cache
def _healthy(seed: int) -> View:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3])
    engine = FakeEngine(
        mode=rng.choice(["off", "eager"]), block_size=size, num_blocks=24 // size + 8, level=0
    )
    for number in range(3):
        engine.add(f"r{number}", prompt_len=rng.randint(1, 3 * size), family=rng.randint(0, 1))
    for _ in range(rng.randint(1, 6)):
        for request in engine.running:
            choice = engine.evictable(request.req_id)
            if choice and rng.random() < 0.5:
                engine.evict(request.req_id, rng.sample(choice, rng.randint(1, len(choice))))
        engine.step()
    tables = [engine.table(request.req_id) for request in engine.running]
    pool = engine.pool
    free, spare = pool.free, []
    if len(free) > 2 and rng.random() < 0.3:
        spare = [free.pop(), free.pop()]
    refs = [pool.ref_count(block) for block in range(pool.num_blocks)]
    return View(
        Pool(pool.num_blocks, size, free, refs, headroom=spare[:1], held=spare[1:]),
        {
            table.req_id: Request(
                table.req_id,
                table.logical_len,
                table.physical_len,
                table.blocks.tolist(),
                table.slots.tolist(),
                table.live.tolist(),
            )
            for table in tables
        },
    )


# Faults -----------------------------------------------------------------------------------------

Fault = Callable[[View, random.Random], object]


def one(view: View, rng: random.Random) -> Request:
    return view.requests[rng.choice(sorted(view.requests))]


def put(items: list[int], rng: random.Random, value: int) -> None:
    if items:
        items[rng.randrange(len(items))] = value


def some_block(view: View, rng: random.Random) -> int:
    return rng.randint(-1, view.pool.num_blocks)


def some_slot(view: View, rng: random.Random) -> int:
    return rng.randint(-2, view.pool.num_blocks * view.pool.block_size)


def swap_slots(view: View, rng: random.Random) -> None:
    slots = one(view, rng).slots
    i, j = rng.randrange(len(slots)), rng.randrange(len(slots))
    slots[i], slots[j] = slots[j], slots[i]


def swap_blocks(view: View, rng: random.Random) -> None:
    rng.shuffle(one(view, rng).blocks)


def steal_slot(view: View, rng: random.Random) -> None:
    """A token of one request comes to lie where a token of another is, blocks included."""
    mine, theirs = one(view, rng), one(view, rng)
    slot = rng.choice(theirs.slots)
    put(mine.slots, rng, slot)
    block = slot // view.pool.block_size
    if block not in mine.blocks and slot >= 0:
        mine.blocks.append(block)
        mine.physical_len = len(mine.blocks) * view.pool.block_size


def flip(view: View, rng: random.Random) -> None:
    live = one(view, rng).live
    index = rng.randrange(len(live))
    live[index] = not live[index]


def lengthen(view: View, rng: random.Random) -> None:
    one(view, rng).physical_len += rng.choice([-2, -1, 1, 2])


def grow_ids(view: View, rng: random.Random) -> None:
    one(view, rng).logical_len += rng.choice([-1, 1])


def recount(view: View, rng: random.Random) -> None:
    block = rng.randrange(view.pool.num_blocks)
    view.pool.refs[block] = max(0, view.pool.refs[block] + rng.choice([-1, 1]))


FAULTS: dict[str, Fault] = {
    "slot": lambda v, r: put(one(v, r).slots, r, some_slot(v, r)),
    "slots swapped": swap_slots,
    "slot stolen": steal_slot,
    "block": lambda v, r: put(one(v, r).blocks, r, some_block(v, r)),
    "block added": lambda v, r: one(v, r).blocks.append(some_block(v, r)),
    "block lost": lambda v, r: one(v, r).blocks.pop(r.randrange(len(one(v, r).blocks)) and -1),
    "blocks reordered": swap_blocks,
    "liveness": flip,
    "physical length": lengthen,
    "logical length": grow_ids,
    "references": recount,
    "free lost": lambda v, r: v.pool.free and v.pool.free.pop(),
    "free added": lambda v, r: v.pool.free.append(some_block(v, r)),
    "free replaced": lambda v, r: put(v.pool.free, r, some_block(v, r)),
    "headroom added": lambda v, r: v.pool.headroom.append(some_block(v, r)),
    "held added": lambda v, r: v.pool.held.append(some_block(v, r)),
}


def views() -> list[tuple[str, View]]:
    found = []
    for seed in range(VIEWS):
        rng = random.Random(-seed - 1)
        view, names = healthy(seed % 100), []
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            names.append(rng.choice(sorted(FAULTS)))
            FAULTS[names[-1]](view, rng)
        found.append((" and ".join(names) or "healthy", view))
    return found


@pytest.fixture(scope="module")
def broken_views() -> list[tuple[str, View]]:
    return views()


def verdict(breaches: object) -> bool:
    return next(iter(breaches), None) is None  # type: ignore[call-overload]


def both_occur(seen: Counter[bool], *, least: int) -> None:
    assert min(seen[True], seen[False]) >= least, seen


# The forms --------------------------------------------------------------------------------------


def test_i2_within_a_request(broken_views: list[tuple[str, View]]) -> None:
    seen: Counter[bool] = Counter()
    for what, view in broken_views:
        for request in view.requests.values():
            alone = View(view.pool, {request.req_id: request})
            parts = (
                laws.i2_lengths(view.pool, request),
                laws.i2_block_list(view.pool, request),
                laws.i2_slots_in_range(view.pool, request),
                laws.i2_live_has_slot(request),
                laws.i2_slots_distinct(request),
            )
            holds = all(verdict(part) for part in parts)
            assert fast.i2_request(view.pool, request) == holds, (what, alone)
            seen[holds] += 1
    both_occur(seen, least=150)


def test_i2_across_requests(broken_views: list[tuple[str, View]]) -> None:
    seen: Counter[bool] = Counter()
    for what, view in broken_views:
        holds = verdict(laws.i2_across_requests(view))
        assert fast.i2_across(view.pool, view.requests) == holds, (what, view)
        seen[holds] += 1
    both_occur(seen, least=50)


def test_i2_as_a_whole_is_its_two_fast_forms(broken_views: list[tuple[str, View]]) -> None:
    for what, view in broken_views:
        within = all(fast.i2_request(view.pool, r) for r in view.requests.values())
        holds = within and fast.i2_across(view.pool, view.requests)
        assert holds == verdict(spec.i2_unique_mapping(view)), (what, view)


def test_l5_of_the_pool(broken_views: list[tuple[str, View]]) -> None:
    seen: Counter[bool] = Counter()
    for what, view in broken_views:
        holds = verdict(spec.l5_accounting(view))
        assert fast.l5_pool(view.pool, view.requests) == holds, (what, view)
        seen[holds] += 1
    both_occur(seen, least=200)


def test_l6_of_a_read(broken_views: list[tuple[str, View]]) -> None:
    """Right read sets in both orders that occur, and ones with a slot too many, too few, twice,
    foreign or dead, a chunk out of order, and positions that are physical."""
    seen: Counter[bool] = Counter()
    for number, (what, view) in enumerate(broken_views):
        rng = random.Random(number)
        request = one(view, rng)
        slots, live = np.array(request.slots), np.array(request.live)
        if len(slots) != len(live) or len(slots) != request.logical_len:
            continue
        count = rng.randint(1, min(3, len(slots)))
        reads = slots[live].tolist()
        queries = list(range(len(slots) - count, len(slots)))
        if count == 1:
            rng.shuffle(reads)
        fault = rng.choice(["", "", "lost", "twice", "other", "shuffled", "positions"])
        if fault == "lost" and reads:
            reads.pop(rng.randrange(len(reads)))
        elif fault == "twice":
            reads.insert(0, rng.choice([*reads, 0]))
        elif fault == "other":
            put(reads, rng, some_slot(view, rng))
        elif fault == "shuffled":
            rng.shuffle(reads)
        elif fault == "positions":
            queries[0] -= rng.randint(0, 2)
        read = spec.ReadSet(request.req_id, reads, queries)
        holds = verdict(spec.l6_read_set(view, read))
        found = fast.l6_reads(slots, live, np.array(reads, dtype=np.int64), np.array(queries))
        assert found == holds, (what, fault, request, read)
        seen[holds] += 1
    both_occur(seen, least=200)


def test_every_fault_breaks_a_view_and_healthy_views_break_nothing() -> None:
    """Claim: no fault above is a dead letter, and the fake engine's own views are lawful."""
    for seed in range(40):
        view = healthy(seed)
        assert verdict(spec.i2_unique_mapping(view))
        assert verdict(spec.l5_accounting(view))
    for name, fault in FAULTS.items():
        broken = 0
        for seed in range(60):
            view = healthy(seed)
            fault(view, random.Random(seed))
            broken += not (
                verdict(spec.i2_unique_mapping(view)) and verdict(spec.l5_accounting(view))
            )
        assert broken, name
