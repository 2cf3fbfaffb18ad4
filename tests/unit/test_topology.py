"""The judge of recorded times, on times made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.topology import Interval, overlap, violations


def op(name: str, start: float, end: float, *, r: Sequence[int] = (), w: Sequence[int] = ()):
    return Interval(name, frozenset(r), frozenset(w), start, end)


WRITE = op("write", 0.0, 1.0, w=[3])
COPY = op("copy", 1.0, 2.0, r=[3], w=[9])
BESIDE = op("beside", 1.0, 2.5, r=[3])
AFTER = op("after", 2.5, 3.0, r=[9])


def test_operations_in_order_are_right_and_reading_a_source_beside_its_copy_is_too() -> None:
    assert violations([WRITE, COPY, BESIDE, AFTER]) == []
    assert overlap(COPY, BESIDE) == overlap(BESIDE, COPY) == 1.0
    assert overlap(COPY, AFTER) == 0.0


@pytest.mark.parametrize(
    ("late", "early", "what"),
    [
        # attention reads the target before the copy is complete (I3)
        (COPY, op("after", 1.9, 3.0, r=[9]), "after began 0.100 ms before copy had ended"),
        # a copy reads what is not written yet
        (WRITE, op("copy", 0.75, 2.0, r=[3], w=[9]), "copy began 0.250 ms before write had ended"),
        # the source's next owner writes it under the copy (L11)
        (COPY, op("owner", 0.5, 0.6, w=[3]), "owner began 1.500 ms before copy had ended"),
        # a copy writes where attention still reads
        (op("old", 0.0, 1.5, r=[9]), COPY, "copy began 0.500 ms before old had ended"),
        # two writes of one slot
        (COPY, op("write", 1.5, 1.6, w=[9]), "write began 0.500 ms before copy had ended"),
    ],
)
def test_each_conflict_that_begins_too_soon_is_named(
    late: Interval, early: Interval, what: str
) -> None:
    assert violations([late, early]) == [what]


def test_every_earlier_operation_counts_not_only_the_last() -> None:
    early = op("after", 1.5, 3.0, r=[9])
    assert len(violations([WRITE, COPY, BESIDE, early])) == 1
    assert len(violations([WRITE, COPY, op("copy 2", 0.0, 5.0, r=[3], w=[9])])) == 2


def test_the_clocks_resolution_is_no_violation_and_more_is() -> None:
    early = op("after", 1.999, 3.0, r=[9])
    assert violations([COPY, early], tolerance=0.002) == []
    assert len(violations([COPY, early], tolerance=0.0005)) == 1


def test_operations_on_other_slots_may_run_at_any_time() -> None:
    assert violations([COPY, op("other", 0.0, 5.0, r=[1, 3], w=[2, 8])]) == []
