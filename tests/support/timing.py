"""Times of work on a CUDA device, by its own clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]
#: cycles of the device's clock; about five milliseconds, in which the host gets ahead
HEAD_START = 10_000_000


def milliseconds(work: Work) -> float:
    """Of `work`, from when the device begins with it. The device is kept busy before, so that what
    the host needs for issuing the work is not in it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def alternated(
    works: Sequence[Work], *, rounds: int, clock: Callable[[Work], float] = milliseconds
) -> list[float]:
    """Median time of each, taken in turns so that a change of the clock rate meets all alike.

    Args:
        clock: times one of them; `milliseconds`, but for tests of this function.
    """
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for turn in range(rounds):
        order = range(len(works)) if turn % 2 == 0 else reversed(range(len(works)))
        for index in order:
            times[index].append(clock(works[index]))
    return [statistics.median(each) for each in times]
