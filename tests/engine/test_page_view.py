"""The page-1 view, end to end on vLLM's Triton attention: GPU layout, blocks of 16 tokens.

The kernels run in Triton's interpreter (`support/interpreter.py`), so this file is collected only
with `VTOKEN_TEST_ATTENTION=triton`, in a process of its own, as `make test` does. One layer and few
tokens, since a step takes about half a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import BLOCK, Engine, Served
from support.exactness import Comparison, ScoreComparison, compare_scores
from support.replayed import PADDING, Replays, replay_decode_steps
from vtoken.errors import InvariantViolation, UnsupportedConfiguration
from vtoken.models import ensure_tiny_llama
from vtoken.vllm.pages import PageTables, one_token_pages
from vtoken.vllm.triton_attention import VTokenTritonAttentionImpl

pytestmark = pytest.mark.engine

ABSOLUTE, CONTROL = 1e-5, 0.1
RUNNERS = ("v1", "v2")
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "eager": {},
    "background": {"threshold": 0.2, "commit_delay": 2},
}
#: where it is not random; H2O asks for weights in every step
POLICIES = {"off": "h2o"}


@cache
def engine_with(runner: str) -> Engine:
    from vllm import envs

    envs.disable_envs_cache()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    return Engine(ensure_tiny_llama(layers=1), blocks=64, chunk=48, max_model_len=128)


@pytest.fixture(params=RUNNERS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = engine_with(request.param)
    free = found.free
    yield found
    assert not found.scheduler.requests
    assert found.free == free, "blocks leaked"


def runner_of(engine: Engine) -> str:
    """By vLLM's own class, whatever was asked for."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2

    return "v2" if isinstance(engine.runner, V2) else "v1"


@cache
def served_by(runner: str, mode: str) -> tuple[Served, Comparison, list[int]]:
    """Four requests that lose tokens in every step; also, per step in which the page-1
    view was used, how many rows had holes."""
    engine = engine_with(runner)
    assert runner_of(engine) == runner
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 259, n).tolist() for n in (20, 33, 25, 30)]
    policy = POLICIES.get(mode, "random")
    engine.configure(policy=policy, budget=20, reclaim=mode, checks=3, seed=5, **MODES[mode])
    rows: list[int] = []
    fill = PageTables.fill

    def noting(self: PageTables, metadata: object, holes: list[object]) -> object:
        rows.append(len(holes))
        return fill(self, metadata, holes)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageTables, "fill", noting)
        served = engine.serve(prompts, 11)
    return served, engine.compare(served), rows


@pytest.mark.parametrize("mode", MODES)
def test_logits_equal_the_masked_reference(engine: Engine, mode: str) -> None:
    runner = runner_of(engine)
    served, found, _ = served_by(runner, mode)
    assert served.report["tokens"]["evicted"] > 50
    assert found.rows_after_eviction > 34
    assert found.max_error <= ABSOLUTE
    assert found.wrong_tokens == 0
    assert found.max_control > CONTROL, "the control without the mask must differ"
    if POLICIES.get(mode) == "h2o":
        weights = weights_of(engine, served)
        assert weights.after_eviction > 25
        assert weights.max_error <= 1e-6


def test_the_kernel_and_the_layout_are_those_of_a_gpu(engine: Engine) -> None:
    runner = engine.runner
    for layer in runner._vtoken_layers.values():
        assert type(layer.impl) is VTokenTritonAttentionImpl
        assert layer.kv_cache.shape[2] == BLOCK == 16
        assert layer.kv_cache.stride(3) == 1, "K and V of a token lie in rows"
    assert runner._vtoken_backend == "TRITON_ATTN"


@pytest.mark.parametrize("runner", RUNNERS)
def test_both_views_were_in_use_over_more_than_a_hundred_rows_of_each_runner(runner: str) -> None:
    total = Comparison()
    for mode in MODES:
        _, found, rows = served_by(runner, mode)
        total.add(found)
        if mode == "eager":
            assert not rows, "without holes the view is dense"
        else:
            assert len(rows) > 5, "holes stay for several steps"
    assert total.rows_after_eviction > 100


@pytest.fixture
def replays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Replays:
    """The engine replays its decode steps."""
    monkeypatch.setattr(engine.runner, "vtoken_always_pages", True)
    monkeypatch.setattr(engine.runner, "vtoken_captures", True)
    engine.configure(policy="random", budget=20, reclaim="off", checks=3, seed=5)
    return replay_decode_steps(engine.runner, monkeypatch, most=4, version=runner_of(engine))


def serve_four(engine: Engine, mode: str, policy: str = "random") -> tuple[Served, Comparison]:
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 259, n).tolist() for n in (20, 43, 26, 31)]
    engine.configure(policy=policy, budget=20, reclaim=mode, checks=3, seed=6, **MODES[mode])
    served = engine.serve(prompts, 9)
    return served, engine.compare(served)


def weights_of(engine: Engine, served: Served) -> ScoreComparison:
    total = ScoreComparison()
    for life in served.lives:
        total.add(compare_scores(engine.reference, life, served.tokens_of(life)))
    assert total.missed == 0
    assert total.prompts >= 4
    return total


@pytest.mark.parametrize(("mode", "policy"), [("background", "random"), ("off", "h2o")])
def test_replayed_attention_reads_the_page_view_through_buffers_that_stay(
    engine: Engine, replays: Replays, mode: str, policy: str
) -> None:
    """Full CUDA graphs: only the contents of what was captured change; q is copied there too. The
    graphs are larger than the steps."""
    served, found = serve_four(engine, mode, policy)
    assert replays.count >= 4
    assert replays.paddings == {PADDING}
    if policy == "h2o":
        weights = weights_of(engine, served)
        assert weights.after_eviction > 25
        assert weights.max_error <= 1e-6
    assert served.report["tokens"]["evicted"] > 50
    assert found.rows_after_eviction > 30
    assert found.max_error <= ABSOLUTE
    assert found.wrong_tokens == 0


@pytest.mark.parametrize("engine", ["v1"], indirect=True)
def test_the_control_with_a_new_buffer_in_each_step_differs(
    engine: Engine, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = PageTables.fill

    def elsewhere(self: PageTables, metadata: object, rows: Any) -> object:
        self.tables = self.tables.clone()
        return fill(self, metadata, rows)

    monkeypatch.setattr(PageTables, "fill", elsewhere)
    _, found = serve_four(engine, "off")
    engine.runner._vtoken_pages = None  # whose buffers are no longer the captured ones
    assert replays.count >= 4
    assert found.max_error > 10 * ABSOLUTE


@pytest.mark.parametrize("always", [False, True], ids=["for holes", "in every step"])
def test_a_page_table_off_by_one_is_a_violation_and_shows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """The tables themselves are checked, not what they are made from. One live slot is replaced by
    its neighbour: the logits differ, and it is L6, also of rows without holes."""
    fill = PageTables.fill

    def wrong(self: PageTables, metadata: object, rows: list[tuple[int, torch.Tensor]]) -> object:
        found = fill(self, metadata, rows)
        self.tables[0, 0] += 1
        return found

    monkeypatch.setattr(PageTables, "fill", wrong)
    monkeypatch.setattr(engine.runner, "vtoken_always_pages", always)
    (prompt,) = [np.random.default_rng(6).integers(3, 259, 25).tolist()]
    engine.configure(
        policy="random", budget=20, reclaim="eager" if always else "off", checks=3, seed=5
    )
    checker, laws = engine.runner.vtoken_checker, []
    check = checker.check_access

    def noting(*args: Any, **named: Any) -> None:
        try:
            check(*args, **named)
        except InvariantViolation as error:  # which would leave an engine that nobody can use
            laws.append(error.law)

    monkeypatch.setattr(checker, "check_access", noting)
    served = engine.serve([prompt], 4)
    assert engine.compare(served).max_error > 10 * ABSOLUTE
    assert len(laws) >= 3
    assert set(laws) == {"L6"}


@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_a_page_is_one_token_in_either_order_of_heads_and_tokens(order: str) -> None:
    """vLLM may lay a block out either way; the view's pages are the same tokens."""
    numbers = torch.arange(5 * 3 * 16 * 8)
    cache = numbers.view(5, 3, 16, 8)
    if order == "tokens first":
        cache = numbers.view(5, 16, 3, 8).transpose(1, 2)
    layer = torch.stack([torch.zeros_like(cache), cache])[1]  # not at the storage's start
    pages, between = one_token_pages(layer)
    assert pages.data_ptr() == layer.data_ptr()
    for block in range(5):
        for offset in range(16):
            page = pages[block * between + offset]
            assert torch.equal(page[:, 0], layer[block, :, offset])


def test_a_cache_without_pages_of_one_token_is_refused() -> None:
    cache = torch.zeros(100).as_strided((2, 1, 3, 4), (13, 12, 4, 1))
    with pytest.raises(UnsupportedConfiguration, match="no pages of one token"):
        one_token_pages(cache)
