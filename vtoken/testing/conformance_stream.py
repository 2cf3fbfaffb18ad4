"""The conformance suite of a copy stream: histories of launches, waits and what the compute stream
does in between, in which every copy notes when it runs.

What is judged is order, not speed: when a copy or an operation of the compute stream runs, all that
the contract puts before it must have run. Some copies are slow, so that a stream that does not wait
is seen not to. A stream that comes with a log of its operations is also judged by
`vtoken_spec.order.races`, which finds a missing dependency where every run happened to be right.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from vtoken.kv.streams import Copy, CopyStream
from vtoken.testing.conformance import (
    ConformanceError,
    ConformanceReport,
    Failure,
    shortest,
)
from vtoken.testing.conformance_stream_run import (
    ComputeStream,
    compute_of,
    returns,
    run_history,
)
from vtoken.testing.conformance_stream_steps import Step, drawn_steps, simpler

__all__ = ["check_copy_stream"]

StreamFactory = Callable[[], CopyStream]
ComputeFactory = Callable[[CopyStream], ComputeStream]


def check_copy_stream(
    factory: StreamFactory,
    *,
    examples: int = 100,
    seed: int = 0,
    compute: ComputeFactory = compute_of,
    patience_s: float = 10.0,
) -> ConformanceReport:
    """Hold a copy stream to the contract of `vtoken.kv.streams.CopyStream`.

    Args:
        factory: makes a stream; called for each history, which closes it. A `log` of
            `vtoken_spec.order.Op` that the stream may have is judged by I3, L7 and L11, and is
            given the compute stream's operations, under the name "compute".
        examples: histories of about 12 steps.
        seed: of the first; the others follow in numbers.
        compute: the compute stream that goes with a stream. By default that of its
            `SimulatedDevice`, if it has one as `device`; else the caller, who runs things at once.
        patience_s: after how long a history, of which copies take milliseconds, counts as hanging.

    Raises:
        ConformanceError: with the shortest history found.
    """
    report = ConformanceReport("copy stream")
    failure = _polled_while_it_runs(factory, patience_s)
    if failure is not None:
        lines = ("event = stream.launch([a copy that goes on])", "stream.done(event)")
        raise ConformanceError(failure.law, failure.message, lines, "check_copy_stream(factory)")
    for number in range(seed, seed + examples):
        steps = drawn_steps(random.Random(number))
        failure = run_history(factory, compute, steps, patience_s=patience_s, report=report)
        if failure is not None:
            again = f"check_copy_stream(factory, examples=1, seed={number})"
            raise _shown(factory, compute, steps, failure, again, patience_s)
        report.histories += 1
    return report


def _shown(
    factory: StreamFactory,
    compute: ComputeFactory,
    steps: Sequence[Step],
    failure: Failure,
    again: str,
    patience_s: float,
) -> ConformanceError:
    """The error, with a shorter history that fails by the same law. Threads may hide a fault, so
    each is tried some times; one that hangs only a few, since each costs patience."""
    hangs = failure.law == "hang"
    seen = failure

    def fails(candidate: Sequence[Step]) -> bool:
        nonlocal seen
        for _ in range(1 if hangs else 3):
            patient_s = min(0.3, patience_s) if hangs else patience_s
            found = run_history(factory, compute, candidate, patience_s=patient_s)
            if found is not None and found.law == failure.law:
                seen = found
                return True
        return False

    short = shortest(steps, fails, simpler=simpler, most_runs=12 if hangs else 300)
    lines = ("stream = factory()", *map(str, short), "stream.close()")
    return ConformanceError(seen.law, seen.message, lines, again)


def _polled_while_it_runs(factory: StreamFactory, patience_s: float) -> Failure | None:
    """Asking whether a launch is done returns while its copy goes on, and says no.

    The copy ends when it has been asked about, or after a while by itself: then asking blocked, or
    the machine was busy, so a longer while is tried. A stream that runs copies while they are
    launched cannot be asked before.
    """
    failure = None
    for share in (0.01, 0.05, 0.2):
        found: list[Failure] = []
        if not returns(partial(_poll_once, factory, share * patience_s, found), patience_s):
            return Failure("hang", f"one launch and its end take more than {patience_s} s")
        failure = found[0] if found else None
        if failure is None or failure.message != _BLOCKS:
            break
    return failure


_BLOCKS = "asking blocks until the launch is over"


def _poll_once(factory: StreamFactory, left_alone_s: float, found: list[Failure]) -> None:
    asked, ended = threading.Event(), threading.Event()

    def copy() -> None:
        asked.wait(left_alone_s)
        ended.set()

    try:
        stream = factory()
        event = stream.launch([Copy(copy, torch.tensor([1]), torch.tensor([2]), "a")])
        if not ended.is_set():
            over = stream.done(event)
            if over:
                goes_on = "the event is done, and its copy goes on"
                found.append(Failure("done", _BLOCKS if ended.is_set() else goes_on))
        asked.set()
        stream.close()
    except BaseException as error:
        found.append(Failure("error", f"{type(error).__name__}: {error}"))
