"""The score tap gives the attention weights of Hugging Face's eager attention, for every step.

What is compared: for each token, the mean of softmax(q K^T) over the step's observed queries (one
in a decode step, up to 32 of a prompt chunk), all query heads and all layers; and for single heads,
the mean over the queries. The bound is 1e-6, in fp32, against one masked forward pass over the
request's whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from engine.test_exactness import SCENARIOS, TEXTS, prompts_of

from support.engines import BLOCK, Engine, Served, engine_on
from support.exactness import Recorder, ScoreComparison, compare_scores
from support.policies import Burst
from vtoken.policies import ScoreNeed

pytestmark = pytest.mark.engine
BOUND = 1e-6
BACKGROUND = {"reclaim": "background", "threshold": 0.05, "commit_delay": 4}
MODES: dict[str, dict[str, Any]] = {
    "off": {"reclaim": "off"},
    "eager": {"reclaim": "eager"},
    "background": BACKGROUND,
}


def tapping(engine: Engine, need: ScoreNeed = ScoreNeed.TOKENS, **options: Any) -> None:
    """Configure the engine so that every request's policy asks for weights."""
    engine.configure(**{"policy": "random", "budget": 40, "checks": 3, "seed": 7, **options})
    engine.scheduler.vtoken_policies.needs = lambda req_id: need


def compared(engine: Engine, served: Served, **more: Any) -> ScoreComparison:
    total = ScoreComparison()
    for life in served.lives:
        total.add(compare_scores(engine.reference, life, served.tokens_of(life), **more))
    return total


@pytest.mark.parametrize(("mode", "scenario"), list(product(MODES, SCENARIOS)))
def test_weights_of_every_step_equal_eager_attention(
    tiny: Engine, mode: str, scenario: str
) -> None:
    prompts, max_tokens = SCENARIOS[scenario]
    tapping(tiny, **MODES[mode])
    served = tiny.serve(prompts, max_tokens)
    found = compared(tiny, served)
    assert found.max_error <= BOUND
    assert found.missed == 0
    assert found.after_eviction > 100
    assert found.prompts >= len(prompts)
    if scenario == "chunked":
        assert found.prompts >= 6, "prompts were observed chunk by chunk"
    if mode == "background" and scenario != "plain":
        assert served.report["tokens"]["moved"] > 0
    assert served.report["late_scores"] == 0


@pytest.mark.parametrize("way", ["direct", "captured"])
def test_bursts_with_plans_in_flight(
    tiny: Engine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relocation of scattered survivors, several steps between copy and switch; with q used in the
    layers, and with q copied there and used after them."""
    monkeypatch.setattr(tiny.runner, "vtoken_captures", way == "captured")
    rng = np.random.default_rng(5)
    tapping(tiny, budget=60, **BACKGROUND)
    tiny.scheduler.vtoken_policies.policy_class = Burst
    served = tiny.serve([rng.integers(3, 259, n).tolist() for n in (150, 90, 170, 120)], 150)
    found = compared(tiny, served)
    assert found.max_error <= BOUND
    assert found.missed == 0
    assert found.after_eviction > 400
    assert served.report["tokens"]["moved"] > 50


def test_single_heads_of_prompts_equal_eager_attention(tiny: Engine) -> None:
    """Each query head of each layer, in the model's order; decode steps give sums only."""
    tapping(tiny, ScoreNeed.HEADS, score_window=7)
    served = tiny.serve(prompts_of(40, 250, seed=6), 20)
    found = compared(tiny, served)
    assert found.max_error <= BOUND
    assert 0 < found.max_head_error <= BOUND
    for life in served.lives:
        for scores in life.scores:
            assert (scores.per_head is not None) == scores.prompt
            assert 1 <= scores.queries <= (7 if scores.prompt else 1)


def test_sampled_mode_looks_at_chosen_layers_and_lengths(tiny: Engine) -> None:
    tapping(tiny, score_mode="sampled", score_layers=2, score_every=4, reclaim="off")
    served = tiny.serve(prompts_of(40, 50, seed=1), 70)
    layers = tiny.runner.vtoken_layout.num_layers
    found = compared(tiny, served, layers=range(1, layers, 2))
    assert found.max_error <= BOUND
    for life in served.lives:
        decoded = [len(s.token_ids) for s in life.scores if not s.prompt]
        assert 16 <= len(decoded) <= 18
        lengths = [int(s.token_ids.max()) + 1 for s in life.scores if not s.prompt]
        assert all(length % 4 == 0 for length in lengths)


def test_requests_of_one_batch_are_looked_at_each_in_its_own_way(tiny: Engine) -> None:
    """Exact beside sampled, other layers, other steps, another window."""
    layers = tiny.runner.vtoken_layout.num_layers
    ways: list[tuple[dict[str, Any], int, int]] = [
        ({}, 1, 1),
        ({"vtoken_score_mode": "sampled", "vtoken_score_layers": 2}, 2, 8),
        ({"vtoken_score_mode": "sampled", "vtoken_score_every": 3}, layers, 3),
        ({"vtoken_score_window": 5}, 1, 1),
    ]
    tiny.configure(policy="h2o", budget=40, checks=3, **BACKGROUND)
    prompts = prompts_of(40, 50, 45, 60, seed=4)
    served = tiny.serve(prompts, 40, asked=[own for own, _, _ in ways])
    for life in served.lives:
        own, stride, every = ways[int(life.req_id.split("-")[0])]
        tapped = range(stride - 1, layers, stride)
        found = compare_scores(tiny.reference, life, served.tokens_of(life), layers=tapped)
        assert found.max_error <= BOUND
        window = own.get("vtoken_score_window", 32)
        assert max(scores.queries for scores in life.scores) <= window
        lengths = [int(s.token_ids.max()) + 1 for s in life.scores if not s.prompt]
        assert all(length % every == 0 for length in lengths)
        assert len(lengths) >= 39 // every


def test_a_shared_prefix_is_observed_by_each_who_shares_it(tiny: Engine) -> None:
    rng = np.random.default_rng(21)
    prefix = rng.integers(3, 259, 4 * BLOCK).tolist()
    prompts = [prefix + rng.integers(3, 259, n).tolist() for n in (9, 14, 40)]
    tapping(tiny, budget=66, **BACKGROUND)
    recorder, outputs = Recorder(tiny.llm), dict[str, list[int]]()
    with recorder.watching():
        tiny.submit("0", prompts[0], 50)
        for _ in range(3):
            tiny.step(outputs)
        tiny.submit("1", prompts[1], 60)
        tiny.submit("2", prompts[2], 30)
        outputs |= tiny.drain()
    total = ScoreComparison()
    for life in recorder.lives:
        name = life.req_id.split("-")[0]
        tokens = prompts[int(name)] + outputs[name]
        total.add(compare_scores(tiny.reference, life, tokens))
    sharers = [life for life in recorder.lives if life.req_id[0] in "12"]
    for life in sharers:  # a step computes 96 tokens at most; the others come from the cache
        assert len(life.scores[0].token_ids) > 96
    assert total.max_error <= BOUND
    assert total.missed == 0
    assert total.after_eviction > 60


@pytest.fixture
def asynchronous() -> Iterator[Engine]:
    engine = engine_on("tiny async")
    free = engine.free
    yield engine
    assert engine.free == free


def test_with_steps_in_flight_weights_come_late_and_on_the_right_tokens(
    asynchronous: Engine,
) -> None:
    """Asynchronous scheduling, chunked prompts, holes recycled and tokens moved in between."""
    for mode in MODES.values():
        tapping(asynchronous, **mode)
        served = asynchronous.serve(prompts_of(40, 250, 96, seed=9), 60)
        found = compared(asynchronous, served)
        assert found.max_error <= BOUND
        assert found.missed == 0
        assert found.after_eviction > 100


@pytest.mark.parametrize("which", ["tiny", "tiny async"])
def test_late_weights_of_a_preempted_request_are_dropped(which: str) -> None:
    """All requests are preempted with a step in flight; its weights count for nobody, and the
    requests' next lives are exact."""
    engine = engine_on(which)
    free = engine.free
    tapping(engine, budget=50, **BACKGROUND)
    prompts = {str(n): p for n, p in enumerate(prompts_of(80, 90, 100, seed=12))}
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    with recorder.watching():
        for name, prompt in prompts.items():
            engine.submit(name, prompt, 60)
        for _ in range(25):
            engine.step(outputs)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        outputs |= engine.drain()
    total = ScoreComparison()
    for life in recorder.lives:
        name = life.req_id.split("-")[0]
        total.add(compare_scores(engine.reference, life, prompts[name] + outputs[name]))
    assert engine.scheduler.vtoken.counters.recomputed_requests == 3
    assert len(recorder.lives) >= 6
    assert engine.scheduler.vtoken_scores.dropped == (3 if "async" in which else 0)
    assert total.max_error <= BOUND
    assert total.after_eviction > 60
    assert engine.free == free


def shift_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.runner._read_slots

    def wrong(prepared: Any, row: int) -> np.ndarray:
        slots = real(prepared, row).copy()
        slots[0] += 1
        return slots

    monkeypatch.setattr(engine.runner, "_read_slots", wrong)


def test_the_control_one_slot_beside_it_shows(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tapping(tiny, checks=1)
    shift_one(tiny, monkeypatch)
    found = compared(tiny, tiny.serve(prompts_of(40, 50, seed=1), 20))
    assert found.max_error > 100 * BOUND


def test_nothing_is_tapped_for_a_policy_that_asks_for_nothing(tiny: Engine) -> None:
    tiny.configure(policy="random", budget=40, reclaim="eager", checks=2)
    served = tiny.serve(prompts_of(40, seed=1), 20)
    assert not any(life.scores for life in served.lives)
    assert tiny.runner._vtoken_tap is None


def test_smollm2_gives_the_weights_of_eager_attention(smollm2: Engine) -> None:
    tokenizer = smollm2.llm.get_tokenizer()
    prompts = [tokenizer.encode(text)[:60] for text in TEXTS]
    for mode in MODES.values():
        tapping(smollm2, budget=48, checks=2, **mode)
        found = compared(smollm2, smollm2.serve(prompts, 8))
        assert found.missed == 0
        assert found.after_eviction >= 12
        assert found.max_error <= BOUND
