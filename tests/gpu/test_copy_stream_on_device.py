"""The CUDA copy stream on a device: what it orders shows in the bytes. Needs torch only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.lanes import NoWaitForCompute
from support.where import on_device
from vtoken.kv import Mover, TokenRowLayout, stack_layers
from vtoken.kv.cuda_stream import CudaCopyStream

pytestmark = on_device

LAYERS, BLOCKS, SIZE, DIM = 4, 64, 16, 64
#: device clock cycles; some tens of milliseconds
LONG = 50_000_000


def mover() -> Mover:
    cache = torch.zeros(LAYERS, BLOCKS, 2, SIZE, 2 * DIM, device="cuda")
    made = Mover(TokenRowLayout(stack_layers(list(cache))))
    # Its kernel is compiled now: that takes longer than the compute stream is kept busy.
    made.move(*(torch.tensor([place], device="cuda") for place in (9, 7 * SIZE)))
    return made


def write_then_copy(make: Callable[[torch.device], CudaCopyStream]) -> float:
    """The compute stream is busy, then writes 7 into a token, which is then moved."""
    moves, device = mover(), torch.device("cuda", torch.cuda.current_device())
    stream = make(device)
    sources = torch.tensor([3], device=device)
    targets = torch.tensor([5 * SIZE], device=device)
    copies = moves.copies(sources, targets, owner="a")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    moves.layout.caches[0][:, 0, :, 3] = 7
    event = stream.launch(copies)
    stream.wait(event)
    found = float(moves.layout.read(targets).mean())
    stream.close()
    return found


def test_a_copy_reads_what_the_compute_stream_wrote_before_the_launch() -> None:
    assert write_then_copy(CudaCopyStream) == 7.0


def test_the_control_without_that_order_reads_what_was_there_before() -> None:
    assert write_then_copy(NoWaitForCompute) == 0.0


def copy_then_read(*, waits: bool) -> float:
    """The copy stream is busy, then moves a token of sevens, which is then read."""
    moves, device = mover(), torch.device("cuda", torch.cuda.current_device())
    stream = CudaCopyStream(device)
    moves.layout.caches[0][:, 0, :, 3] = 7
    sources = torch.tensor([3], device=device)
    targets = torch.tensor([5 * SIZE], device=device)
    copies = moves.copies(sources, targets, owner="a")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream._stream):
        torch.cuda._sleep(LONG)
    event = stream.launch(copies)
    assert not stream.done(event), "the host does not wait"
    if waits:
        stream.wait(event)
    found = moves.layout.read(targets).mean()
    value = float(found)
    stream.close()
    return value


def test_what_comes_after_a_wait_sees_the_copy() -> None:
    assert copy_then_read(waits=True) == 7.0


def test_the_control_without_the_wait_does_not() -> None:
    assert copy_then_read(waits=False) == 0.0
