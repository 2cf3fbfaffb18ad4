"""What the score tap costs: exact as a share of the attention time, sampled as a share of the step.

SmolLM2, one request at 2,000 tokens of context, decode steps. Everything is measured in one run: in
each step, the time inside vLLM's attention kernel, the time inside the tap (preparing it, the
layers, bringing the sums together, noting the ids), and the whole step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from support.engines import Engine
from vtoken.models import ensure_smollm2
from vtoken.policies import ScoreNeed
from vtoken.policies.ledger import ScoreLedger
from vtoken.vllm.runner_core import VTokenRunnerCore
from vtoken.vllm.scores import StepTap

CONTEXT, STEPS = 2000, 32
AIMS = {"exact": 0.25, "sampled": 0.02}


class Clock:
    """Seconds spent in methods of classes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds = {"tap": 0.0, "kernel": 0.0}
        for owner, name in (
            (StepTap, "hand_over"),
            (VTokenRunnerCore, "_attach_tap"),
            (VTokenRunnerCore, "_finish_tap"),
            (ScoreLedger, "row"),
            (ScoreLedger, "end_step"),
        ):
            patch.setattr(owner, name, self._timed(getattr(owner, name), "tap"))
        kernel = CPUAttentionBackendImpl.forward
        patch.setattr(CPUAttentionBackendImpl, "forward", self._timed(kernel, "kernel"))

    def _timed(self, method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self.seconds[what] += time.perf_counter() - start
            return result

        return wrapper

    def take(self) -> dict[str, float]:
        found, self.seconds = self.seconds, {"tap": 0.0, "kernel": 0.0}
        return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(ensure_smollm2(), blocks=80, chunk=512, max_model_len=2200, prefix_caching=False)


@pytest.mark.parametrize("mode", AIMS)
def test_cost_at_two_thousand_tokens(
    mode: str, engine: Engine, benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.configure(policy="sliding-window", budget=2150, checks=1, score_mode=mode)
    engine.scheduler.vtoken_policies.needs = lambda req_id: ScoreNeed.TOKENS
    clock = Clock(monkeypatch)
    prompt = np.random.default_rng(0).integers(3, 259, CONTEXT).tolist()
    shares: dict[str, list[float]] = {"of attention": [], "of the step": []}

    def run() -> None:
        engine.submit("0", prompt, STEPS + 8)
        outputs: dict[str, list[int]] = {}
        while not outputs:
            engine.step(outputs)
        total, spent = 0.0, {"tap": 0.0, "kernel": 0.0}
        clock.take()
        for _ in range(STEPS):
            start = time.perf_counter()
            engine.step(outputs)
            total += time.perf_counter() - start
            for what, seconds in clock.take().items():
                spent[what] += seconds
        engine.drain()
        shares["of attention"].append(spent["tap"] / spent["kernel"])
        shares["of the step"].append(spent["tap"] / total)

    benchmark.pedantic(run, rounds=3, iterations=1)
    for what, values in shares.items():
        share = statistics.median(values)
        benchmark.extra_info[f"share {what}"] = share
        print(f"\n  score tap, {mode}, {CONTEXT} tokens: {100 * share:.1f} % {what}")
    aimed = "of attention" if mode == "exact" else "of the step"
    share = statistics.median(shares[aimed])
    print(f"  aim: at most {100 * AIMS[mode]:.0f} % {aimed}")
    assert share < 4 * AIMS[mode], "far beyond the aim, even for a busy machine"
