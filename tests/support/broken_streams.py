"""Copy streams with one fault each, and the law or check that names it; and some without."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from support.faults import Fault
from vtoken.errors import Rejected
from vtoken.kv.streams import Copy, CopyEvent, CopyStream, SynchronousCopyStream, ThreadCopyStream
from vtoken.testing.device import COMPUTE, COPY, STRATEGIES, AdversarialCopyStream, SimulatedDevice
from vtoken_spec.order import Op


def adversary(strategy: str, kind: type[AdversarialCopyStream] = AdversarialCopyStream) -> Any:
    return lambda: kind(SimulatedDevice(strategy))  # type: ignore[arg-type]


class LoggedThread(ThreadCopyStream):
    """A thread that writes down what it orders."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Op] = []
        self.numbers: dict[CopyEvent, int] = {}

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        event = super().launch(copies)
        number = len(self.log)
        self.log += [Op(COMPUTE, "record", event=number), Op(COPY, "wait", event=number)]
        for copy in copies:
            slots = tuple(copy.sources.tolist()), tuple(copy.targets.tolist())
            self.log.append(Op(COPY, "copy", copy.owner, *slots))
        self.numbers[event] = len(self.log)
        self.log.append(Op(COPY, "record", event=self.numbers[event]))
        return event

    def wait(self, event: CopyEvent) -> None:
        if event in self.numbers:
            self.log.append(Op(COMPUTE, "wait", event=self.numbers[event]))
        super().wait(event)

    def done(self, event: CopyEvent) -> bool:
        over = super().done(event)
        if over and event in self.numbers:
            self.log.append(Op(COMPUTE, "wait", event=self.numbers[event]))
        return over


class Queued:
    """A stream on threads that is plain enough to be broken in parts."""

    workers = 1

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.open = True
        self.threads = [
            threading.Thread(target=self.work, daemon=True) for _ in range(self.workers)
        ]
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        while (job := self.jobs.get()) is not None:
            self.execute(*job)

    def execute(self, event: QueuedEvent, copies: Sequence[Copy]) -> None:
        try:
            for copy in copies:
                copy.run()
        except BaseException as error:
            self.failed(event, error)
        event.finished.set()

    def failed(self, event: QueuedEvent, error: BaseException) -> None:
        event.error = error

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        if not self.open:
            raise Rejected("the copy stream is closed")
        event = QueuedEvent([copy.owner for copy in copies])
        self.jobs.put((event, tuple(copies)))
        return event

    def wait(self, event: CopyEvent) -> None:
        self.mine(event).finished.wait()
        event.check()

    def done(self, event: CopyEvent) -> bool:
        return self.mine(event).finished.is_set()

    def close(self) -> None:
        if self.open:
            self.open = False
            for _ in self.threads:
                self.jobs.put(None)
        for thread in self.threads:
            thread.join()

    def mine(self, event: CopyEvent) -> QueuedEvent:
        if not isinstance(event, QueuedEvent):
            raise Rejected("an event of another kind")
        return event


class QueuedEvent(CopyEvent):
    def __init__(self, owners: Sequence[str]) -> None:
        super().__init__(owners)
        self.finished = threading.Event()


class TwoWorkers(Queued):
    workers = 2


class NewestFirst(Queued):
    """Runs nothing before somebody waits, and then in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        event = super().launch(())
        self.held.append((event, copies))
        return event

    def wait(self, event: CopyEvent) -> None:
        self.mine(event)
        while self.held:
            self.execute(*self.held.pop())
        super().wait(event)

    def close(self) -> None:
        if self.held:
            self.wait(self.held[-1][0])
        super().close()


class WaitReturnsEarly(Queued):
    def wait(self, event: CopyEvent) -> None:
        self.mine(event)
        event.check()


class WaitsForTheFirstCopyOnly(Queued):
    """The event is complete when the launch's first copy is."""

    def execute(self, event: QueuedEvent, copies: Sequence[Copy]) -> None:
        super().execute(event, copies[:1])
        if event.error is None:
            super().execute(event, copies[1:])


class FailureLost(Queued):
    def failed(self, event: QueuedEvent, error: BaseException) -> None:
        pass


class FailureRenamed(Queued):
    def failed(self, event: QueuedEvent, error: BaseException) -> None:
        event.error = RuntimeError(str(error))


class FailureOfEveryLaterLaunch(Queued):
    broken: BaseException | None = None

    def failed(self, event: QueuedEvent, error: BaseException) -> None:
        event.error = self.broken = error

    def execute(self, event: QueuedEvent, copies: Sequence[Copy]) -> None:
        super().execute(event, copies)
        event.error = event.error or self.broken


class FailureEndsTheThread(Queued):
    def work(self) -> None:
        while (job := self.jobs.get()) is not None:
            self.execute(*job)
            if job[0].error is not None:
                return


class RestOfAFailedLaunchRuns(Queued):
    def execute(self, event: QueuedEvent, copies: Sequence[Copy]) -> None:
        for copy in copies[:-1]:
            try:
                copy.run()
            except Exception as error:
                event.error = error
        super().execute(event, copies[-1:])


class LaunchRaises(SynchronousCopyStream):
    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        event = super().launch(copies)
        if event.error is not None:
            raise event.error
        return event


class RunsTwice(Queued):
    def execute(self, event: QueuedEvent, copies: Sequence[Copy]) -> None:
        super().execute(event, copies)
        if event.error is None:
            super().execute(event, copies)


class CloseDropsWhatIsQueued(Queued):
    def close(self) -> None:
        while self.open and not self.jobs.empty():
            event, _ = self.jobs.get()
            event.finished.set()
        super().close()


class LaunchesWhenClosed(SynchronousCopyStream):
    def close(self) -> None:
        pass


class ClosesOnce(Queued):
    def close(self) -> None:
        if not self.open:
            raise ValueError("closed already")
        super().close()


class AlwaysDone(Queued):
    def done(self, event: CopyEvent) -> bool:
        self.mine(event)
        return True


class DoneBlocks(Queued):
    def done(self, event: CopyEvent) -> bool:
        return self.mine(event).finished.wait()


class AnyEvent(Queued):
    def mine(self, event: CopyEvent) -> Any:
        return event if isinstance(event, QueuedEvent) else QueuedEvent([])

    def wait(self, event: CopyEvent) -> None:
        if isinstance(event, QueuedEvent):
            super().wait(event)


class LaunchWithoutWait(AdversarialCopyStream):
    """Copies are not ordered behind what the compute stream was given."""

    def _follow_compute(self) -> None:
        pass


class WaitWithoutEvent(AdversarialCopyStream):
    def wait(self, event: CopyEvent) -> None:
        self._mine(event)
        event.check()


class Unlogged(LaunchWithoutWait):
    """On a device whose log says nothing, so that only the run shows it."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device)
        device.log = type("Nothing", (list,), {"append": lambda *_: None})()


class UnloggedWait(WaitWithoutEvent):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device)
        device.log = type("Nothing", (list,), {"append": lambda *_: None})()


class LogWithoutWaits(LoggedThread):
    """Right in every run, but by its log nothing orders the compute stream behind the copies."""

    def wait(self, event: CopyEvent) -> None:
        ThreadCopyStream.wait(self, event)


def named(kind: type[AdversarialCopyStream], strategy: str) -> Callable[[], CopyStream]:
    made: Callable[[], CopyStream] = adversary(strategy, kind)
    made.__name__ = f"{kind.__name__}, {strategy}"
    return made


STREAM_FAULTS = [
    Fault(TwoWorkers, "order", "I3", "close"),
    Fault(NewestFirst, "order"),
    Fault(WaitReturnsEarly, "I3", "failure"),
    Fault(WaitsForTheFirstCopyOnly, "I3", "failure"),
    Fault(FailureLost, "failure"),
    Fault(FailureRenamed, "failure"),
    Fault(FailureOfEveryLaterLaunch, "failure"),
    Fault(FailureEndsTheThread, "hang"),
    Fault(RestOfAFailedLaunchRuns, "failure"),
    Fault(LaunchRaises, "failure"),
    Fault(RunsTwice, "once"),
    Fault(CloseDropsWhatIsQueued, "close"),
    Fault(LaunchesWhenClosed, "close"),
    Fault(ClosesOnce, "error"),
    Fault(AlwaysDone, "done"),
    Fault(DoneBlocks, "done"),
    Fault(AnyEvent, "foreign event"),
    *(Fault(named(LaunchWithoutWait, strategy), "L11") for strategy in STRATEGIES),
    *(Fault(named(WaitWithoutEvent, strategy), "I3") for strategy in STRATEGIES),
    Fault(named(Unlogged, "copies first"), "order"),
    Fault(named(UnloggedWait, "copies last"), "I3"),
    Fault(LogWithoutWaits, "I3"),
]
