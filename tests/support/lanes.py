"""Two streams to hold one test body to: of threads, of a simulated device, of a CUDA device.

A body gives the compute stream its actions by `compute` and its copies to `stream`, and learns what
happened only after `settle`. So the same body says of each kind of copy stream whether it orders
what it has to: on a device nothing has run when `compute` returns, and in the simulation nothing at
all runs before the host waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Protocol

import torch

from vtoken.kv.cuda_stream import CudaCopyStream
from vtoken.kv.streams import (
    Copy,
    CopyEvent,
    CopyStream,
    SynchronousCopyStream,
    ThreadCopyStream,
)
from vtoken.testing.device import (
    COMPUTE,
    COPY,
    AdversarialCopyStream,
    SimulatedDevice,
    Strategy,
)

Action = Callable[[], None]
Slots = Iterable[int]


class Lanes(Protocol):
    """A compute stream beside a copy stream.

    Attributes:
        device: where tensors that the actions touch have to lie.
        stream: the copy stream.
    """

    device: torch.device
    stream: CopyStream

    def compute(
        self,
        action: Action,
        *,
        kind: Any = "write",
        owner: str | None = None,
        reads: Slots = (),
        writes: Slots = (),
    ) -> None:
        """Give the compute stream an action; `reads` and `writes` are the slots it touches."""

    def linger(self) -> None:
        """Within an action or a copy: keep the stream that it runs in busy for a while."""

    def stamp(self) -> Any:
        """Within an action or a copy: the moment at which its stream gets here."""

    def milliseconds(self, stamp: Any) -> float:
        """When that was, from some moment on; after `settle`. In the simulation, a number that
        only says what came first."""

    def settle(self) -> None:
        """Wait until both streams have done everything."""

    def close(self) -> None: ...


class ThreadLanes:
    """The calling thread and `ThreadCopyStream`.

    Args:
        pause: seconds that `linger` takes.
    """

    def __init__(self, *, pause: float = 0.001) -> None:
        self.device = torch.device("cpu")
        self.stream: CopyStream = ThreadCopyStream()
        self._pause = pause

    def compute(self, action: Action, **_: Any) -> None:
        action()

    def linger(self) -> None:
        time.sleep(self._pause)

    def stamp(self) -> float:
        return time.perf_counter()

    def milliseconds(self, stamp: float) -> float:
        return stamp * 1000

    def settle(self) -> None:
        """Nothing to wait for, once the body has waited for its launches."""

    def close(self) -> None:
        self.stream.close()


class SimulatedLanes:
    """A device that runs everything at the worst moment; see `vtoken/testing/device.py`.

    Args:
        kind: the copy stream, perhaps one with a fault.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        seed: int = 0,
        kind: type[AdversarialCopyStream] = AdversarialCopyStream,
    ) -> None:
        self.device = torch.device("cpu")
        self._simulated = SimulatedDevice(strategy, seed=seed)
        self.stream: CopyStream = kind(self._simulated)
        self._moments = count()

    def compute(
        self,
        action: Action,
        *,
        kind: Any = "write",
        owner: str | None = None,
        reads: Slots = (),
        writes: Slots = (),
    ) -> None:
        self._simulated.submit(COMPUTE, action, kind=kind, owner=owner, reads=reads, writes=writes)

    def linger(self) -> None:
        """The adversary needs no time."""

    def stamp(self) -> int:
        return next(self._moments)

    def milliseconds(self, stamp: int) -> float:
        return float(stamp)

    def settle(self) -> None:
        self._simulated.synchronize(COMPUTE)
        self._simulated.synchronize(COPY)

    def close(self) -> None:
        self.stream.close()


class CudaLanes:
    """The current stream of a CUDA device and `CudaCopyStream`.

    Args:
        kind: the copy stream, perhaps one with a fault.
        cycles: of the device's clock that `linger` takes; 2 million are about a millisecond.
    """

    def __init__(
        self, *, cycles: int = 2_000_000, kind: type[CudaCopyStream] = CudaCopyStream
    ) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream: CopyStream = kind(self.device)
        self._cycles = cycles
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()

    def compute(self, action: Action, **_: Any) -> None:
        action()

    def linger(self) -> None:
        torch.cuda._sleep(self._cycles)

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # in the stream that is current, which is the copy stream within a copy
        return event

    def milliseconds(self, stamp: torch.cuda.Event) -> float:
        return float(self._origin.elapsed_time(stamp))

    def settle(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        self.stream.close()


class LateCopies(SynchronousCopyStream):
    """Runs a launch's copies when it is waited for, which is as late as they may run. For a
    compute stream that must not be written under, as kernels in Triton's interpreter, which write
    back all of a tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[CopyEvent, Sequence[Copy]] = {}

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        event = super().launch(())
        self._late[event] = copies
        return event

    def wait(self, event: CopyEvent) -> None:
        for copy in self._late.pop(event):
            copy.run()
        super().wait(event)


class NoWaitForCompute(CudaCopyStream):
    """A fault: copies start without regard to what the compute stream was given."""

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        # Launched from an idle stream, that one is what the copy stream waits for.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            return super().launch(copies)


class NoWaitBeforeReading(CudaCopyStream):
    """A fault: the compute stream goes on without regard to the copies."""

    def wait(self, event: CopyEvent) -> None:
        event.check()
