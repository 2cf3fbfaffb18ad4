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
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import vtoken_spec as spec
from support import broken_steps, reachable
from vtoken_spec import State
from vtoken_spec.alphabet import ALLOWED, Bounds
from vtoken_spec.explore import Report, Scope, explore

GOLDEN = Path(__file__).with_name("golden_exploration.json")
REWRITE = os.environ.get("VTOKEN_REWRITE_GOLDEN") == "1"
MOST_STATES = 150_000

IN_PLACE = ("allocations", "appends", "evictions", "recycles", "releases", "endings")
SHARING = ("allocations", "hits", "appends", "evictions", "releases", "endings", "cachings")
FLIGHT = ("preparations", "copies", "settlements")
AT_ONCE = ("single_moves", "plans", "recycles", "attends")


def without(*kinds: str) -> tuple[str, ...]:
    return tuple(kind for kind in ALLOWED if kind not in kinds)


def scope(
    name: str,
    *,
    blocks: int,
    size: int,
    requests: str,
    tokens: int,
    kinds: tuple[str, ...],
    headroom: int = 0,
    with_forbidden: bool = False,
    with_progress: bool = True,
) -> Scope:
    """`blocks` are usable ones, besides the null block; `tokens` is the most per request, and
    `headroom` the most blocks that are set aside at a time."""
    bounds = Bounds(tuple(requests), tokens, appended=2, evicted=(1,), moved=3, headroom=headroom)
    return Scope(
        name=name,
        num_blocks=blocks + 1,
        block_size=size,
        bounds=bounds,
        kinds=kinds,
        with_forbidden=with_forbidden,
        with_progress=with_progress,
        most_states=MOST_STATES,
    )


ALL_ONE = scope(
    "everything, one request, 2 blocks of 2",
    blocks=2,
    size=2,
    requests="a",
    tokens=5,
    kinds=without(),
    headroom=1,
    with_forbidden=True,
)
ALL_TWO = scope(
    "everything but headroom, two requests, 3 blocks of 1",
    blocks=3,
    size=1,
    requests="ab",
    tokens=2,
    kinds=without("reservations"),
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
FLYING = scope(
    "in flight, two requests, 4 blocks of 2",
    blocks=4,
    size=2,
    requests="ab",
    tokens=4,
    kinds=without(*AT_ONCE, "hits", "cachings", "returns"),
    headroom=1,
)
SCOPES = (
    ALL_ONE,
    ALL_TWO,
    FLYING,
    scope(
        "in flight and preempted, two requests, 5 blocks of 1",
        blocks=5,
        size=1,
        requests="ab",
        tokens=3,
        kinds=(
            "allocations",
            "appends",
            "evictions",
            *FLIGHT,
            "endings",
            "returns",
            "reservations",
        ),
        headroom=1,
    ),
    scope(
        "in flight beside the steps, one request, 3 blocks of 2",
        blocks=3,
        size=2,
        requests="a",
        tokens=6,
        kinds=(*IN_PLACE, *FLIGHT),
    ),
    scope(
        "in flight into headroom, one request, 4 blocks of 2",
        blocks=4,
        size=2,
        requests="a",
        tokens=6,
        kinds=("allocations", "appends", "evictions", *FLIGHT, "reservations"),
        headroom=1,
    ),
    scope(
        "in flight and shared, two requests, 3 blocks of 1",
        blocks=3,
        size=1,
        requests="ab",
        tokens=3,
        kinds=without(*AT_ONCE, "reservations"),
    ),
    scope(
        "in flight, shared and headroom, two requests, 3 blocks of 1",
        blocks=3,
        size=1,
        requests="ab",
        tokens=2,
        kinds=without(*AT_ONCE),
        headroom=1,
        with_forbidden=True,
    ),
    SHARED,
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
        tokens=8,
        kinds=IN_PLACE,
    ),
)


# The search -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Every scope searched once. Nothing the search makes is cyclic, so the collector is off."""
    gc.disable()
    try:
        return {scope.name: explore(scope, controls=reachable.ALL) for scope in SCOPES}
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


@pytest.mark.parametrize("control", reachable.ALL)
def test_a_state_that_must_be_reachable_is_reached(
    reports: dict[str, Report], control: str
) -> None:
    assert any(control in report.reached for report in reports.values())


# Negative controls ------------------------------------------------------------------------------

FAULTS: dict[broken_steps.BrokenStep, tuple[Scope, str]] = {
    broken_steps.forgetful_recycle: (ALL_ONE, "I2 unique mapping: .* already belongs to"),
    broken_steps.freeing_release: (SHARED, "L5 accounting: .* owned 2 .*not the 3 blocks"),
    broken_steps.copyless_move: (ALL_ONE, "I1 conservation: .* payload changed"),
    broken_steps.rewriting_hit: (SHARED, "L8 sharing: .* cached bytes changed"),
    broken_steps.evicting_the_last: (ALL_ONE, "accepted, not rejected as LAST_TOKEN"),
    broken_steps.gainless_plan: (ALL_ONE, "rejected as NOTHING_TO_DO, not as NO_GAIN"),
    broken_steps.early_commit: (ALL_ONE, "accepted, not rejected as NOT_WAITED"),
    broken_steps.waitless_read: (ALL_ONE, "accepted, not rejected as COPY_PENDING"),
    broken_steps.unfenced_finish: (FLYING, "L11 fence: .* free while a copy may still touch"),
    broken_steps.lost_headroom: (FLYING, "L5 accounting: .*, not the 4 blocks"),
    broken_steps.endless_wait: (FLYING, "no block of request 'a' can come back"),
    broken_steps.recycling_in_flight: (ALL_ONE, "accepted, not rejected as IN_FLIGHT"),
}


def test_every_broken_step_is_a_control() -> None:
    assert set(FAULTS) == set(broken_steps.ALL)


@pytest.mark.parametrize("step", broken_steps.ALL, ids=lambda step: step.__name__)
def test_a_fault_in_the_step_function_is_found(step: broken_steps.BrokenStep) -> None:
    within, fault = FAULTS[step]
    report = explore(within, step=step)
    assert re.search(fault, report.fault or ""), report.fault
    assert report.history, "the fault comes with the events that lead to it"
    assert explore(within, step=step).history == report.history, "the search is deterministic"


def test_the_race_for_a_shared_source_is_found() -> None:
    """Regression: without the guard on writes, the search finds the history in which the last
    owner of a block takes a hole that a copy of a request that is gone still reads."""

    def racing(state: State, event: spec.Event) -> broken_steps.Outcome:
        after = spec.step(state, event)
        pending = isinstance(after, spec.Rejected) and after.reason is spec.Reason.COPY_PENDING
        if not (pending and isinstance(event, spec.Recycle)):
            return after
        after = spec.step(replace(state, flights=()), event)
        return replace(after, flights=state.flights) if isinstance(after, State) else after

    report = explore(ALL_TWO, step=racing)
    assert report.fault == "a forbidden event was accepted, not rejected as COPY_PENDING"
    kinds = [type(event).__name__ for event in report.history]
    assert {"Hit", "Prepare"} <= {*kinds}
    assert kinds[-1] == "Recycle"
    assert {"Finish", "Preempt"} & {*kinds}
    assert not {"Wait", "Commit"} & {*kinds}


def test_a_scope_that_outgrows_its_bound_is_a_fault() -> None:
    small = Scope(
        name="bounded", num_blocks=3, block_size=2, bounds=Bounds(("a",), 4), most_states=10
    )
    assert explore(small).fault == "more than 10 states"
