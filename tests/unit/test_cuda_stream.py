"""The CUDA copy stream's order of operations, with a stand-in for `torch.cuda` that writes it down.
What a device makes of it is tested in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtoken.errors import Rejected
from vtoken.kv.cuda_stream import CudaCopyStream, copy_stream
from vtoken.kv.streams import Copy, CopyFailed, SynchronousCopyStream, ThreadCopyStream

DEVICE = torch.device("cuda", 0)


class Slots:
    """Stands for a tensor of slots."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self._name = cuda, name

    def record_stream(self, stream: Any) -> None:
        self._cuda.log.append(f"{self._name} kept for {stream.name}")


class Cuda:
    """Writes down what streams are told, in the order in which the host tells them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events = 0
        self._current = [self._stream("compute")]

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.log.append(f"{name} waits for all of {other.name}"),
            wait_event=lambda event: self.log.append(f"{name} waits for {event.name}"),
            synchronize=lambda: self.log.append(f"host waits for {name}"),
        )

    def Stream(self, *, device: torch.device, priority: int) -> Any:
        assert (device, priority) == (DEVICE, 0)
        return self._stream("copies")

    def Event(self) -> Any:
        self.events += 1
        name = f"event {self.events}"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.log.append(f"{name} on {stream.name}"),
            query=lambda: False,
        )

    def current_stream(self, device: torch.device) -> Any:
        assert device == DEVICE
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def copy(self, name: str, error: Exception | None = None) -> Copy:
        def run() -> None:
            if error is not None:
                raise error
            self.log.append(f"{name} on {self._current[-1].name}")

        slots: Any = Slots(self, name)
        return Copy(run, slots, slots, name)


def test_a_launch_comes_behind_the_compute_stream_and_a_wait_behind_the_launch() -> None:
    cuda = Cuda()
    stream = CudaCopyStream(DEVICE, cuda=cuda)
    event = stream.launch([cuda.copy("a"), cuda.copy("b")])
    assert not stream.done(event)
    stream.wait(event)
    kept = [line for line in cuda.log if "kept" in line]
    assert kept == 2 * ["a kept for copies"] + 2 * ["b kept for copies"]
    assert [line for line in cuda.log if "kept" not in line] == [
        "copies waits for all of compute",
        "a on copies",
        "b on copies",
        "event 1 on copies",
        "compute waits for event 1",
    ]
    assert cuda._current[-1].name == "compute"


def test_a_copy_that_cannot_be_issued_fails_its_launch_and_no_other() -> None:
    cuda = Cuda()
    stream = CudaCopyStream(DEVICE, cuda=cuda)
    failing = stream.launch([cuda.copy("a"), cuda.copy("b", OSError("no memory")), cuda.copy("c")])
    other = stream.launch([cuda.copy("d")])
    assert isinstance(failing.error, OSError)
    with pytest.raises(CopyFailed, match="a copy failed in a launch for a, b, c: OSError"):
        stream.wait(failing)
    # What was issued of it may still write: the compute stream waits all the same.
    assert cuda.log[-1] == "compute waits for event 1"
    assert not any("c on" in line for line in cuda.log)
    stream.wait(other)
    assert cuda.log[-1] == "compute waits for event 2"


def test_closing_lets_the_copies_end_and_takes_no_more() -> None:
    cuda = Cuda()
    stream = CudaCopyStream(DEVICE, cuda=cuda)
    stream.launch([cuda.copy("a")])
    stream.close()
    stream.close()
    assert cuda.log[-1] == "host waits for copies"
    with pytest.raises(Rejected, match="closed"):
        stream.launch([cuda.copy("b")])


def test_an_event_of_another_kind_is_refused() -> None:
    stream, event = CudaCopyStream(DEVICE, cuda=Cuda()), SynchronousCopyStream().launch([])
    for use in (stream.wait, stream.done):
        with pytest.raises(Rejected, match="another kind of copy stream"):
            use(event)


def test_the_device_chooses_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: SimpleNamespace(synchronize=lambda: None))
    cpu = torch.device("cpu")
    found = [copy_stream(d, beside=b) for d, b in ((cpu, False), (cpu, True), (DEVICE, True))]
    kinds = [SynchronousCopyStream, ThreadCopyStream, CudaCopyStream]
    assert [type(stream) for stream in found] == kinds
    assert isinstance(copy_stream(DEVICE, beside=False), SynchronousCopyStream)
    for stream in found:
        stream.close()
