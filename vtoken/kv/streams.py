"""Copy streams: copies that run beside the computation, and what orders the two.

There are two streams. The *compute stream* writes new KV and attends; the *copy stream* runs the
moves of plans. `launch` puts copies behind everything that the compute stream has been given so
far, since they read what it writes and may write where it still reads; `wait` puts whatever the
compute stream is given from then on behind a launch. Nothing else orders them, and no operation
synchronises both.

`SynchronousCopyStream` and `ThreadCopyStream` are for the CPU, where the compute stream is the
calling thread. On a CUDA device `launch` is to record an event on the compute stream, make the copy
stream wait for it, issue the copies there and record the launch's own event behind them; `wait` is
then a wait of the compute stream for that event, not of the host. Slots, workspaces and whatever
else the copies touch have to stay allocated until the launch is done.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vtoken.errors import Rejected, VTokenError

__all__ = [
    "Copy",
    "CopyEvent",
    "CopyFailed",
    "CopyStream",
    "SynchronousCopyStream",
    "ThreadCopyStream",
]


class CopyFailed(VTokenError):
    """A copy did not finish, so its targets may hold anything; its sources are as they were.

    When: a copy's event is waited for. Whose fault: the device's or ours; the cause is chained.
    What to do: abort the plan, whose layout has not been switched to; other launches are unharmed.
    """


@dataclass(frozen=True)
class Copy:
    """A piece of a plan that runs as one.

    Attributes:
        run: copies K and V in all layers; called once, in the copy stream's own thread of control.
        sources, targets: slots it reads and writes, int64 `[n]` each, unchanged until it has run.
        owner: the request whose tokens move.
    """

    run: Callable[[], None]
    sources: torch.Tensor
    targets: torch.Tensor
    owner: str


class CopyEvent:
    """Stands for one launch; only the stream that gave it can say how far it is.

    Attributes:
        error: once the launch is done, what a copy of it raised, else None. The launch's copies
            behind the one that failed are not run.
    """

    def __init__(self, owners: Sequence[str]) -> None:
        self.error: BaseException | None = None
        self._owners = tuple(dict.fromkeys(owners))

    def check(self) -> None:
        """Raise `CopyFailed` if a copy is known to have failed."""
        if self.error is not None:
            whose = ", ".join(self._owners)
            what = f"{type(self.error).__name__}: {self.error}"
            raise CopyFailed(f"a copy failed in a launch for {whose}: {what}") from self.error


class CopyStream(Protocol):
    """What a scheduler's worker needs of a copy stream. To be used from one thread."""

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        """Queue `copies`, in order, behind earlier launches and behind everything the compute
        stream has been given so far. Does not raise what a copy raises.

        Raises:
            Rejected: the stream is closed.
        """

    def wait(self, event: CopyEvent) -> None:
        """Put everything that the compute stream is given from now on behind `event`.

        Raises:
            CopyFailed: one of its copies failed. Where the wait does not block the host, a failure
                that comes later is raised by whatever next makes the host wait for the device.
            Rejected: the event is of another kind of stream.
        """

    def done(self, event: CopyEvent) -> bool:
        """Whether the launch is over, with or without an error; does not block. Once the host has
        seen this, what it gives the compute stream comes after the launch without a wait.

        Raises:
            Rejected: the event is of another kind of stream.
        """

    def close(self) -> None:
        """Finish what is queued and give back what the stream holds; again is no error."""


class _HostEvent(CopyEvent):
    """The event of a stream whose copies run on the host."""

    def __init__(self, owners: Sequence[str]) -> None:
        super().__init__(owners)
        self.finished = threading.Event()

    def execute(self, copies: Sequence[Copy]) -> None:
        """Run the copies up to the first that fails; raises nothing, so that a thread lives on."""
        try:
            for copy in copies:
                copy.run()
        except BaseException as error:
            self.error = error
        self.finished.set()


def _host_event(event: CopyEvent) -> _HostEvent:
    if not isinstance(event, _HostEvent):
        raise Rejected(f"{type(event).__name__} is an event of another kind of copy stream")
    return event


class SynchronousCopyStream:
    """Runs the copies while they are launched: nothing is ever in flight (`force_sync`)."""

    def __init__(self) -> None:
        self._open = True

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        if not self._open:
            raise Rejected("the copy stream is closed")
        event = _HostEvent([copy.owner for copy in copies])
        event.execute(copies)
        if event.error is not None and not isinstance(event.error, Exception):
            raise event.error  # an interrupt is for the caller, and this is its thread
        return event

    def wait(self, event: CopyEvent) -> None:
        _host_event(event).check()

    def done(self, event: CopyEvent) -> bool:
        return _host_event(event).finished.is_set()

    def close(self) -> None:
        self._open = False


_Job = tuple[tuple[Copy, ...], _HostEvent] | None


class ThreadCopyStream:
    """One worker thread, first in, first out; torch lets go of the interpreter lock while it
    copies, so that copies and the caller's computation overlap.

    `launch` returns at once, and everything the compute stream was given has been done by then,
    because that stream is the caller. `wait` blocks the caller for the same reason. The thread ends
    when the stream is closed or no longer referred to, and does not keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name="vtoken-copies", daemon=True
        )
        self._thread.start()
        # Also called when the stream is collected; never twice.
        self._end = weakref.finalize(self, self._jobs.put, None)

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        if not self._end.alive:
            raise Rejected("the copy stream is closed")
        event = _HostEvent([copy.owner for copy in copies])
        self._jobs.put((tuple(copies), event))
        return event

    def wait(self, event: CopyEvent) -> None:
        host_event = _host_event(event)
        host_event.finished.wait()
        host_event.check()

    def done(self, event: CopyEvent) -> bool:
        return _host_event(event).finished.is_set()

    def close(self) -> None:
        self._end()
        self._thread.join()


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    # The mode belongs to a thread, and a cache that was allocated in inference mode, as an engine
    # does, may be written in that mode only. Other tensors do not mind.
    with torch.inference_mode():
        while (job := jobs.get()) is not None:
            copies, event = job
            event.execute(copies)
            del job, copies, event  # keep no caller's tensors alive while waiting
