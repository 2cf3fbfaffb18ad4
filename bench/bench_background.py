"""What the background mode costs: deciding, copies beside the steps, the mover.

Every timing is a ratio of two things in one run, or is given with what it is compared to; the
assertions are far from the aims, so that a busy machine does not fail them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import Engine
from support.policies import Burst
from vtoken.core import Reclaimer, ReclaimMode
from vtoken.kv import KVLayout, Mover, TokenRowLayout, TransposedKeyLayout
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

WAYS: dict[str, dict[str, Any]] = {
    "no copies": {"commit_delay": 2},
    "in flight": {"commit_delay": 2},
    "force-sync": {"commit_delay": 2, "force_sync": True},
}


def test_a_decode_step_with_copies_in_flight(benchmark: Any) -> None:
    """SmolLM2, 4 requests that lose three quarters of their tokens at once. The same run with
    copies in a thread, with copies in step order, and with none (which reads wrong bytes, and is
    what the other two are compared to), step by step."""
    engine = Engine(
        ensure_smollm2(), blocks=160, chunk=512, max_model_len=1024, prefix_caching=False
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 259, 700).tolist() for _ in range(4)]
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    moved: dict[str, int] = {}

    def rounds() -> None:
        for way, options in WAYS.items():
            engine.configure(
                policy="random", budget=300, reclaim="background", seed=2, threshold=0.1, **options
            )
            engine.scheduler._policy_class = Burst
            with idle_mover() if way == "no copies" else nothing():
                times[way].append(steps_with_launches(engine, prompts))
            moved[way] = engine.scheduler.vtoken.counters.moved

    rounds()
    times = {way: [] for way in WAYS}
    benchmark.pedantic(rounds, rounds=3, iterations=1)
    assert len(set(moved.values())) == 1
    medians = {
        way: statistics.median([step for run in runs for step in run])
        for way, runs in times.items()
    }
    base = medians["no copies"]
    report("step in which plans are launched", 1e3 * base, "ms without copies")
    for way in ("in flight", "force-sync"):
        ratio = medians[way] / base
        benchmark.extra_info[way] = ratio
        report(f"the same step, {way}", ratio, f"x ({moved[way]} tokens moved in the run)")
    assert medians["in flight"] / base < 2


def steps_with_launches(engine: Engine, prompts: list[list[int]]) -> list[float]:
    """Seconds of each step in which a plan was launched."""
    found, outputs = list[float](), dict[str, list[int]]()
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, 16)
    gc.collect()
    while engine.llm.llm_engine.has_unfinished_requests():
        plans, start = engine.scheduler.vtoken.counters.plans, time.perf_counter()
        engine.step(outputs)
        if engine.scheduler.vtoken.counters.plans > plans:
            found.append(time.perf_counter() - start)
    return found


@contextmanager
def idle_mover() -> Iterator[None]:
    original = Mover.move
    Mover.move = lambda self, sources, targets: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Mover.move = original  # type: ignore[method-assign]


@contextmanager
def nothing() -> Iterator[None]:
    yield


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
