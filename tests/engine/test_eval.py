"""`vtoken eval` on a real engine: its figures against Hugging Face, and vToken against naive."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.exactness import Recorder, Reference
from support.processes import vtoken
from vtoken.config import VTokenConfig
from vtoken.errors import Rejected
from vtoken.evaluation import perplexity
from vtoken.evaluation.requests import FULL, Answer, Cell, Request
from vtoken.models import ensure_tiny_llama
from vtoken.vllm.eval_engine import EvalEngine

pytestmark = pytest.mark.engine

#: of one token's log-probability; the tiny model's logits are within 2e-6 of the reference
TOLERANCE = 1e-5
POLICIES = ("streaming-llm", "random", "h2o", "fastgen")
CELLS = [Cell(policy, 0.5) for policy in POLICIES]


@cache
def shared() -> EvalEngine:
    """Neither closed nor dropped: that would end the distributed groups of this process, which the
    other tests' engines share."""
    return EvalEngine(
        ensure_tiny_llama(),
        VTokenConfig(policy="streaming-llm", budget_ratio=0.5, checks=2),
        longest=448,
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


@pytest.fixture
def engine() -> EvalEngine:
    return shared()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(ensure_tiny_llama())


def tokens(count: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(3, 259, count))


def serve(
    engine: EvalEngine, requests: list[Request], reclaim: str = "background"
) -> tuple[list[Answer], dict[str, Any]]:
    produced: list[int] = []
    answers, counts = engine.serve(requests, reclaim=reclaim, on_tokens=produced.append)
    assert sum(produced) == sum(request.max_tokens for request in requests)
    assert all(answer.error is None for answer in answers)
    assert [len(answer.token_ids) for answer in answers] == [r.max_tokens for r in requests]
    return answers, dict(counts)


def expected_logprobs(
    reference: Reference, request: Request, evicted_at: np.ndarray | None
) -> list[float]:
    whole = [*request.prompt, *request.forced]
    rows = torch.log_softmax(reference.logits(whole, evicted_at).double(), dim=-1)
    start = len(request.prompt)
    return [float(rows[start + i - 1, token]) for i, token in enumerate(request.forced)]


def test_perplexity_of_the_full_cache_is_hugging_faces(
    engine: EvalEngine, reference: Reference
) -> None:
    """Texts of several lengths in one batch, beside requests that nothing is forced upon."""
    requests = []
    for number, (prompt, forced) in enumerate([(256, 129), (97, 40), (33, 100)]):
        whole = tokens(prompt + forced, number)
        requests.append(Request(FULL, number, whole[:prompt], forced, whole[prompt:]))
        requests.append(Request(FULL, number, whole[:prompt], 30))
    answers, counts = serve(engine, requests)
    assert counts["evicted"] == 0
    for request, answer in zip(requests, answers, strict=True):
        if not request.forced:
            assert answer.logprobs == []
            continue
        assert tuple(answer.token_ids) == request.forced
        expected = expected_logprobs(reference, request, None)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
    scored = [(r, a) for r, a in zip(requests, answers, strict=True) if r.forced]
    found = perplexity.figure(scored)
    values = [v for r, _ in scored for v in expected_logprobs(reference, r, None)[1:]]
    assert (found.tokens, found.samples) == (128 + 39 + 99, 3)
    assert found.value == pytest.approx(math.exp(-sum(values) / len(values)), rel=TOLERANCE)


def test_perplexity_under_eviction_is_that_of_a_model_that_does_not_see_the_evicted(
    engine: EvalEngine, reference: Reference
) -> None:
    whole = tokens(200, 9)
    requests = [Request(cell, 0, whole[:128], 72, whole[128:]) for cell in CELLS]
    recorder = Recorder(engine.session.llm)
    with recorder.watching():
        # Configuring makes a new reclaimer, which would not be the one that is watched.
        engine.session.reconfigure = lambda config: None  # type: ignore[method-assign]
        try:
            answers, counts = serve(engine, requests)
        finally:
            del engine.session.reconfigure  # type: ignore[method-assign]
    assert counts["evicted"] > 100
    assert len(recorder.lives) == len(requests)
    control = expected_logprobs(reference, requests[0], None)
    for life, request, answer in zip(recorder.lives, requests, answers, strict=True):
        expected = expected_logprobs(reference, request, life.evicted_at(len(whole)))
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE), request.cell
        # The first comes of the prompt, with all its tokens; the others could not be mistaken.
        assert answer.logprobs[0] == pytest.approx(control[0], abs=TOLERANCE)
        off = max(abs(one - other) for one, other in zip(answer.logprobs, control, strict=True))
        assert off > 0.1, request.cell


def test_a_shared_prompt_is_answered_like_one_of_its_own(engine: EvalEngine) -> None:
    """Also for policies that look at attention: they are shown as many of its queries."""
    prompts = [tokens(256, seed) for seed in (1, 2)]

    def requests(shares: bool) -> list[Request]:
        rows = [FULL, *CELLS]
        return [
            Request(cell, number, prompt, 40, shares=shares)
            for number, prompt in enumerate(prompts)
            for cell in rows
        ]

    alone, _ = serve(engine, requests(False))
    shared, _ = serve(engine, requests(True))
    for request, one, other in zip(requests(True), alone, shared, strict=True):
        # What `random` draws depends on the order in which policies are made.
        assert one.token_ids == other.token_ids or request.cell.policy == "random", request.cell
    assert len({tuple(answer.token_ids) for answer in alone}) > len(prompts), "eviction shows"


def test_naive_eviction_gives_the_tokens_of_every_other_mode(engine: EvalEngine) -> None:
    requests = [Request(cell, n, tokens(128, n), 64) for n in range(3) for cell in CELLS]
    naive, kept = serve(engine, requests, "off")
    for reclaim in ("background", "eager"):
        found, counts = serve(engine, requests, reclaim)
        assert [a.token_ids for a in found] == [a.token_ids for a in naive]
        assert counts["evicted"] == kept["evicted"] > 500
        assert counts["moved"] > 0 == kept["moved"]


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    """Everything at once, small: three tasks, two policies, on text of the user's."""
    text, out, plot = tmp_path / "text", tmp_path / "out.json", tmp_path / "out.png"
    text.write_text("Bread is older than writing, and so is the quarrel about its crust. " * 30)
    done = vtoken(
        *("eval", "--model", str(ensure_tiny_llama()), "--kv-memory-mb", "16", "--checks", "2"),
        *("--policy", "streaming-llm,h2o", "--budgets", "0.5", "--samples", "2"),
        *("--length", "448", "--text", str(text), "--json", str(out), "--plot", str(plot)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "starting vLLM ...\npasskey ...\nperplexity ...\nrouge ...\n"
    result = json.loads(out.read_text())
    assert [row["policy"] for row in result["rows"]] == ["none", "streaming-llm", "h2o"]
    assert [row["passkey"]["samples"] for row in result["rows"]] == [2, 2, 2]
    for row in result["rows"]:
        assert (row["perplexity"]["tokens"], row["perplexity"]["samples"]) == (256, 2)
        assert row["perplexity"]["value"] > 100, "a random model has no idea"
    assert result["rows"][0]["rouge"] is None
    agreement = result["agreement"]
    assert (agreement["pairs"], agreement["close"], agreement["identical"]) == (4, 4, 4)
    assert agreement["mean_difference"] == 0.0
    for row in result["rows"][1:]:
        assert row["rouge"]["between"] == 1.0
        assert row["rouge"]["vtoken"] == row["rouge"]["naive"]
    modes = [(run["task"], run["reclaim"]) for run in result["served"]]
    assert modes[-3:] == [("rouge", "none"), ("rouge", "background"), ("rouge", "off")]
    assert all(min(run["checks"].values()) > 0 for run in result["served"][-2:])
    assert result["served"][-2]["moved"] > 0
    # The full cache's perplexity is the model's own.
    assert result["rows"][0]["perplexity"]["value"] == pytest.approx(
        own(text.read_text()), rel=1e-5
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "over 4 pairs: the same tokens in 4; ROUGE-L difference 0.0000" in done.stdout


def own(text: str) -> float:
    """Hugging Face's perplexity of the excerpts that the command takes: two halves' beginnings."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(str(ensure_tiny_llama())).encode(text)
    reference, values = Reference(ensure_tiny_llama()), []
    for start in (0, len(ids) // 2):
        piece = ids[start : start + 385]
        rows = torch.log_softmax(reference.logits(piece, None).double(), dim=-1)
        values += [float(rows[at - 1, piece[at]]) for at in range(257, 385)]
    return math.exp(-sum(values) / len(values))


def test_a_request_that_the_pool_cannot_hold_is_refused(engine: EvalEngine) -> None:
    """Preempted requests come back with all their tokens, which is another question."""
    with pytest.raises(Rejected, match="holds no request of 100001 tokens; raise --kv-memory-mb"):
        serve(engine, [Request(FULL, 0, (3,) * 100_000, 1)])
    assert not engine.session.scheduler.requests


def test_nothing_is_shared_when_policies_are_shown_more_than_a_block(engine: EvalEngine) -> None:
    config = engine.session.config
    assert engine.share_unit == 32
    try:
        engine.session.reconfigure(replace(config, score_window=33))
        assert engine.share_unit == 0
    finally:
        engine.session.reconfigure(config)
