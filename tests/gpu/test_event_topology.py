"""The order between the compute stream and the copy stream, from events recorded around each
operation (I3, L11): on a CUDA device, on threads, and in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from support.broken_streams import LaunchWithoutWait, WaitWithoutEvent
from support.lanes import (
    CudaLanes,
    Lanes,
    NoWaitBeforeReading,
    NoWaitForCompute,
    SimulatedLanes,
    ThreadLanes,
)
from support.races import fresh_layout
from support.topology import Interval, Timeline, overlap, violations
from support.where import on_device
from vtoken.core import CopyOrder, LayoutChange, StepOrders
from vtoken.kv.relocator import Relocator

#: about 5 ms on a device; the resolution of its events is half a microsecond
CYCLES, TOLERANCE = 10_000_000, 0.002

LANES: dict[str, Callable[[], Lanes]] = {
    "threads": lambda: ThreadLanes(pause=0.005),
    "copies last": lambda: SimulatedLanes("copies last"),
    "copies first": lambda: SimulatedLanes("copies first"),
    "cuda": lambda: CudaLanes(cycles=CYCLES),
}
RIGHT = ["threads", "copies last", "copies first", pytest.param("cuda", marks=on_device)]
WITHOUT_WAIT_FOR_COMPUTE = {
    "simulated": lambda: SimulatedLanes("copies first", kind=LaunchWithoutWait),
    "cuda": lambda: CudaLanes(cycles=CYCLES, kind=NoWaitForCompute),
}
WITHOUT_WAIT_BEFORE_READING = {
    "simulated": lambda: SimulatedLanes("copies last", kind=WaitWithoutEvent),
    "cuda": lambda: CudaLanes(cycles=CYCLES, kind=NoWaitBeforeReading),
}
FAULTY = ["simulated", pytest.param("cuda", marks=on_device)]


def relocation(lanes: Lanes) -> tuple[list[Interval], Timeline]:
    """Token 3 is written, moved to 9 while attention still reads it at 3, and then read at 9; slot
    3 goes to somebody else, who writes it."""
    line = Timeline(lanes, fresh_layout(lanes.device))
    mover = line.mover()
    source, target = line.place(3), line.place(9)
    copies = mover.copies(source.tensor, target.tensor, owner="a")
    _compile(line)
    line.write("write", source, 7.0)
    event = lanes.stream.launch(copies)
    line.attend("attention beside", source)
    lanes.stream.wait(event)
    line.attend("attention after", target)
    line.write("next owner", source, 8.0)
    # Noted when they were prepared, which was before the write they have to come behind.
    found = line.intervals()
    return [found[1], found[0], *found[2:]], line


def commit_and_abort(lanes: Lanes) -> tuple[list[Interval], Timeline]:
    """By a step's orders: one plan is committed and its target read, another is aborted and its
    target written by somebody else."""
    line = Timeline(lanes, fresh_layout(lanes.device))
    relocator = Relocator(line.mover(), lanes.stream, run=lanes.compute)
    sources, target, dropped = line.place(3, 4), line.place(9), line.place(13)
    _compile(line)
    line.write("write", sources, 7.0)
    ids = [np.array([number], dtype=np.int32) for number in (3, 9, 4, 13)]
    relocator.apply(
        StepOrders(
            launches=[
                CopyOrder(1, "a", ids[0], ids[0], ids[1]),
                CopyOrder(2, "a", ids[2], ids[2], ids[3]),
            ]
        )
    )
    line.attend("attention beside", sources)
    change = LayoutChange("a", ids[0], ids[0], ids[1], [0, 1, 2], [], False, flight=1)
    relocator.apply(StepOrders(waits=[1, 2], changes=[change]))
    line.attend("attention after the commit", target)
    line.write("write after the abort", dropped, 8.0)
    return line.intervals(), line


def _compile(line: Timeline) -> None:
    """What is compiled at its first use takes longer than a stream is kept busy."""
    first, second = line.place(0), line.place(1)
    line.layout.copy_slots(first.tensor, second.tensor)
    line.layout.write(first.tensor, line.layout.read(second.tensor))
    line.lanes.settle()


@pytest.fixture
def lanes() -> Iterator[Callable[[Callable[[], Lanes]], Lanes]]:
    """Makes lanes, and closes them."""
    made: list[Lanes] = []

    def make(how: Callable[[], Lanes]) -> Lanes:
        made.append(how())
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[[Callable[[], Lanes]], Lanes]


def values(line: Timeline, name: str) -> set[float]:
    return set(line.found[name].flatten().tolist())


@pytest.mark.parametrize("where", RIGHT)
def test_a_relocation_is_ordered_and_runs_beside_attention(
    lanes: Make, where: str, record_property: Callable[[str, object], None]
) -> None:
    found, line = relocation(lanes(LANES[where]))
    by_name = {interval.name: interval for interval in found}
    assert violations(found, tolerance=TOLERANCE) == []
    assert values(line, "attention beside") == values(line, "attention after") == {7.0}
    beside = overlap(by_name["copy 1"], by_name["attention beside"])
    if where in ("threads", "cuda"):
        record_property("milliseconds_side_by_side", beside)
        assert beside > 1.0, "nothing but the events orders the two streams"


@pytest.mark.parametrize("where", RIGHT)
def test_a_steps_orders_put_attention_and_writes_behind_the_copies(lanes: Make, where: str) -> None:
    found, line = commit_and_abort(lanes(LANES[where]))
    assert [interval.name for interval in found if "copy" in interval.name] == ["copy 1", "copy 2"]
    assert violations(found, tolerance=TOLERANCE) == []
    assert values(line, "attention after the commit") == {7.0}
    assert set(line.layout.read(line.place(13).tensor).flatten().tolist()) == {8.0}


@pytest.mark.parametrize("where", FAULTY)
def test_the_control_without_the_wait_for_what_was_written_is_found(
    lanes: Make, where: str
) -> None:
    found, line = relocation(lanes(WITHOUT_WAIT_FOR_COMPUTE[where]))
    wrong = violations(found, tolerance=TOLERANCE)
    assert any("copy 1 began" in what and "before write" in what for what in wrong), wrong
    assert values(line, "attention after") == {0.0}, "the bytes are wrong as well"


@pytest.mark.parametrize("where", FAULTY)
@pytest.mark.parametrize("body", [relocation, commit_and_abort])
def test_the_control_without_the_wait_before_reading_is_found(
    lanes: Make, where: str, body: Callable[[Lanes], tuple[list[Interval], Timeline]]
) -> None:
    found, _ = body(lanes(WITHOUT_WAIT_BEFORE_READING[where]))
    wrong = violations(found, tolerance=TOLERANCE)
    assert any("attention after" in what and "before copy 1" in what for what in wrong), wrong
    if body is commit_and_abort:
        assert any("write after the abort began" in what for what in wrong), wrong
