"""Every rank executes the same decisions: two ranks give the tokens of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engines import Engine

pytestmark = pytest.mark.engine
PROGRAM = Path(__file__).resolve().parents[1] / "support" / "tensor_parallel.py"


def run(ranks: int, mode: str, *policy: str) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, str(PROGRAM), str(ranks), mode, *policy],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    line = next(x for x in found.stdout.splitlines() if x.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return {**result, "log": found.stdout + found.stderr}


MODES = ["eager", "background"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_give_the_tokens_of_one(tiny: Engine, mode: str) -> None:
    """Level 3 checks on both ranks; the metadata crosses to them through vLLM's own queue, and
    their layouts are compared in every step. A rank that goes astray stops the engine."""
    found = run(2, mode)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 259, n).tolist() for n in (150, 70, 200)]
    tiny.configure(policy="random", budget=40, reclaim=mode, checks=3)
    assert found["outputs"] == tiny.serve(prompts, 40).outputs
    first, second = found["reports"]
    assert first == second
    assert first["moved_tokens"] == tiny.scheduler.vtoken.counters.copied > 0
    assert first["checks"]["I1"] > 1000
    assert found["astray"], "the control: the second rank's layout differed"
    assert "ranks are about to use different layouts" in found["log"]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_attention_weights_are_summed_over_ranks(tiny: Engine) -> None:
    """H2O on two ranks evicts what it evicts on one, so its tokens are the same. At level 3, each
    rank also finds that the sums are one per observed query and head of both ranks."""
    found = run(2, "eager", "h2o")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 259, n).tolist() for n in (150, 70, 200)]
    tiny.configure(policy="h2o", budget=40, reclaim="eager", checks=3)
    assert found["outputs"] == tiny.serve(prompts, 40).outputs
    first, second = found["reports"]
    assert first == second
    assert first["moved_tokens"] == tiny.scheduler.vtoken.counters.copied > 0
