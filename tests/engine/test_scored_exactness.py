"""Policies that look at attention are exact, and choose the same in every mode.

Exact as in `test_exactness.py`: logits equal a Hugging Face forward pass that masks what was
evicted. Each request names its own policy, so that all of them are served side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from engine.test_exactness import ABSOLUTE, CONTROL, TEXTS, prompts_of

from support.engines import Engine, Served
from support.exactness import Comparison, compare

pytestmark = pytest.mark.engine

SCORED = ("h2o", "scissorhands", "fastgen")
PLAIN = ("streaming-llm", "sliding-window", "random")
MODES: dict[str, dict[str, Any]] = {
    "off": {"reclaim": "off"},
    "eager": {"reclaim": "eager"},
    "background": {"reclaim": "background", "threshold": 0.05, "commit_delay": 2},
}
#: prompts, new tokens, slack
SCENARIOS: dict[str, tuple[list[list[int]], int, int]] = {
    "plain": (prompts_of(40, 50, 45, seed=31), 60, 0),
    # two and a half chunks: tokens are evicted between the chunks of a prompt
    "chunked": (prompts_of(250, 210, 180, seed=32), 40, 5),
    # far more tokens than slots: freed blocks are taken by the next request at once
    "small pool": (prompts_of(70, 200, 101, 160, 96, 33, 180, 64, 120, seed=33), 40, 0),
}
Run = Callable[[str, str], Served]


@pytest.fixture(scope="module")
def run(shared_tiny: Engine) -> Run:
    @cache
    def served(mode: str, scenario: str) -> Served:
        prompts, max_tokens, slack = SCENARIOS[scenario]
        shared_tiny.configure(
            policy="h2o", budget=40, slack=slack, recovery=0.6, checks=3, **MODES[mode]
        )
        asked = [{"vtoken_policy": SCORED[n % len(SCORED)]} for n in range(len(prompts))]
        result = shared_tiny.serve(prompts, max_tokens, asked=asked)
        assert shared_tiny.free == result.free_before, "blocks leaked"
        return result

    return served


def of_policy(served: Served, policy: str) -> list[int]:
    """Indices of the requests that it served."""
    return [n for n in range(len(served.prompts)) if SCORED[n % len(SCORED)] == policy]


@pytest.mark.parametrize(("mode", "scenario"), list(product(MODES, SCENARIOS)))
def test_logits_equal_the_masked_reference(
    run: Run, shared_tiny: Engine, mode: str, scenario: str
) -> None:
    served = run(mode, scenario)
    for policy in SCORED:
        mine, found = of_policy(served, policy), Comparison()
        for life in served.lives:
            if int(life.req_id.split("-")[0]) in mine:
                found.add(compare(shared_tiny.reference, life, served.tokens_of(life)))
        assert found.rows_after_eviction > 30
        assert found.max_error <= ABSOLUTE
        assert found.wrong_tokens == 0
        assert found.max_control > CONTROL, "the control without the mask must differ"
    if mode == "background" and scenario != "plain":
        assert served.report["tokens"]["moved"] > 0


@pytest.mark.parametrize("scenario", ["plain", "chunked"])
def test_the_mode_changes_memory_and_not_tokens(run: Run, scenario: str) -> None:
    """L9 where no request is preempted: recomputation brings tokens back."""
    runs = [run(mode, scenario) for mode in MODES]
    assert not any(each.report["tokens"]["recomputed_requests"] for each in runs)
    assert runs[0].outputs == runs[1].outputs == runs[2].outputs
    gone = [[life.evictions for life in each.lives] for each in runs]
    for other in gone[1:]:
        assert [[(at, ids.tolist()) for at, ids in life] for life in other] == [
            [(at, ids.tolist()) for at, ids in life] for life in gone[0]
        ]


def test_smollm2_is_exact_and_generates_the_same_in_every_mode(smollm2: Engine) -> None:
    """All six policies; `bench/bench_neutrality.py` has 144 generations of each. In `off` and in
    `background` rows with holes are read in the order of their ids, so these two often agree to the
    bit; in `eager` tokens lie, and are added up, in another order."""
    tokenizer = smollm2.llm.get_tokenizer()
    texts = [f"{n}. {2 * text}" for n, text in enumerate(TEXTS * 3)]  # no prefix is shared
    prompts = [tokenizer.encode(text)[: 100 + n] for n, text in enumerate(texts)]
    asked = [{"vtoken_policy": policy} for policy in SCORED + PLAIN]
    smollm2.configure(checks=1)
    full = smollm2.serve(prompts[:1], 20)
    runs = []
    for mode in MODES:
        smollm2.configure(policy="random", budget=44, checks=2, **MODES[mode])
        runs.append(smollm2.serve(prompts, 20, asked=asked))
        assert not runs[-1].report["tokens"]["recomputed_requests"]
        assert relative(smollm2, runs[-1], range(len(SCORED))) <= 1e-5
        assert smollm2.free == runs[-1].free_before
    assert runs[0].outputs == runs[1].outputs == runs[2].outputs
    assert min(run.report["tokens"]["moved"] for run in runs[1:]) > 0
    assert runs[0].outputs[0] != full.outputs[0], "the control: eviction changes what is generated"


def relative(engine: Engine, served: Served, which: Any) -> float:
    """Largest error relative to the largest logit of its row, over some requests."""
    return max(
        compare(engine.reference, life, served.tokens_of(life)).max_relative
        for life in served.lives
        if int(life.req_id.split("-")[0]) in which
    )
