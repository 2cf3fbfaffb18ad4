"""A captured decode step, replayed while tokens are evicted and relocated outside of it: only the
contents of its buffers change, and every step's attention equals plain torch.

On a CUDA device the step is a CUDA graph and the copies run on the CUDA copy stream. On a CPU, in a
process that has chosen Triton's interpreter, the step is the list of its launches and the copies
run as late as they may.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.decoding import Decoding, Shape, View
from support.lanes import LateCopies
from support.where import INTERPRETED, KERNEL_DEVICES
from vtoken.kv.cuda_stream import copy_stream

pytestmark = pytest.mark.parametrize("device", KERNEL_DEVICES)
VIEWS: tuple[View, ...] = ("pages of one", "dense")
#: the interpreter takes milliseconds for each program of a grid
STEPS, SHAPE = (
    (24, Shape(1, 2, 1, 3, 16, size=4, enough=14, dtype=torch.float32))
    if INTERPRETED
    else (200, Shape(4, 8, 4, 4, 64, size=16, enough=150, dtype=torch.bfloat16))
)
#: the reference rounds nothing, the kernel rounds the weights to the cache's type
BOUND = 1e-5 if INTERPRETED else 1e-2


def decoding(device: str, view: View, *, forgetful: bool = False) -> Decoding:
    where = torch.device(device)
    stream = copy_stream(where, beside=True) if device == "cuda" else LateCopies()
    return Decoding(where, stream, view, SHAPE, seed=11, forgetful=forgetful)


def addresses(batch: Decoding) -> list[int]:
    tensors = (batch.tables, batch.lengths, batch.slots, batch.query, batch.new, batch.out)
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("view", VIEWS)
def test_replays_stay_exact_across_evictions_and_relocations(
    device: str, view: View, record_property: Callable[[str, object], None]
) -> None:
    batch = decoding(device, view)
    before = addresses(batch)
    errors = batch.run(STEPS)
    assert max(errors) <= BOUND
    assert addresses(batch) == before
    counts = batch.counts
    record_property("largest_error", max(errors))
    record_property("moved_tokens", counts.moved)
    assert counts.evicted > STEPS
    assert counts.moved > 20
    assert counts.commits > 5
    if view == "pages of one":
        assert counts.reads_beside_copies > 10


@pytest.mark.parametrize("view", VIEWS)
def test_the_control_that_forgets_the_page_table_after_a_relocation_differs(
    device: str, view: View
) -> None:
    batch = decoding(device, view, forgetful=True)
    assert max(batch.run(STEPS)) > 10 * BOUND
