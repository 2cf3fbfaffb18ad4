"""L9 at length: 144 generations of SmolLM2 in fp32, the same in `off`, `eager` and `background`.

12 prompts x 3 policies x 4 budgets, 32 new tokens each, greedy. A difference counts unless the two
best logits at that position are closer than what two modes' logits differ by at all; both are
reported. Minutes, so it is not part of the tests, which hold a smaller one.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from support.engines import Engine, Served
from vtoken.models import ensure_smollm2

POLICIES, BUDGETS = ("streaming-llm", "sliding-window", "random"), (32, 48, 64, 96)
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "eager": {},
    "background": {"threshold": 0.05, "commit_delay": 2},
}
SUBJECTS = (
    *("the history of bread", "how a sailing ship is steered", "why leaves turn red in autumn"),
    *("a storage engine's write-ahead log", "the rules of chess", "how a violin makes its sound"),
    *("the water cycle", "a day in a lighthouse", "how tea is made in different countries"),
    *("the first printed books", "what a glacier leaves behind", "the shape of a snow crystal"),
)


@pytest.mark.timeout(3600)
def test_144_generations_are_the_same_in_every_mode(benchmark: Any) -> None:
    engine = Engine(ensure_smollm2(), blocks=128, chunk=512, max_model_len=512)
    tokenizer = engine.llm.get_tokenizer()
    prompts = [
        tokenizer.encode(f"Notes on {subject}, for somebody who wants all of it. " * 9)[: 110 + n]
        for n, subject in enumerate(SUBJECTS)
    ]
    counts = {"generations": 0, "evicted": 0, "moved": 0, "differ": 0, "excused": 0}
    worst = 0.0

    def campaign() -> None:
        nonlocal worst
        for policy, budget in product(POLICIES, BUDGETS):
            runs: dict[str, Served] = {}
            for mode, options in MODES.items():
                engine.configure(
                    policy=policy, budget=budget, reclaim=mode, checks=1, seed=4, **options
                )
                runs[mode] = engine.serve(prompts, 32)
                assert not runs[mode].report["tokens"]["recomputed_requests"]
            first = runs["off"]
            counts["generations"] += len(prompts)
            counts["evicted"] += first.report["tokens"]["evicted"]
            counts["moved"] += runs["background"].report["tokens"]["moved"]
            for mode in ("eager", "background"):
                error = logit_difference(first, runs[mode])
                worst = max(worst, error)
                for index, tokens in enumerate(runs[mode].outputs):
                    if tokens == first.outputs[index]:
                        continue
                    excused = margin_at_difference(first, runs[mode], index) < error
                    counts["excused" if excused else "differ"] += 1

    benchmark.pedantic(campaign, rounds=1, iterations=1)
    benchmark.extra_info.update(counts, largest_logit_difference=worst)
    print(f"\n  {counts}, largest difference between two modes' logits {worst:.2e}")
    assert counts["generations"] == 144
    assert counts["moved"] > 100
    assert counts["differ"] == 0


def logit_difference(one: Served, other: Served) -> float:
    """Largest over the positions before the first that differs."""
    worst = 0.0
    for mine, theirs in zip(one.lives, other.lives, strict=True):
        index = int(mine.req_id.split("-")[0])
        same = first_difference(one.outputs[index], other.outputs[index])
        last = len(one.prompts[index]) + same - 1
        for position, row in mine.rows.items():
            if position <= last:
                worst = max(worst, float((row - theirs.rows[position]).abs().max()))
    return worst


def margin_at_difference(one: Served, other: Served, index: int) -> float:
    life = next(life for life in one.lives if int(life.req_id.split("-")[0]) == index)
    at = first_difference(one.outputs[index], other.outputs[index])
    best = np.sort(life.rows[len(one.prompts[index]) + at - 1].numpy())[-2:]
    return float(best[1] - best[0])


def first_difference(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), len(one))
