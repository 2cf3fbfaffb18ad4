"""The copy stream of a CUDA device: copies beside the kernels, ordered by events on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vtoken.errors import Rejected
from vtoken.kv.streams import (
    Copy,
    CopyEvent,
    CopyStream,
    SynchronousCopyStream,
    ThreadCopyStream,
)


class _DeviceEvent(CopyEvent):
    """The event of a launch, recorded behind its copies on the copy stream."""

    def __init__(self, owners: Sequence[str], recorded: Any) -> None:
        super().__init__(owners)
        self.recorded = recorded


class CudaCopyStream:
    """A stream of its own beside the one that is current for the caller, the compute stream.

    `launch` makes the copy stream wait for all that the compute stream was given, and issues the
    copies; `wait` makes the compute stream wait for a launch. Neither blocks the host. Of an error
    on the device the host learns at its next wait for the device, not from the event: what `error`
    holds is what issuing raised.

    Args:
        device: whose compute stream it is.
        priority: as CUDA has it, lower is sooner; 0 is the least, so that decoding goes first.
        cuda: `torch.cuda`, or what stands in for it.
    """

    def __init__(self, device: torch.device, *, priority: int = 0, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device=device, priority=priority)
        self._open = True

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        if not self._open:
            raise Rejected("the copy stream is closed")
        event = _DeviceEvent([copy.owner for copy in copies], self._cuda.Event())
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        try:
            with self._cuda.stream(self._stream):
                for copy in copies:
                    # Made on the compute stream, whose allocator may otherwise give their memory
                    # to somebody else while the copy still reads it.
                    copy.sources.record_stream(self._stream)
                    copy.targets.record_stream(self._stream)
                    copy.run()
        except Exception as error:
            event.error = error
        event.recorded.record(self._stream)
        return event

    def wait(self, event: CopyEvent) -> None:
        # Also of a launch that failed: the copies before the one that did are under way.
        self._cuda.current_stream(self._device).wait_event(_recorded(event))
        event.check()

    def done(self, event: CopyEvent) -> bool:
        return bool(_recorded(event).query())

    def close(self) -> None:
        self._open = False
        self._stream.synchronize()


def _recorded(event: CopyEvent) -> Any:
    if not isinstance(event, _DeviceEvent):
        raise Rejected(f"{type(event).__name__} is an event of another kind of copy stream")
    return event.recorded


def copy_stream(device: torch.device, *, beside: bool) -> CopyStream:
    """What copies run in on a device: beside the computation, or in its order."""
    if not beside:
        return SynchronousCopyStream()
    return CudaCopyStream(device) if device.type == "cuda" else ThreadCopyStream()
