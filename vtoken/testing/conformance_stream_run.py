"""Runs a history on a copy stream and judges the order in which things happen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from vtoken.errors import Rejected
from vtoken.kv.streams import Copy, CopyEvent, CopyFailed, CopyStream
from vtoken.testing.conformance import ConformanceReport, Failure, said
from vtoken.testing.conformance_stream_steps import (
    Compute,
    Launch,
    Poll,
    Step,
    Synchronize,
    Wait,
)
from vtoken.testing.device import COMPUTE, SimulatedDevice
from vtoken_spec.order import Op, OpKind, races

_SLOW_S = 0.002


class ComputeStream(Protocol):
    """The stream that a copy stream runs beside."""

    @property
    def log(self) -> Sequence[Op] | None:
        """The operations of both, in the order in which they were issued, if they are kept."""

    def run(
        self,
        action: Callable[[], None],
        *,
        kind: OpKind,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
    ) -> None:
        """Give it `action`, which touches these slots."""

    def synchronize(self) -> None:
        """The host waits until it has done everything; raises what waits have to report."""


class _Caller:
    """The calling thread, which runs things at once."""

    def __init__(self, stream: CopyStream) -> None:
        self.log: list[Op] | None = getattr(stream, "log", None)

    def run(
        self,
        action: Callable[[], None],
        *,
        kind: OpKind,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
    ) -> None:
        if self.log is not None:
            self.log.append(Op(COMPUTE, kind, None, reads, writes))
        action()

    def synchronize(self) -> None:
        pass


class _Simulated:
    """The compute stream of a simulated device."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.log = device.log

    def run(
        self,
        action: Callable[[], None],
        *,
        kind: OpKind,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
    ) -> None:
        self._device.submit(COMPUTE, action, kind=kind, reads=reads, writes=writes)

    def synchronize(self) -> None:
        self._device.synchronize(COMPUTE)


def compute_of(stream: CopyStream) -> ComputeStream:
    """The compute stream of the stream's simulated device, or the caller."""
    device = getattr(stream, "device", None)
    return _Simulated(device) if isinstance(device, SimulatedDevice) else _Caller(stream)


class _CopyBroke(Exception):
    """What a copy raises that is to fail."""


# One history ------------------------------------------------------------------------------------


def run_history(
    factory: Callable[[], CopyStream],
    compute: Callable[[CopyStream], ComputeStream],
    steps: Iterable[Step],
    *,
    patience_s: float,
    report: ConformanceReport | None = None,
) -> Failure | None:
    """The first failure, None if there is none. A law of the log comes first: it says most."""
    run = _Run(factory, compute, report)
    if not returns(partial(run.play, steps), patience_s):
        return Failure("hang", f"{run.now} has not returned after {patience_s} s")
    with run.lock:
        if run.log is not None and run.error is None:
            for breach in races(run.log):
                return Failure(breach.law, said(breach))
        if run.faults:
            return Failure(*run.faults[0])
        if run.error is not None:
            return Failure("error", f"{run.now}: {type(run.error).__name__}: {run.error}")
    return None


def returns(action: Callable[[], None], patience_s: float) -> bool:
    """Whether `action` ends in time, in a thread of its own: a stream is used from one thread."""
    thread = threading.Thread(target=action, name="conformance", daemon=True)
    thread.start()
    thread.join(patience_s)
    return not thread.is_alive()


class _Piece:
    """One copy of a launch, and whether it has begun and ended."""

    def __init__(self, launch: Launch, index: int, before: int) -> None:
        self.launch, self.index = launch, index
        self.before = before  # operations that the compute stream had been given
        self.begun = self.ended = False

    @property
    def expected(self) -> bool:
        """Whether it runs at all: nothing does behind a failure of its launch."""
        return self.launch.fails is None or self.index <= self.launch.fails

    def __str__(self) -> str:
        source, target = self.launch.pairs[self.index]
        return f"the copy of slot {source} to {target} of event{self.launch.name}"


class _Run:
    def __init__(
        self,
        factory: Callable[[], CopyStream],
        compute: Callable[[CopyStream], ComputeStream],
        report: ConformanceReport | None,
    ) -> None:
        self.lock = threading.Lock()
        self.faults: list[tuple[str, str]] = []
        self.error: BaseException | None = None
        self.log: Sequence[Op] | None = None
        self.now = "factory()"
        self._factory, self._of = factory, compute
        self._report = report
        self._pieces: list[_Piece] = []
        self._launches: dict[int, tuple[Launch, CopyEvent]] = {}
        self._waited: set[int] = set()
        self._given = self._done = 0

    def play(self, steps: Iterable[Step]) -> None:
        """Everything that a failure of is kept, not raised."""
        try:
            self._stream = self._factory()
            self._compute = self._of(self._stream)
            self.log = self._compute.log
            for step in steps:
                self.now = str(step)
                self._step(step)
                if self.faults:
                    break
            self._foreign()
            self._end()
        except BaseException as error:
            self.error = error

    # ---- steps

    def _step(self, step: Step) -> None:
        known = self._launches.get(step.name)
        match step:
            case Launch():
                self._launch(step)
            case Compute(kind, slot):
                if not self._forbids(kind, slot):
                    self._give(kind, slot)
            case Wait() if known is not None:
                self._wait(*known)
            case Poll() if known is not None:
                self._poll(*known)
            case Synchronize():
                self._compute.synchronize()
        self._count(type(step).__name__.lower())

    def _launch(self, launch: Launch) -> None:
        copies = []
        for index, (source, target) in enumerate(launch.pairs):
            piece = _Piece(launch, index, self._given)
            self._pieces.append(piece)
            slots = torch.tensor([source]), torch.tensor([target])
            copies.append(Copy(partial(self._copy, piece, tuple(self._pieces)), *slots, "a"))
        try:
            event = self._stream.launch(copies)
        except _CopyBroke:
            self._fault("failure", "launch raises what a copy of it raised")
            return
        self._launches[launch.name] = launch, event
        self._count("copy", len(copies))
        if launch.fails is not None:
            self._count("failing copy")

    def _wait(self, launch: Launch, event: CopyEvent) -> None:
        raised: CopyFailed | None = None
        try:
            self._stream.wait(event)
            if launch.fails is not None:  # where the wait does not block, this is what does
                self._compute.synchronize()
        except CopyFailed as error:
            raised = error
        self._judge_failure(launch, event, raised)
        self._ordered_behind(launch, f"what follows the wait for event{launch.name}")

    def _poll(self, launch: Launch, event: CopyEvent) -> None:
        if self._stream.done(event):
            pieces = [piece for piece in self._pieces if piece.launch is launch]
            self._all_ended(pieces, "done", f"event{launch.name} is done")
            self._ordered_behind(launch, f"what the host does once event{launch.name} is done")

    def _ordered_behind(self, launch: Launch, what: str) -> None:
        """Whatever the compute stream is given from now on comes behind the launch, and behind
        earlier ones, which come before it in their stream."""
        names = [name for name in self._launches if name <= launch.name]
        self._waited.update(names)
        slots = {slot for name in names for pair in self._launches[name][0].pairs for slot in pair}
        free = [slot for slot in sorted(slots) if not self._forbids("attend", slot)]
        self._give("attend", *free, what=what)

    def _forbids(self, kind: OpKind, slot: int) -> bool:
        """Whether a launch that nobody waited for keeps the compute stream from a slot."""
        pending = [
            pair
            for name, (launch, _) in self._launches.items()
            if name not in self._waited
            for pair in launch.pairs
        ]
        return any(
            slot == target or (slot == source and kind == "write") for source, target in pending
        )

    def _give(self, kind: OpKind, *slots: int, what: str = "") -> None:
        behind = [p for p in self._pieces if p.launch.name in self._waited]
        action = partial(self._computed, behind, what or "the compute stream")
        self._given += 1
        reads, writes = (slots, ()) if kind == "attend" else ((), slots)
        self._compute.run(action, kind=kind, reads=reads, writes=writes)

    # ---- what runs, in any thread

    def _copy(self, piece: _Piece, known: Sequence[_Piece]) -> None:
        with self.lock:
            if piece.begun:
                self.faults.append(("once", f"{piece} runs again"))
            piece.begun = True
            if not piece.expected:
                what = f"{piece} runs, although one before it in its launch has failed"
                self.faults.append(("failure", what))
            self._all_ended(known[: known.index(piece)], "order", f"{piece} begins")
            if self._done < piece.before:
                left = piece.before - self._done
                what = f"{piece} begins, {left} operation(s) of the compute stream before it"
                self.faults.append(("order", f"{what} have not run"))
        if piece.index == piece.launch.slow:
            time.sleep(_SLOW_S)
        with self.lock:
            piece.ended = True
        if piece.index == piece.launch.fails:
            raise _CopyBroke("to be reported")

    def _computed(self, behind: Sequence[_Piece], what: str) -> None:
        with self.lock:
            self._done += 1
            self._all_ended(behind, "I3", f"{what} runs")

    def _all_ended(self, pieces: Sequence[_Piece], law: str, when: str) -> None:
        for piece in pieces:
            if piece.expected and not piece.ended:
                self.faults.append((law, f"{when}, and {piece} has not ended"))
                return

    # ---- the end

    def _foreign(self) -> None:
        for use in (self._stream.wait, self._stream.done):
            self.now = f"stream.{use.__name__}(CopyEvent(['a']))"
            try:
                use(CopyEvent(["a"]))
            except Rejected:
                self._refused("an event of another kind of stream")
            else:
                self._fault("foreign event", f"{self.now} is accepted")

    def _end(self) -> None:
        self.now = "stream.close()"
        self._stream.close()
        with self.lock:
            self._all_ended(self._pieces, "close", "the stream is closed")
        self._stream.close()
        self._compute.synchronize()
        for launch, event in self._launches.values():
            self.now = f"event{launch.name} after the end"
            if not self._stream.done(event):
                self._fault(
                    "done", f"event{launch.name} is not done, although the stream is closed"
                )
            raised: CopyFailed | None = None
            try:
                self._stream.wait(event)
            except CopyFailed as error:
                raised = error
            self._judge_failure(launch, event, raised)
        self.now = "stream.launch([]) after the end"
        try:
            self._stream.launch([])
        except Rejected:
            self._refused("a closed stream")
        else:
            self._fault("close", "a launch is accepted, although the stream is closed")

    def _judge_failure(self, launch: Launch, event: CopyEvent, raised: CopyFailed | None) -> None:
        name = f"event{launch.name}"
        if launch.fails is None:
            if raised is not None or event.error is not None:
                self._fault("failure", f"{name} reports {raised or event.error!r}, and none failed")
        elif raised is None:
            self._fault("failure", f"a copy of {name} failed, and the wait for it raises nothing")
        elif not isinstance(event.error, _CopyBroke) or raised.__cause__ is not event.error:
            what = f"the error of {name} is {event.error!r}, caused by {raised.__cause__!r}"
            self._fault("failure", f"{what}, and not what the copy raised")

    # ---- notes

    def _fault(self, law: str, message: str) -> None:
        with self.lock:
            self.faults.append((law, message))

    def _count(self, name: str, times: int = 1) -> None:
        if self._report is not None:
            self._report.operations[name] += times

    def _refused(self, reason: str) -> None:
        if self._report is not None:
            self._report.rejections[reason] += 1
