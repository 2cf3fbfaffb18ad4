"""Relocations racing the compute stream's own writes and reads, in histories that Hypothesis draws:
on a CUDA device, on threads, and in the simulation. Streams with a fault are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from support.broken_streams import LaunchWithoutWait, WaitWithoutEvent
from support.lanes import (
    CudaLanes,
    Lanes,
    NoWaitBeforeReading,
    NoWaitForCompute,
    SimulatedLanes,
    ThreadLanes,
)
from support.races import SLOTS, Attend, Launch, Played, Step, Wait, Write, play
from support.where import on_device

LANES: dict[str, Callable[[], Lanes]] = {
    "threads": ThreadLanes,
    "copies last": lambda: SimulatedLanes("copies last"),
    "copies first": lambda: SimulatedLanes("copies first"),
    "either": lambda: SimulatedLanes("random", seed=5),
    "cuda": CudaLanes,
}
FAULTY: dict[str, Callable[[], Lanes]] = {
    "launch, simulated": lambda: SimulatedLanes("copies first", kind=LaunchWithoutWait),
    "reading, simulated": lambda: SimulatedLanes("copies last", kind=WaitWithoutEvent),
    "launch, cuda": lambda: CudaLanes(kind=NoWaitForCompute),
    "reading, cuda": lambda: CudaLanes(kind=NoWaitBeforeReading),
}

slots = st.integers(0, SLOTS - 1)
several = st.lists(slots, min_size=1, max_size=5).map(tuple)
steps = st.one_of(
    st.builds(Write, several, st.booleans()),
    st.builds(Attend, several),
    st.builds(Launch, st.lists(st.tuples(slots, slots), min_size=1, max_size=5).map(tuple)),
    st.builds(
        Launch,
        st.lists(st.tuples(slots, slots), min_size=1, max_size=5).map(tuple),
        st.just(True),
    ),
    st.builds(Wait, st.integers(0, 3)),
)
histories = st.lists(steps, min_size=8, max_size=20)
CONFIG = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)


def played(history: list[Step], make: Callable[[], Lanes]) -> Played:
    lanes = make()
    try:
        return play(history, lanes)
    finally:
        lanes.close()


@pytest.mark.parametrize(
    "where",
    ["threads", "copies last", "copies first", "either", pytest.param("cuda", marks=on_device)],
)
def test_every_read_finds_what_was_written_last(
    where: str, record_property: Callable[[str, object], None]
) -> None:
    totals = Played()

    @CONFIG
    @given(histories)
    def race(history: list[Step]) -> None:
        found = played(history, LANES[where])
        totals.launches += found.launches
        totals.beside += found.beside
        assert found.wrong == []

    race()
    record_property("launches", totals.launches)
    record_property("writes_and_reads_beside_copies", totals.beside)
    assert totals.launches > 40
    assert totals.beside > 40, "relocations and writes did race"


@pytest.mark.parametrize(
    "which",
    [pytest.param(name, marks=on_device if "cuda" in name else ()) for name in FAULTY],
)
def test_a_stream_that_leaves_out_a_wait_is_found(which: str) -> None:
    only_draw = settings(CONFIG, max_examples=200, phases=[Phase.generate])
    try:
        find(histories, lambda h: bool(played(h, FAULTY[which]).wrong), settings=only_draw)
    except NoSuchExample:
        pytest.fail("no history showed the missing wait")


def test_a_history_leaves_out_what_the_laws_forbid() -> None:
    """While slot 1 is copied to 2: no write of either, no read of 2, no second launch from 2."""
    history: list[Step] = [
        Write((1,)),
        Launch(((1, 2), (3, 3))),
        Write((1, 2, 4)),
        Attend((1, 2)),
        Launch(((2, 5), (6, 1), (1, 7))),
        Wait(0),
        Write((2,)),
    ]
    found = played(history, LANES["copies last"])
    assert found == Played([], launches=2, beside=3)
