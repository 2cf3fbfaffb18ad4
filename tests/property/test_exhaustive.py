"""Every state that the reference model can reach within the scopes below obeys the laws, and so
does every transition; faults in the step function are found.

The search (`vtoken_spec.explore`) visits one state of each symmetry class. How many states and
edges each scope has is a golden value, so that a model or a generator that shrank without anybody
noticing fails; `VTOKEN_REWRITE_GOLDEN=1` writes the values anew.

Scopes are small in blocks, slots and tokens; where a scope leaves generators out, that is to reach
further with the others. What a larger scope would show is left to the random walks.
"""

from __future__ import annotations

import gc
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import get_args

import pytest

import vtoken_spec as spec
from support import broken_steps
from vtoken_spec import RequestState, State
from vtoken_spec.alphabet import ALLOWED, Bounds
from vtoken_spec.explore import Report, Scope, Step, canonical, explore

GOLDEN = Path(__file__).with_name("golden_exploration.json")
REWRITE = os.environ.get("VTOKEN_REWRITE_GOLDEN") == "1"
MOST_STATES = 150_000

IN_PLACE = ("appends", "evictions", "recycles", "releases", "endings")
SHARING = ("appends", "adoptions", "evictions", "releases", "endings", "cachings")
BULK = tuple(kind for kind in ALLOWED if kind != "single_moves")


def scope(
    name: str,
    *,
    blocks: int,
    size: int,
    requests: str,
    tokens: int,
    kinds: tuple[str, ...] = tuple(ALLOWED),
    headroom: tuple[int, ...] = (),
    with_forbidden: bool = False,
) -> Scope:
    """`blocks` are usable ones, besides the null block; `tokens` is the most per request."""
    bounds = Bounds(tuple(requests), tokens, appended=2, evicted=(1,), moved=3)
    return Scope(
        name=name,
        num_blocks=blocks + 1,
        block_size=size,
        bounds=bounds,
        headroom=headroom,
        kinds=kinds,
        with_forbidden=with_forbidden,
        most_states=MOST_STATES,
    )


ALL_ONE = scope(
    "everything, one request, 2 blocks of 2",
    blocks=2,
    size=2,
    requests="a",
    tokens=5,
    with_forbidden=True,
)
ALL_TWO = scope(
    "everything, two requests, 3 blocks of 1",
    blocks=3,
    size=1,
    requests="ab",
    tokens=3,
    with_forbidden=True,
)
SHARED = scope(
    "sharing, two requests, 3 blocks of 2",
    blocks=3,
    size=2,
    requests="ab",
    tokens=5,
    kinds=SHARING,
)
SCOPES = (
    ALL_ONE,
    ALL_TWO,
    scope(
        "everything and headroom, one request, 2 blocks of 2",
        blocks=2,
        size=2,
        requests="a",
        tokens=4,
        headroom=(2,),
        with_forbidden=True,
    ),
    scope("everything, one request, 3 blocks of 1", blocks=3, size=1, requests="a", tokens=6),
    scope(
        "bulk plans, two requests, 2 blocks of 2",
        blocks=2,
        size=2,
        requests="ab",
        tokens=4,
        kinds=BULK,
    ),
    scope(
        "bulk plans, two requests, 4 blocks of 1",
        blocks=4,
        size=1,
        requests="ab",
        tokens=3,
        kinds=BULK,
    ),
    SHARED,
    scope(
        "sharing and recycling, two requests, 3 blocks of 2",
        blocks=3,
        size=2,
        requests="ab",
        tokens=4,
        kinds=(*SHARING, "recycles"),
    ),
    scope(
        "in place, one request, 3 blocks of 3",
        blocks=3,
        size=3,
        requests="a",
        tokens=8,
        kinds=IN_PLACE,
    ),
    scope(
        "in place, one request, 2 blocks of 4",
        blocks=2,
        size=4,
        requests="a",
        tokens=9,
        kinds=IN_PLACE,
    ),
)


# States that must be reachable: without them, the laws would hold for want of anything to break -


def holes(state: State) -> Iterator[int]:
    """The blocks in which some request has a hole of its own, each once per hole."""
    for table in state.tables:
        for slot, alive in zip(table.slots, table.live, strict=True):
            if not alive and slot != spec.NO_SLOT:
                yield slot // state.pool.block_size


def used_blocks(state: State, table: RequestState) -> set[int]:
    return {slot // state.pool.block_size for slot in table.live_slots()}


def shared_block_with_a_hole(state: State) -> bool:
    return any(state.pool.refs[block] > 1 for block in holes(state))


def cached_block_with_a_hole(state: State) -> bool:
    return any(block in state.pool.cached for block in holes(state))


def emptied_middle_block(state: State) -> bool:
    return any(
        len(table.blocks) > 2
        and table.blocks[1] not in used_blocks(state, table)
        and {table.blocks[0], table.blocks[2]} <= used_blocks(state, table)
        for table in state.tables
    )


def tokens_out_of_logical_order(state: State) -> bool:
    size = state.pool.block_size
    for table in state.tables:
        places, live = table.places(block_size=size), table.live_slots()
        order = [places.index(slot) for slot in table.slots if slot in live]
        if order != sorted(order):
            return True
    return False


def hit_of_a_writer_that_is_gone(state: State) -> bool:
    """Its writer has finished or been preempted; the two leave the same state."""
    writers = {payload.writer for table in state.tables for _, payload in read(state, table)}
    return bool(writers - set(state.requests))


def writer_back_beside_its_reader(state: State) -> bool:
    """Preempted and begun anew in other blocks, while its old tokens are read by another."""
    return any(
        payload.writer != table.req_id
        and payload.writer in state.requests
        and payload not in dict(spec.reads(state, payload.writer)).values()
        for table in state.tables
        for _, payload in read(state, table)
    )


def read(state: State, table: RequestState) -> list[tuple[int, spec.Payload]]:
    return [(token, p) for token, p in spec.reads(state, table.req_id) if p is not None]


def exhausted_pool_with_a_hole(state: State) -> bool:
    return not state.pool.free and any(True for _ in holes(state))


def free_block_in_the_prefix_cache(state: State) -> bool:
    return bool(state.pool.free & state.pool.cached)


CONTROLS: dict[str, Callable[[State], bool]] = {
    predicate.__name__: predicate
    for predicate in (
        shared_block_with_a_hole,
        cached_block_with_a_hole,
        emptied_middle_block,
        tokens_out_of_logical_order,
        hit_of_a_writer_that_is_gone,
        writer_back_beside_its_reader,
        exhausted_pool_with_a_hole,
        free_block_in_the_prefix_cache,
    )
}


# The search -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Every scope searched once. Nothing the search makes is cyclic, so the collector is off."""
    gc.disable()
    try:
        return {scope.name: explore(scope, controls=CONTROLS) for scope in SCOPES}
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def golden(reports: dict[str, Report]) -> dict[str, dict[str, int]]:
    if REWRITE:
        counts = {name: counts_of(report) for name, report in reports.items()}
        GOLDEN.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def counts_of(report: Report) -> dict[str, int]:
    rejections = sum(report.rejected.values())
    return {"states": report.states, "edges": report.edges, "rejections": rejections}


@pytest.mark.parametrize("name", [scope.name for scope in SCOPES])
def test_no_state_and_no_transition_of_the_scope_breaks_a_law(
    reports: dict[str, Report], name: str
) -> None:
    report = reports[name]
    assert report.fault is None, f"{report.fault}\nafter {report.history}"


@pytest.mark.parametrize("name", [scope.name for scope in SCOPES])
def test_the_scope_has_as_many_states_and_edges_as_before(
    reports: dict[str, Report], golden: dict[str, dict[str, int]], name: str
) -> None:
    assert counts_of(reports[name]) == golden[name], name


def test_the_golden_file_names_the_scopes_and_no_others(golden: dict[str, dict[str, int]]) -> None:
    assert list(golden) == [scope.name for scope in SCOPES]
    assert sum(counts["states"] for counts in golden.values()) >= 200_000


def test_every_event_kind_and_every_reason_is_reached(reports: dict[str, Report]) -> None:
    accepted: Counter[str] = Counter()
    rejected: Counter[spec.Reason] = Counter()
    for report in reports.values():
        accepted += report.accepted
        rejected += report.rejected
    assert set(accepted) == {kind.__name__ for kind in get_args(spec.Event)}
    assert set(rejected) == set(spec.Reason)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_state_that_must_be_reachable_is_reached(
    reports: dict[str, Report], control: str
) -> None:
    assert any(control in report.reached for report in reports.values())


# Negative controls ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "within", "fault"),
    [
        (broken_steps.forgetful_recycle, ALL_ONE, "I2 unique mapping: .* already belongs to"),
        (broken_steps.freeing_release, SHARED, "L5 accounting: .* owned 2 .*not the 3 blocks"),
        (broken_steps.copyless_move, ALL_ONE, "I1 conservation: .* payload changed"),
        (broken_steps.rewriting_hit, SHARED, "L8 sharing: .* cached bytes changed"),
        (broken_steps.evicting_the_last, ALL_ONE, "accepted, not rejected as LAST_TOKEN"),
        (broken_steps.gainless_plan, ALL_ONE, "rejected as NOTHING_TO_DO, not as NO_GAIN"),
    ],
)
def test_a_fault_in_the_step_function_is_found(step: Step, within: Scope, fault: str) -> None:
    report = explore(within, step=step)
    assert re.search(fault, report.fault or ""), report.fault
    assert report.history, "the fault comes with the events that lead to it"
    assert explore(within, step=step).history == report.history, "the search is deterministic"


def test_a_scope_that_outgrows_its_bound_is_a_fault() -> None:
    small = Scope(
        name="bounded", num_blocks=3, block_size=2, bounds=Bounds(("a",), 4), most_states=10
    )
    assert explore(small).fault == "more than 10 states"


# The symmetry -----------------------------------------------------------------------------------


def renamed(state: State, requests: dict[str, str], blocks: Sequence[int]) -> str:
    """Everything that `canonical` keeps of a state, after a renaming."""
    pool, size = state.pool, state.pool.block_size
    moved = {
        b * size + i: blocks[b] * size + i for b in range(pool.num_blocks) for i in range(size)
    }
    moved[spec.NO_SLOT] = spec.NO_SLOT
    kept = {slot for table in state.tables for slot in table.live_slots()}
    kept |= {slot for slot in range(len(state.memory)) if slot // size in pool.cached}
    memory = {moved[s]: (requests[p[0]], p[1]) for s in kept if (p := state.memory[s]) is not None}
    tables = [
        (
            requests[table.req_id],
            [blocks[block] for block in table.blocks],
            [moved[slot] for slot in table.slots],
            table.live,
            table.physical_len,
        )
        for table in state.tables
    ]
    places = [sorted(blocks[b] for b in part) for part in (pool.free, pool.headroom, pool.cached)]
    refs = sorted((blocks[block], count) for block, count in enumerate(pool.refs))
    return repr((sorted(tables), sorted(memory.items()), places, refs))


def test_the_search_visits_one_state_of_each_class_under_renaming() -> None:
    """Claim: in a scope small enough to try every renaming, states have the same canonical code
    exactly when some renaming maps one onto the other, and the search finds each class."""
    tiny = scope("tiny", blocks=3, size=1, requests="ab", tokens=2)
    start = State.initial(num_blocks=4, block_size=1)
    same = dict(zip("ab", "ab", strict=True))
    known, frontier = {renamed(start, same, range(4)): start}, [start]
    while frontier:
        state = frontier.pop()
        for kind in tiny.kinds:
            for event in ALLOWED[kind](state, tiny.bounds):
                after = spec.step(state, event)
                assert isinstance(after, State)
                name = renamed(after, same, range(4))
                if name not in known:
                    known[name] = after
                    frontier.append(after)
    renamings = [
        (dict(zip("ab", ids, strict=True)), (0, *blocks))
        for ids in permutations("ab")
        for blocks in permutations(range(1, 4))
    ]
    classes = {
        (canonical(state, ("a", "b")), min(renamed(state, *renaming) for renaming in renamings))
        for state in known.values()
    }
    assert len({code for code, _ in classes}) == len({name for _, name in classes}) == len(classes)
    assert explore(tiny).states == len(classes) < len(known)
