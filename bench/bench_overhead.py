"""What the indirection costs: throughput against stock vLLM, Python per step, table memory.

Every timing is a ratio of two things that alternate in one process, or a median of many steps;
the counts (bytes) are exact. `make bench` prints the table and writes JSON with
`--benchmark-json`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.engines import Engine
from vtoken.core import RequestTable
from vtoken.models import ensure_smollm2, ensure_tiny_llama

ROUNDS = 7


def prompts_of(count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(3, 259, length).tolist() for _ in range(count)]


OWN = {
    "scheduler": ("_evict_and_reclaim", "_register_step"),
    "reclaimer": ("physical_need", "drop"),
    "runner": ("_begin_step", "_correct", "_complete"),
}
"""vToken's own methods on a step's path. Left out: the bodies of the overrides around calls of
vLLM's, a few attribute reads each."""


def watch(engine: Engine) -> tuple[dict[int, float], list[int]]:
    """Seconds spent in `OWN` by step number, and the step counter to advance."""
    spent: dict[int, float] = defaultdict(float)
    steps = [0]
    targets = {
        "scheduler": engine.scheduler,
        "reclaimer": engine.scheduler.vtoken,
        "runner": engine.runner,
    }
    for owner, names in OWN.items():
        for name in names:
            setattr(targets[owner], name, timed(getattr(targets[owner], name), spent, steps))
    return spent, steps


def unwatch(engine: Engine) -> None:
    """Take the timing off again."""
    targets = (engine.scheduler, engine.scheduler.vtoken, engine.runner)
    for target in targets:
        for names in OWN.values():
            for name in names:
                vars(target).pop(name, None)


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """(stock, vtoken) on SmolLM2, the same settings, prefix caching off so that rounds repeat."""
    options: dict[str, Any] = {
        "blocks": 128,
        "chunk": 512,
        "max_model_len": 1024,
        "prefix_caching": False,
    }
    checkpoint = ensure_smollm2()
    return Engine(checkpoint, stock=True, **options), Engine(checkpoint, **options)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_indirection_alone_costs_at_most_one_percent(
    engines: tuple[Engine, Engine], concurrency: int, benchmark: Any
) -> None:
    """No policy: tables are kept, checks at the default level, nothing is evicted."""
    stock, ours = engines
    prompts = prompts_of(concurrency, 32)
    new_tokens = 64 if concurrency == 1 else 24
    for engine in (stock, ours):
        generate(engine, prompts, new_tokens)  # warm-up
    ratios = []

    def round_trip() -> None:
        # Alternating order, so that a drift of the machine hits both alike.
        times = {}
        for engine in (stock, ours) if len(ratios) % 2 else (ours, stock):
            gc.collect()
            start = time.perf_counter()
            generate(engine, prompts, new_tokens)
            times[engine] = time.perf_counter() - start
        ratios.append(times[ours] / times[stock])

    benchmark.pedantic(round_trip, rounds=ROUNDS, iterations=1)
    benchmark.extra_info["time_ratio_median"] = statistics.median(ratios)
    benchmark.extra_info["time_ratios"] = [round(r, 4) for r in ratios]
    report(f"indirection only, concurrency {concurrency}", statistics.median(ratios), "x stock")
    spread = f"from {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} rounds"
    report(f"ratio at concurrency {concurrency} ranges", max(ratios) - min(ratios), spread)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_own_python_is_at_most_one_percent_of_a_step(
    engines: tuple[Engine, Engine], concurrency: int, benchmark: Any
) -> None:
    """The same claim without the noise of two engines: vToken's methods within the steps of one."""
    _, ours = engines
    prompts = prompts_of(concurrency, 32)
    generate(ours, prompts, 8)
    spent, _ = watch(ours)
    start = time.perf_counter()
    benchmark.pedantic(lambda: generate(ours, prompts, 48), rounds=2, iterations=1)
    share = sum(spent.values()) / (time.perf_counter() - start)
    unwatch(ours)
    benchmark.extra_info["own_share"] = share
    report(f"own Python of a step, concurrency {concurrency}", 100 * share, "%")
    assert share < 0.01


def generate(engine: Engine, prompts: list[list[int]], new_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, new_tokens)
    engine.drain()


@pytest.mark.parametrize(("state", "bound_ms"), [("idle", 0.1), ("active", 0.5)])
def test_python_per_step_at_eight_requests(state: str, bound_ms: float, benchmark: Any) -> None:
    """vToken's own methods, timed inside a serving engine at the default check level."""
    engine = Engine(ensure_tiny_llama(), blocks=128, chunk=512, prefix_caching=False)
    if state == "active":
        engine.configure(policy="streaming-llm", budget=64, reclaim="eager", checks=1)
    else:
        engine.configure(checks=1)
    spent, steps = watch(engine)
    prompts = prompts_of(8, 80)

    def run() -> None:
        for index, prompt in enumerate(prompts):
            engine.submit(str(index), prompt, 120)
        outputs: dict[str, list[int]] = {}
        while engine.llm.llm_engine.has_unfinished_requests():
            steps[0] += 1
            engine.step(outputs)

    benchmark.pedantic(run, rounds=3, iterations=1)
    decode = [1e3 * spent[s] for s in sorted(spent) if s % 120 > 10]
    median = statistics.median(decode)
    benchmark.extra_info["median_ms_per_step"] = median
    report(f"own Python per step, 8 requests, {state}", median, f"ms (aim {bound_ms})")
    assert median < 4 * bound_ms, "far beyond the aim, even for a busy machine"


def timed(
    method: Callable[..., Any], spent: dict[int, float], steps: list[int]
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = method(*args, **kwargs)
        spent[steps[0]] += time.perf_counter() - start
        return result

    return wrapper


@pytest.mark.parametrize("length", [1024, 8192, 32768])
def test_table_memory_is_at_most_sixteen_bytes_per_token(length: int, benchmark: Any) -> None:
    table = RequestTable("r", 16)

    def grow() -> None:
        nonlocal table
        table = RequestTable("r", 16)
        for total in range(1, length + 1):
            table.append((total // 16 + 1,) if total % 16 == 1 else (), total)

    benchmark.pedantic(grow, rounds=1, iterations=1)
    per_token = table.nbytes / length
    benchmark.extra_info["bytes_per_token"] = per_token
    report(f"table memory at {length} tokens", per_token, "bytes/token")
    assert per_token <= 16


def report(what: str, value: float, unit: str) -> None:
    print(f"\n  {what}: {value:.4f} {unit}")
