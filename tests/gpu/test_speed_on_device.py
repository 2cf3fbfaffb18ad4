"""What relocation and the page-1 view cost on a CUDA device. Needs torch and Triton.

Each bound is a ratio of two things that are timed in turns; bandwidths are recorded beside it, so
that a ratio cannot be had from a slow denominator unnoticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from support.decode_load import DecodeLoad, rows_that_fit
from support.paged_attention import PagedAttention, pages_of, splits_for
from support.timing import alternated
from support.where import on_device
from vtoken.config import VTokenConfig
from vtoken.core import CopyOrder, LayoutChange, StepOrders
from vtoken.core.background import UNBOUNDED
from vtoken.kv import Mover, TokenRowLayout, stack_layers
from vtoken.kv.cuda_stream import CudaCopyStream
from vtoken.kv.relocator import Relocator

pytestmark = on_device
Record = Callable[[str, object], None]
SIZE, HEADS, DIM = 16, 8, 128


def plain_copy(volume: int) -> Callable[[], object]:
    """A device-to-device copy of `volume` bytes within one allocation."""
    memory = torch.zeros(2, volume // 2, dtype=torch.bfloat16, device="cuda")
    return lambda: memory[1].copy_(memory[0])


@pytest.mark.parametrize("count", [4096, 8192, 16384])
@pytest.mark.parametrize("spread", ["scattered", "whole blocks"])
def test_the_mover_reaches_seven_tenths_of_a_plain_copy(
    spread: str, count: int, record_property: Record
) -> None:
    """32 layers of 8 heads of 128, bf16: 0.5 to 2 GB of K and V, read and written."""
    blocks = max(1024, 2 * count // SIZE)
    cache = torch.zeros(32, blocks, HEADS, SIZE, 2 * DIM, dtype=torch.bfloat16, device="cuda")
    mover = Mover(TokenRowLayout(stack_layers(list(cache))))
    order = torch.arange(blocks * SIZE, device="cuda")
    if spread == "scattered":
        order = torch.randperm(blocks * SIZE, device="cuda")
    sources, targets = order[:count].sort()[0], order[count : 2 * count].sort()[0]
    volume = count * mover.layout.token_bytes
    copied, moved = alternated(
        [plain_copy(volume), lambda: mover.move(sources, targets)], rounds=11
    )
    record_property("of_a_plain_copy", copied / moved)
    record_property("gigabytes_per_second", 2 * volume / moved / 1e6)
    record_property("plain_copy_gigabytes_per_second", 2 * volume / copied / 1e6)
    assert copied / moved >= 0.7


@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_attention_over_pages_of_one_token_costs_little_more_than_dense(
    order: str, record_property: Record
) -> None:
    """32 rows of 4,096 live tokens, 0.5 GB of K and V in one layer: packed in blocks of 16, and
    every other one of twice as many, at random. Far more than the second-level cache holds."""
    rows, live, group = 32, 4096, 4
    blocks = rows * 2 * live // SIZE
    memory = torch.randn(blocks, SIZE, HEADS, 2 * DIM, dtype=torch.bfloat16, device="cuda")
    cache = memory.transpose(1, 2)
    if order == "heads first":
        cache = cache.contiguous()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    attention = PagedAttention(
        rows=rows,
        heads=HEADS,
        group=group,
        dim=DIM,
        device="cuda",
        splits=splits_for(rows * HEADS, live, processors),
    )
    query = torch.randn(rows, HEADS * group, DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(query)
    lengths = torch.full((rows,), live, dtype=torch.int32, device="cuda")
    shuffled = torch.randperm(blocks).view(rows, 2 * live // SIZE)
    packed = shuffled[:, : live // SIZE].to("cuda", torch.int32)
    pages, between = pages_of(cache)
    scattered = torch.stack([_half(row, between) for row in shuffled]).to("cuda", torch.int32)
    assert scattered.shape == (rows, live)
    dense, of_one = alternated(
        [
            lambda: attention(query, cache, packed, lengths, out),
            lambda: attention(query, pages, scattered, lengths, out),
        ],
        rounds=21,
    )
    volume = rows * live * HEADS * 2 * DIM * 2
    copied = alternated([plain_copy(volume)], rounds=11)[0]
    record_property("of_dense", of_one / dense)
    record_property("dense_gigabytes_per_second", volume / dense / 1e6)
    record_property("plain_copy_gigabytes_per_second", 2 * volume / copied / 1e6)
    # A kernel that is slow for reasons of its own would hide what the pages cost.
    assert volume / dense >= 0.4 * 2 * volume / copied, "the dense kernel is slow itself"
    assert of_one / dense <= 1.15


def _half(blocks: torch.Tensor, between: int) -> torch.Tensor:
    """Pages of half the tokens of `blocks`, drawn at random, in logical order."""
    total = len(blocks) * SIZE
    place = torch.randperm(total)[: total // 2].sort()[0]
    return blocks[place // SIZE] * between + place % SIZE


def test_a_plan_copied_beside_a_decode_step_costs_little_of_it(record_property: Record) -> None:
    """The weights of an 8-billion-parameter model and its attention over some 4,000 tokens a row,
    as a CUDA graph; beside it a plan of 4,096 tokens, as the worker's orders start and await it.
    By default nothing bounds what one step is given to copy, so the whole plan is."""
    params = VTokenConfig(policy="random", budget=64, reclaim="background").background(
        block_size=SIZE, token_bytes=32 * HEADS * 2 * DIM * 2
    )
    assert params.copy_budget == UNBOUNDED
    load = DecodeLoad(rows=rows_that_fit(64))
    stream = CudaCopyStream(load.cache.device)
    relocator = Relocator(Mover(load.layout), stream)
    sources, targets = load.spare_slots(4096)
    ids = np.arange(4096, dtype=np.int32)
    change = LayoutChange("a", ids, sources, targets, [], [], False, flight=1)

    def with_a_plan() -> None:
        relocator.apply(StepOrders(launches=[CopyOrder(1, "a", ids, sources, targets)]))
        load.step()
        relocator.apply(StepOrders(waits=[1], changes=[change]))

    where = [torch.from_numpy(slots).long().to("cuda") for slots in (sources, targets)]
    alone, beside, copies = alternated(
        [load.step, with_a_plan, lambda: relocator.mover.move(*where)],
        rounds=15,
    )
    stream.close()
    record_property("of_the_step_alone", beside / alone)
    record_property("step_milliseconds", alone)
    record_property("copies_alone_milliseconds", copies)
    record_property("rows", load.rows)
    assert alone >= 5, "a step that is too short to be a decode step says nothing"
    assert beside / alone <= 1.05


def test_a_launch_does_not_make_the_host_wait_for_the_device(record_property: Record) -> None:
    """The compute stream is busy for long; a step's orders are issued meanwhile."""
    cache = torch.zeros(4, 64, HEADS, SIZE, 2 * DIM, dtype=torch.bfloat16, device="cuda")
    stream = CudaCopyStream(cache.device)
    relocator = Relocator(Mover(TokenRowLayout(stack_layers(list(cache)))), stream)

    def orders(number: int) -> None:
        ids = np.arange(64, dtype=np.int32)
        order = CopyOrder(number, "a", ids, ids, ids + 512)
        change = LayoutChange("a", ids, ids, ids + 512, [], [], False, flight=number)
        relocator.apply(StepOrders(launches=[order]))
        relocator.apply(StepOrders(waits=[number], changes=[change]))

    orders(1)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)  # a fifth of a second
    busy.record()
    began = time.perf_counter()
    orders(2)
    took = time.perf_counter() - began
    still_busy = not busy.query()
    torch.cuda.synchronize()
    stream.close()
    record_property("host_milliseconds", 1000 * took)
    assert still_busy, "the host waited for what the compute stream was given before"
