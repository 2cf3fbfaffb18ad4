"""What the background mode costs: deciding, copies beside the steps, the mover.

Every timing is a ratio of two things in one run, or is given with what it is compared to; the
assertions are far from the aims, so that a busy machine does not fail them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import Engine
from vtoken.core import Reclaimer, ReclaimMode
from vtoken.kv import KVLayout, Mover, TokenRowLayout, TransposedKeyLayout
from vtoken.kv.streams import Copy, CopyStream, SynchronousCopyStream, ThreadCopyStream
from vtoken.models import ensure_smollm2

REQUESTS, BLOCK = 256, 16


class AlwaysPrivate:
    """A pool for requests that share nothing and never run out."""

    def private(self, blocks: np.ndarray) -> np.ndarray:
        return np.ones(len(blocks), dtype=np.bool_)

    def uncache(self, blocks: np.ndarray) -> None: ...

    def set_blocks(self, *_: Any) -> None: ...

    def reserve(self, count: int) -> list[int]:
        return []

    def unreserve(self, blocks: Any) -> None: ...


@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_deciding_at_256_requests_costs_at_most_a_millisecond(length: int, benchmark: Any) -> None:
    """1 % of each request's tokens have been evicted since the last step; nobody is above the
    threshold, nobody has an empty block: what a step costs besides the plans that it makes."""
    reclaimer = Reclaimer(block_size=BLOCK, mode=ReclaimMode.BACKGROUND, pool=AlwaysPrivate())
    rng, blocks = np.random.default_rng(0), length // BLOCK
    for index in range(REQUESTS):
        first = 1 + index * blocks
        reclaimer.schedule(str(index), range(first, first + blocks), length)
        reclaimer.evict(str(index), rng.choice(length - 1, length // 100, replace=False))
    names = [str(index) for index in range(REQUESTS)]

    def decide() -> None:
        for name in names:
            reclaimer.prepare(name, pending=2)

    benchmark.pedantic(decide, rounds=20, iterations=1, warmup_rounds=2)
    decided = 1e3 * benchmark.stats.stats.min
    assert reclaimer.counters.plans == 0
    for name in names:
        live = np.flatnonzero(reclaimer.tables[name].live)[:-1]
        reclaimer.evict(name, rng.choice(live, length // 3, replace=False))
    start = time.perf_counter()
    decide()
    planned = 1e3 * (time.perf_counter() - start) / REQUESTS
    assert reclaimer.counters.plans == REQUESTS
    benchmark.extra_info.update(decide_ms=decided, plan_ms=planned)
    report(f"deciding, {REQUESTS} x {length} tokens", decided, "ms in all (aim 1)")
    report(f"one plan at {length} tokens, a third of them dead", planned, "ms")
    assert decided < 5


# Copies beside the steps -------------------------------------------------------------------------

WAYS = ("no copies", "in flight", "force-sync", "arithmetic")
PAIRS = 60


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        ensure_smollm2(), blocks=160, chunk=2048, max_model_len=1024, prefix_caching=False
    )


@pytest.mark.parametrize("copied", [50, 200])
def test_a_decode_step_with_copies_in_flight(engine: Engine, copied: int, benchmark: Any) -> None:
    """SmolLM2, 4 requests in decode steps. Each step is given the copies of scattered tokens,
    between blocks that nobody uses, in the copy stream's thread, or in step order, or none, drawn
    anew for every four steps; waiting for the copies at the step's end counts. As a control the
    thread does arithmetic that touches no memory for as long: what the machine takes for that is
    no fault of the copies."""
    engine.configure(checks=1)
    mover = engine.runner.vtoken_relocator.mover
    size = mover.layout.block_size
    rng = np.random.default_rng(1)
    slots = torch.from_numpy(rng.permutation(np.arange(120 * size, 159 * size)))
    sources, targets = slots[:copied].sort()[0], slots[copied : 2 * copied].sort()[0]
    move = Copy(partial(mover.move, sources, targets), sources, targets, "nobody")
    thread = ThreadCopyStream()
    streams: dict[str, CopyStream] = {
        "in flight": thread,
        "arithmetic": thread,
        "force-sync": SynchronousCopyStream(),
    }
    count = loop_as_long_as(move.run)
    work = dict.fromkeys(streams, move)
    work["arithmetic"] = Copy(partial(arithmetic(), count), sources, targets, "nobody")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    outputs: dict[str, list[int]] = {}
    for index in range(4):
        engine.submit(str(index), rng.integers(3, 259, 300).tolist(), 240)

    def step(way: str) -> float:
        stream, start = streams.get(way), time.perf_counter()
        event = None if stream is None else stream.launch([work[way]])
        engine.step(outputs)
        if stream is not None and event is not None:
            stream.wait(event)
            event.check()
        return time.perf_counter() - start

    def all_ways() -> None:
        for way in rng.permutation(WAYS):
            times[str(way)].append(step(str(way)))

    for way in (*WAYS, *WAYS):
        step(way)  # the prompts, and what is compiled at its first use
    gc.collect()
    pool = engine.scheduler.kv_cache_manager.block_pool
    benchmark.pedantic(all_ways, rounds=PAIRS, iterations=1)
    assert all(pool.blocks[block].ref_cnt == 0 for block in range(120, 159))
    engine.drain()
    thread.close()
    base = statistics.median(times["no copies"])
    report("decode step", 1e3 * base, "ms without copies")
    for way in WAYS[1:]:
        ratios = [mine / other for mine, other in zip(times[way], times["no copies"], strict=True)]
        ratio = statistics.median(ratios)
        benchmark.extra_info[way] = ratio
        volume = copied * mover.layout.token_bytes / 1e6
        what = f"the same, {copied} tokens ({volume:.1f} MB), {way}"
        report(what, ratio, f"x (median of {PAIRS} pairs)")
    assert benchmark.extra_info["in flight"] < 1.5, "the aim is 1.05"


@cache
def arithmetic() -> Callable[[int], float]:
    """A compiled loop that lets go of the interpreter lock and touches no memory."""
    from numba import njit

    @njit(nogil=True)
    def loop(count: int) -> float:
        value = 1.0
        for _ in range(count):
            value = value * 1.0000001 + 1e-9
        return value

    loop(1)
    found: Callable[[int], float] = loop
    return found


def loop_as_long_as(run: Callable[[], None]) -> int:
    """How often `arithmetic` goes round in the time of `run`, the best of ten each."""

    def best(action: Callable[[], Any]) -> float:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return min(times)

    million = best(lambda: arithmetic()(1_000_000))
    return int(1_000_000 * best(run) / million)


# The mover ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [TransposedKeyLayout, TokenRowLayout])
@pytest.mark.parametrize("spread", ["scattered", "whole blocks"])
def test_bulk_moves_against_this_machine_s_memcpy(
    layout: Callable[[list[torch.Tensor]], KVLayout], spread: str, benchmark: Any
) -> None:
    """4,096 tokens of SmolLM2's cache (30 layers, 3 KV heads of 64, fp32, blocks of 32), counted
    in bytes of K and V read and written, against one copy of as many contiguous bytes."""
    layers, blocks, heads, size, dim = 30, 256, 3, 32, 64
    cache = torch.randn(layers, blocks, heads, size, 2 * dim)
    mover, count = Mover(layout([cache])), 4096
    order = torch.arange(blocks * size)
    if spread == "scattered":
        order = torch.randperm(blocks * size, generator=torch.Generator().manual_seed(0))
    sources, targets = order[:count].sort()[0], order[count : 2 * count].sort()[0]
    volume = 2 * count * mover.layout.token_bytes
    plain = torch.randn(volume // 8), torch.empty(volume // 8)

    found: dict[str, list[float]] = {"memcpy": [], "moves": []}

    def both() -> None:
        start = time.perf_counter()
        plain[1].copy_(plain[0])
        middle = time.perf_counter()
        mover.move(sources, targets)
        found["memcpy"].append(middle - start)
        found["moves"].append(time.perf_counter() - middle)

    benchmark.pedantic(both, rounds=20, iterations=1, warmup_rounds=2)
    # The best of each, taken in turns: what disturbs one of a pair must not count for the other.
    least = {what: min(seconds[2:]) for what, seconds in found.items()}
    best = least["memcpy"] / least["moves"]
    benchmark.extra_info["of_memcpy"] = best
    rate = volume / least["moves"] / 1e9
    report(f"{mover.layout.name}, {spread}", best, f"of memcpy, {rate:.2f} GB/s read and written")
    assert best > 0.2, "the aim is half"


def report(what: str, value: float, unit: str) -> None:
    print(f"\n  {what}: {value:.4f} {unit}")
