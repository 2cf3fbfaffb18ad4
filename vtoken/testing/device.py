"""A device with two streams that runs everything at the worst moment its dependencies allow.

`SimulatedDevice` holds two queues of closures. Giving it an operation runs nothing; when the host
waits for a stream, an adversary decides at each point which of the streams whose next operation
is ready goes on. So a dependency that nobody recorded shows as wrong bytes, in every run and not
once in a thousand. What was recorded is in `log`, for `vtoken_spec.order.races`, which finds the
same fault without the bytes.

| strategy | which stream goes on |
| --- | --- |
| "copies last" | the compute stream, unless it waits for a copy: no copy before it must |
| "copies first" | the copy stream, unless it waits for the compute stream, which lags behind |
| "random" | either, drawn from a seeded generator; the same seed, the same order |

`AdversarialCopyStream` is the copy stream of such a device.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch

from vtoken.errors import Rejected
from vtoken.kv.streams import Copy, CopyEvent
from vtoken_spec.order import NO_EVENT, Op, OpKind

COMPUTE, COPY = "compute", "copy"

Strategy = Literal["copies last", "copies first", "random"]
STRATEGIES: tuple[Strategy, ...] = ("copies last", "copies first", "random")

Slots: TypeAlias = torch.Tensor | np.ndarray | Iterable[int]


class DeviceError(RuntimeError):
    """The injected failure of a copy."""


class DeviceDeadlock(RuntimeError):
    """Every stream that has something to do waits for an event that cannot come."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """What a stream does next: wait for an event, or not; run; complete an event, or none."""

    run: Callable[[], None] | None
    after: int | None = None
    completes: int | None = None


class SimulatedDevice:
    """See the module's docstring.

    Attributes:
        log: every operation, in the order in which it was given to the device. That the host has
            waited for a stream is not in it.
    """

    def __init__(self, strategy: Strategy = "random", *, seed: int = 0) -> None:
        choices: dict[str, Callable[..., str]] = {
            "copies last": _copies_last,
            "copies first": _copies_first,
            "random": partial(_either, random.Random(seed)),
        }
        self.log: list[Op] = []
        self._choose = choices[strategy]
        self._queues: dict[str, deque[_Queued]] = {COMPUTE: deque(), COPY: deque()}
        self._events = 0
        self._complete: set[int] = set()
        # Events below this one are complete, and what they ordered is no longer in the log.
        self._forgotten = 0

    # ---- what the host gives it; nothing here runs anything

    def submit(
        self,
        stream: str,
        run: Callable[[], None],
        *,
        kind: OpKind,
        owner: str | None = None,
        reads: Slots = (),
        writes: Slots = (),
    ) -> None:
        """Queue `run`. `reads` and `writes` are the slots it is going to touch."""
        self._queues[stream].append(_Queued(run))
        self.log.append(Op(stream, kind, owner, _ints(reads), _ints(writes)))

    def record(self, stream: str) -> int:
        """A new event, complete as soon as the stream has run everything it was given so far."""
        event = self._events
        self._events += 1
        self._queues[stream].append(_Queued(None, completes=event))
        self.log.append(Op(stream, "record", event=event))
        return event

    def wait(self, stream: str, event: int, *, then: Callable[[], None] | None = None) -> None:
        """Let the stream do nothing further before `event` is complete; then call `then`, if any.

        An event that is never recorded blocks the stream for ever, which `synchronize` reports.
        """
        if not 0 <= event < self._forgotten:
            self.log.append(Op(stream, "wait", event=event))
            self._queues[stream].append(_Queued(then, after=event))
        elif then is not None:
            self._queues[stream].append(_Queued(then))

    # ---- when things run

    def synchronize(self, stream: str) -> None:
        """The host waits until `stream` has nothing left to do. The other stream goes on as the
        adversary likes. What an operation raises comes out here; it counts as run.

        Raises:
            DeviceDeadlock: the stream waits for an event that cannot come.
        """
        while self._queues[stream]:
            ready = self._ready()
            if not ready:
                raise DeviceDeadlock(self._blocked())
            self._go_on(self._choose(ready, needed=True))
        self.elapse()

    def elapse(self) -> None:
        """Time passes that nobody needs: run what the adversary likes, perhaps nothing."""
        while (ready := self._ready()) and (choice := self._choose(ready, needed=False)):
            self._go_on(choice)

    def is_complete(self, event: int) -> bool:
        return 0 <= event < self._forgotten or event in self._complete

    def queued(self, stream: str) -> int:
        """Operations, records and waits that the stream has not got to."""
        return len(self._queues[stream])

    def forget(self) -> bool:
        """Drop the log, so that a long walk stays bounded; whether it was dropped.

        Only while nothing is queued: then all that follows comes after all that is forgotten.
        """
        if any(self._queues.values()):
            return False
        self.log.clear()
        self._complete.clear()
        self._forgotten = self._events
        return True

    # ---- inside

    def _ready(self) -> list[str]:
        return [
            stream
            for stream, queue in self._queues.items()
            if queue and ((event := queue[0].after) is None or self.is_complete(event))
        ]

    def _go_on(self, stream: str) -> None:
        item = self._queues[stream].popleft()
        if item.completes is not None:
            self._complete.add(item.completes)
        if item.run is not None:
            item.run()

    def _blocked(self) -> str:
        parts = []
        for stream, queue in self._queues.items():
            if queue and (event := queue[0].after) is not None:
                why = "not complete" if 0 <= event < self._events else "never recorded"
                parts.append(f"stream {stream!r} waits for event {event}, which is {why}")
        return "; ".join(parts)


# ---- strategies: a stream of `ready`; NOBODY, unless one is `needed`, leaves it at that

NOBODY = ""


def _copies_last(ready: Sequence[str], *, needed: bool) -> str:
    if not needed:
        return NOBODY
    return COMPUTE if COMPUTE in ready else COPY


def _copies_first(ready: Sequence[str], *, needed: bool) -> str:
    if COPY in ready:
        return COPY
    return COMPUTE if needed else NOBODY


def _either(rng: random.Random, ready: Sequence[str], *, needed: bool) -> str:
    if not needed and rng.random() < 0.5:
        return NOBODY
    return rng.choice(ready)


# ---- the copy stream


class _DeviceEvent(CopyEvent):
    """The event of a launch; its number is the device's."""

    def __init__(self, owners: Sequence[str]) -> None:
        super().__init__(owners)
        self.number = NO_EVENT
        self.seen = False


class AdversarialCopyStream:
    """`vtoken.kv.streams.CopyStream` on a simulated device.

    Each copy is an operation of its own, so that copies and what the compute stream does
    interleave. `wait` does not block: a copy that fails later is reported by the
    `synchronize` that gets as far as the wait.

    Args:
        fail: which copies fail without touching a byte, counted from 0 over all launches.
    """

    def __init__(self, device: SimulatedDevice, *, fail: Collection[int] = ()) -> None:
        self.device = device
        self._fail = frozenset(fail)
        self._copies = 0
        self._open = True

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        if not self._open:
            raise Rejected("the copy stream is closed")
        event = _DeviceEvent([copy.owner for copy in copies])
        self._follow_compute()
        for copy in copies:
            self.device.submit(
                COPY,
                partial(self._run, copy, event, fails=self._copies in self._fail),
                kind="copy",
                owner=copy.owner,
                reads=copy.sources,
                writes=copy.targets,
            )
            self._copies += 1
        event.number = self.device.record(COPY)
        return event

    def wait(self, event: CopyEvent) -> None:
        mine = self._mine(event)
        late = event.check if event.error is None else None
        self.device.wait(COMPUTE, mine.number, then=late)
        event.check()

    def done(self, event: CopyEvent) -> bool:
        mine = self._mine(event)
        if not self.device.is_complete(mine.number):
            return False
        if not mine.seen:
            # The host knows now, which orders what it issues later as well as a wait does.
            self.device.wait(COMPUTE, mine.number)
            mine.seen = True
        return True

    def close(self) -> None:
        self._open = False
        self.device.synchronize(COPY)

    def _follow_compute(self) -> None:
        """Put the copy stream behind everything the compute stream has been given."""
        self.device.wait(COPY, self.device.record(COMPUTE))

    @staticmethod
    def _run(copy: Copy, event: _DeviceEvent, *, fails: bool) -> None:
        if event.error is not None:
            return
        try:
            if fails:
                raise DeviceError("injected failure of a copy")
            copy.run()
        except Exception as error:
            event.error = error

    @staticmethod
    def _mine(event: CopyEvent) -> _DeviceEvent:
        if not isinstance(event, _DeviceEvent):
            raise Rejected(f"{type(event).__name__} is an event of another kind of copy stream")
        return event


def _ints(slots: Slots) -> tuple[int, ...]:
    listed = slots.tolist() if isinstance(slots, torch.Tensor | np.ndarray) else slots
    return tuple(int(slot) for slot in listed)
