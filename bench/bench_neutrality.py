"""L9 at length: matched generations of SmolLM2 in fp32, vToken (`background`, and `eager`)
against naive eviction (`off`): 144 for each policy, greedy.

36 prompts x 4 budgets, 32 new tokens each; the same prompts once with everything retained, which
ROUGE-L is measured against. A difference counts unless the two best logits at that position are
closer than what the modes' logits differ by at all; both are reported. Some ten minutes, so it is
not part of the tests, which hold a smaller one (`tests/engine/test_scored_exactness.py`).

Prefix caching is off: which queries of a prompt are observed depends on what is cached, and so do,
by what they are meant to do, the victims of policies that look at attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import Engine
from vtoken.models import ensure_smollm2

POLICIES = ("h2o", "scissorhands", "fastgen", "random", "streaming-llm", "sliding-window")
BUDGETS, NEW_TOKENS = (24, 32, 40, 52), 32
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
OPENINGS = (
    "Notes on {}, for somebody who wants all of it. ",
    "A teacher was asked about {} and told the class this. ",
    "What most people get wrong about {}: ",
)


@dataclass
class Run:
    """Attributes: best: the two largest logits of each row, by request and position."""

    outputs: list[list[int]]
    report: dict[str, Any]
    best: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(ensure_smollm2(), blocks=128, chunk=512, max_model_len=512, prefix_caching=False)


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    tokenizer = engine.llm.get_tokenizer()
    texts = [opening.format(subject) * 9 for opening, subject in product(OPENINGS, SUBJECTS)]
    return [tokenizer.encode(text)[: 64 + n // 2] for n, text in enumerate(texts)]


@pytest.fixture(scope="module")
def full(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What is generated when nothing is evicted."""
    engine.configure(checks=1)
    return serve(engine, prompts, [{}] * len(prompts)).outputs


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", POLICIES)
def test_144_generations_are_the_same_with_and_without_reclamation(
    engine: Engine,
    prompts: list[list[int]],
    full: list[list[int]],
    policy: str,
    benchmark: Any,
) -> None:
    runs: dict[str, Run] = {}
    cases = list(product(prompts, BUDGETS))

    def campaign() -> None:
        for mode, options in MODES.items():
            engine.configure(policy=policy, budget=32, reclaim=mode, checks=1, seed=4, **options)
            asked = [{"vtoken_budget": budget} for _, budget in cases]
            runs[mode] = serve(engine, [prompt for prompt, _ in cases], asked)
            assert not runs[mode].report["tokens"]["recomputed_requests"]

    benchmark.pedantic(campaign, rounds=1, iterations=1)
    naive, ours = runs["off"], runs["background"]
    lengths = [len(prompt) for prompt, _ in cases]
    eager = compared(naive, runs["eager"], lengths)
    error, differ, excused = compared(naive, ours, lengths)
    rouge = {
        mode: [rouge_l(out, full[n // len(BUDGETS)]) for n, out in enumerate(run.outputs)]
        for mode, run in runs.items()
    }
    gaps = np.array(rouge["background"]) - np.array(rouge["off"])
    found = {
        "generations": len(cases),
        "evicted": naive.report["tokens"]["evicted"],
        "moved": ours.report["tokens"]["moved"],
        "blocks at most, naive / vtoken": (
            naive.report["blocks_peak"]["vtoken"],
            ours.report["blocks_peak"]["vtoken"],
        ),
        "differ": differ,
        "excused": excused,
        "largest difference of a best logit": error,
        "eager: the same three": eager,
        "ROUGE-L F1 against full retention, naive": float(np.mean(rouge["off"])),
        "ROUGE-L F1 difference": float(gaps.mean()),
        "pairs within 0.01": float((np.abs(gaps) <= 0.01).mean()),
    }
    benchmark.extra_info.update(found)
    print(f"\n  {policy}: {found}")
    assert len(cases) == 144
    # The window's oldest tokens go first, so its blocks become empty without a move.
    assert found["moved"] > 100 or policy == "sliding-window"
    assert differ == excused
    assert eager[1] == eager[2]
    assert sum(out != full[n // len(BUDGETS)] for n, out in enumerate(naive.outputs)) > 72


def serve(engine: Engine, prompts: Sequence[list[int]], asked: Sequence[dict[str, Any]]) -> Run:
    run = Run([], {})
    with watched(engine, run):
        for index, (prompt, own) in enumerate(zip(prompts, asked, strict=True)):
            engine.submit(str(index), prompt, NEW_TOKENS, extra_args=own)
        outputs = engine.drain()
    run.outputs = [outputs[str(index)] for index in range(len(prompts))]
    run.report = engine.scheduler.vtoken_report()
    return run


@contextmanager
def watched(engine: Engine, run: Run) -> Iterator[None]:
    """Keep the two best logits of each row: whole rows would be gigabytes."""
    runner = engine.runner
    original = runner.model.compute_logits

    def compute_logits(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = original(hidden, *args, **kwargs)
        best = logits.topk(2).values.numpy()
        starts, positions = runner.query_start_loc.np, runner.positions
        for row, req_id in enumerate(runner.input_batch.req_ids):
            last = int(positions[int(starts[row + 1]) - 1])
            run.best[req_id.split("-")[0], last] = best[row]
        return logits

    runner.model.compute_logits = compute_logits
    try:
        yield
    finally:
        del runner.model.compute_logits


def compared(one: Run, other: Run, lengths: Sequence[int]) -> tuple[float, int, int]:
    """The largest difference of a best logit; how many outputs differ, and at how many of those the
    two best logits are nearer to each other than that."""
    error = logit_difference(one, other, lengths)
    differ = [n for n in range(len(lengths)) if one.outputs[n] != other.outputs[n]]
    excused = [n for n in differ if margin(one, other, n, lengths[n]) < error]
    return error, len(differ), len(excused)


def logit_difference(one: Run, other: Run, lengths: Sequence[int]) -> float:
    """Largest of the best logits, over the positions up to the first token that differs."""
    worst = 0.0
    for (name, position), best in one.best.items():
        same = first_difference(one.outputs[int(name)], other.outputs[int(name)])
        if position <= lengths[int(name)] + same - 1:
            worst = max(worst, abs(float(best[0] - other.best[name, position][0])))
    return worst


def margin(one: Run, other: Run, index: int, length: int) -> float:
    at = first_difference(one.outputs[index], other.outputs[index])
    best = one.best[str(index), length + at - 1]
    return float(best[0] - best[1])


def first_difference(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), len(one))


def rouge_l(one: Sequence[int], other: Sequence[int]) -> float:
    """ROUGE-L F1 over token ids: 2 LCS / (length + length)."""
    row = [0] * (len(other) + 1)
    for mine in one:
        last = 0
        for n, theirs in enumerate(other, start=1):
            last, row[n] = row[n], last + 1 if mine == theirs else max(row[n], row[n - 1])
    return 2 * row[-1] / (len(one) + len(other))
