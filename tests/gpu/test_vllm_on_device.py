"""vLLM itself on a CUDA device: exact with CUDA graphs on, and what vToken's presence costs there.

For whoever has vLLM beside a device: `make test-gpu GPU_VLLM=1`, with a GPU_PYTHON in which vLLM's
CUDA build and this project are installed; on Model Runner V1, and on V2 in a second process.
Starting engines takes most of its minutes.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.where import on_device
from vtoken.config import VTokenConfig

if TYPE_CHECKING:
    from support.engines import Engine, Served
    from support.exactness import Comparison

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.gpu_vllm,
    pytest.mark.engine,
    *on_device,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
]

MODES = ("off", "eager", "background")
#: The kernels multiply fp32 in TF32, whose products have 11 bits.
ABSOLUTE, CONTROL = 1e-2, 0.1
ON_DEVICE: dict[str, Any] = {
    "enforce_eager": False,
    "block_size": 16,
    "attention_backend": "TRITON_ATTN",
    # Several engines share the device. vLLM measures what its graphs take before it makes its pool.
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": None,
}


@pytest.fixture(scope="module")
def graphs() -> Engine:
    """The tiny model with vToken, started for rows with holes, so that its graphs have a view."""
    from support.engines import Engine
    from vtoken.models import ensure_tiny_llama

    return Engine(
        ensure_tiny_llama(),
        blocks=64,
        max_model_len=640,
        prefix_caching=False,
        settings=VTokenConfig(policy="random", budget=40, reclaim="off"),
        **ON_DEVICE,
    )


@pytest.fixture(scope="module")
def pair() -> tuple[Engine, Engine]:
    """(stock, vToken without a policy) on SmolLM2."""
    from support.engines import Engine
    from vtoken.models import ensure_smollm2

    options = {**ON_DEVICE, "blocks": 1024, "chunk": 512, "max_model_len": 1024}
    checkpoint = ensure_smollm2()
    return (
        Engine(checkpoint, stock=True, prefix_caching=False, **options),
        Engine(checkpoint, prefix_caching=False, **options),
    )


def drawn(*lengths: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 259, length).tolist() for length in lengths]


def assert_exact(engine: Engine, mode: str, policy: str = "random") -> tuple[Comparison, Served]:
    """Serve some requests with eviction, and hold every row to the reference that masks exactly the
    evicted tokens."""
    options: dict[str, Any] = {"commit_delay": 2, "threshold": 0.05} if mode == "background" else {}
    engine.configure(policy=policy, budget=40, reclaim=mode, checks=3, seed=7, **options)
    served = engine.serve(drawn(40, 50, 61, seed=1), 70)
    assert engine.free == served.free_before, "blocks leaked"
    found = engine.compare(served)
    assert served.report["tokens"]["evicted"] > 100
    assert found.rows_after_eviction > 100
    assert found.max_control > CONTROL, "the control without the mask must differ"
    assert found.max_error <= ABSOLUTE
    # The bound lets two tokens change places that are as likely as each other; that is rare.
    assert found.wrong_tokens <= 0.02 * found.rows
    return found, served


def test_the_graphs_are_full_ones_and_hold_the_view_for_holes(graphs: Engine) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2

    from support.engines import RUNNER

    mode = graphs.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.has_full_cudagraphs()
    assert graphs.runner.vtoken_always_pages
    assert graphs.runner.vtoken_captures
    assert isinstance(graphs.runner, V2) == (RUNNER == "v2")


@pytest.mark.parametrize(
    ("mode", "policy"), [*((mode, "random") for mode in MODES), ("off", "h2o")]
)
def test_logits_equal_the_masked_reference_with_cuda_graphs(
    graphs: Engine,
    mode: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Most steps are replayed: in them no layer's Python used the view. H2O's weights come from
    queries that the graphs copied; a layer whose copy is missing is a violation (L6)."""
    uses: list[tuple[int, bool]] = []
    judge = graphs.runner._vtoken_uses
    check = judge.check

    def noting() -> None:
        if judge._step:
            uses.append((sum(rows.uses for rows in judge._step), judge._replayed))
        check()

    monkeypatch.setattr(judge, "check", noting)
    found, _ = assert_exact(graphs, mode, policy)
    replayed = sum(count == 0 and full for count, full in uses)
    assert replayed > 40
    record_property("replayed_steps", replayed)
    record_property("rows_after_eviction", found.rows_after_eviction)
    record_property("largest_difference", found.max_error)


def test_the_mode_changes_memory_and_not_tokens(graphs: Engine) -> None:
    """Up to where two tokens are as likely as each other within the bound: there the order in which
    a sum is taken may decide, and the texts go on differently."""
    _, off = assert_exact(graphs, "off")
    for mode in ("eager", "background"):
        _, other = assert_exact(graphs, mode)
        for index, (mine, theirs) in enumerate(zip(off.outputs, other.outputs, strict=True)):
            if mine != theirs:
                assert margin_where_they_part(off, index, theirs) <= 2 * ABSOLUTE


def margin_where_they_part(served: Served, index: int, other: list[int]) -> float:
    """By how much the logits prefer the first token of request `index` that `other` has not."""
    mine = served.outputs[index]
    first = next(n for n, pair in enumerate(zip(mine, other, strict=True)) if len(set(pair)) > 1)
    (life,) = [life for life in served.lives if life.req_id.split("-")[0] == str(index)]
    row = life.rows[len(served.prompts[index]) + first - 1]
    return float(row[mine[first]] - row[other[first]])


@pytest.mark.parametrize("concurrency", [1, 16])
def test_without_a_policy_throughput_is_that_of_stock(
    pair: tuple[Engine, Engine], concurrency: int, record_property: Callable[[str, object], None]
) -> None:
    prompts = drawn(*([64] * concurrency), seed=2)
    outputs = [engine.serve(prompts, 32).outputs for engine in pair]
    assert outputs[0] == outputs[1]
    ratios = []
    for turn in range(9):
        times: dict[int, float] = {}
        for index in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            for number, prompt in enumerate(prompts):
                pair[index].submit(str(number), prompt, 128)
            pair[index].drain()
            times[index] = time.perf_counter() - began
        ratios.append(times[0] / times[1])
    record_property("of_stock", statistics.median(ratios))
    record_property("tokens_per_second", concurrency * 128 / times[1])
    assert statistics.median(ratios) >= 0.9
