"""Exactness on both of vLLM's model runners, each with one and with two steps in flight.

Marked `every_runner`, as the scenarios are that depend on the runner: `make test` runs these tests
a second time with Model Runner V2, in Triton's interpreter (`support/interpreter.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support.engines import BLOCK, RUNNER, Engine, engine_on
from support.exactness import Comparison, Recorder, compare
from vtoken.config import VTokenConfig
from vtoken.models import ensure_tiny_llama
from vtoken.policies import Policy, PolicyParams, PolicyView
from vtoken.vllm.enable import REQUEST_GUARD
from vtoken.vllm.request_options import SETTINGS
from vtoken.vllm.runner_core import NO_STEP

pytestmark = [pytest.mark.engine, pytest.mark.every_runner]

ABSOLUTE, CONTROL = 1e-5, 0.1
MODES: dict[str, dict[str, Any]] = {
    "off": {"reclaim": "off"},
    "eager": {"reclaim": "eager"},
    "background": {"reclaim": "background", "threshold": 0.1, "commit_delay": 2},
}


def prompts_of(*lengths: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 259, length).tolist() for length in lengths]


SCENARIOS: dict[str, tuple[list[list[int]], int]] = {
    "plain": (prompts_of(40, 50, seed=1), 52),
    "chunked": (prompts_of(250, 333, seed=2), 40),
    "small pool": (prompts_of(70, 200, 101, 160, 96, 33, 180, 64, seed=3), 30),
}
CASES = [
    (policy, mode, scenario)
    for policy, mode, scenario in product(("streaming-llm", "random", "h2o"), MODES, SCENARIOS)
    if policy == "random" or (policy, scenario) in {("streaming-llm", "plain"), ("h2o", "chunked")}
]


@pytest.fixture(params=["sync", "async"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Must be left drained and free."""
    found = engine_on("tiny async" if request.param == "async" else "tiny")
    free = found.free
    yield found
    assert not found.scheduler.requests
    assert found.free == free, "blocks leaked"


def test_the_runner_and_the_steps_in_flight_are_what_the_names_say(engine: Engine) -> None:
    """In all other tests of this file as well: what is tested is vLLM's own runner."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

    assert isinstance(engine.runner, {"v1": V1, "v2": V2}[RUNNER])
    asynchronous = isinstance(engine.scheduler, AsyncScheduler)
    assert asynchronous == (engine.core.batch_queue is not None)
    assert asynchronous == engine.core.vllm_config.scheduler_config.async_scheduling


@pytest.mark.parametrize(("policy", "mode", "scenario"), CASES)
def test_logits_equal_the_masked_reference(
    engine: Engine, policy: str, mode: str, scenario: str
) -> None:
    prompts, max_tokens = SCENARIOS[scenario]
    engine.configure(policy=policy, budget=40, checks=3, seed=7, **MODES[mode])
    served = engine.serve(prompts, max_tokens)
    found = engine.compare(served)
    assert served.report["tokens"]["evicted"] > 100
    assert found.rows_after_eviction > 70
    assert found.max_error <= ABSOLUTE
    assert found.wrong_tokens == 0
    assert found.max_control > CONTROL, "the control without the mask must differ"
    if (mode, scenario) == ("off", "small pool"):
        assert served.report["tokens"]["recomputed_requests"] > 0


class Bursts(Policy):
    """Evicts a random half of the tokens whenever 60 are live, so that plans copy."""

    name = "bursts"

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._rng = np.random.default_rng([params.seed, stream])

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        if view.num_live < 60:
            return np.empty(0, dtype=np.int32)
        candidates = np.flatnonzero(view.live[:-1])
        return self._rng.choice(candidates, len(candidates) // 2, replace=False).astype(np.int32)


def test_aborts_with_plans_in_flight(engine: Engine) -> None:
    """Six requests with a plan in flight most of the time; one of them is aborted every few steps
    and another takes its blocks."""
    engine.configure(policy="random", budget=1, checks=3, seed=3, **MODES["background"])
    engine.scheduler._policy_class = Bursts
    prompts = {str(i): prompts_of(60 + 9 * i, seed=30 + i)[0] for i in range(9)}
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    counters = engine.scheduler.vtoken.counters
    with recorder.watching():
        for name in "012345":
            engine.submit(name, prompts[name], 60)
        for step, (leaves, comes) in enumerate(zip("024", "678", strict=True)):
            for _ in range(12 + step):
                engine.step(outputs)
            engine.llm.llm_engine.abort_request([leaves])
            engine.submit(comes, prompts[comes], 25)
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    assert counters.moved > 100
    assert counters.plans > 10
    total = Comparison()
    for life in recorder.lives:
        name = life.req_id.split("-")[0]
        if name not in "024":
            total.add(compare(engine.reference, life, prompts[name] + outputs[name]))
    assert total.rows_after_eviction > 100
    assert total.max_error <= ABSOLUTE
    assert total.wrong_tokens == 0


@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_steps_without_news_and_dummy_runs_between_steps(engine: Engine, policy: str) -> None:
    """Without checks the worker is told nothing of a step in which nothing is vToken's, and between
    steps vLLM may run dummy batches (on data-parallel ranks without work): attention is given the
    right lengths all the same, and nothing of a step is left for the next or for a dummy batch."""
    engine.configure(policy=policy, budget=60, checks=0, seed=9, **MODES["off"])
    prompts = dict(zip("01", prompts_of(33, 70, seed=60), strict=True))
    worker = engine.core.model_executor.driver_worker.worker
    recorder, outputs, told = Recorder(engine.llm), dict[str, list[int]](), ""
    with recorder.watching():
        engine.submit("0", prompts["0"], 45)
        while engine.llm.llm_engine.has_unfinished_requests():
            if len(told) == 6:
                engine.submit("1", prompts["1"], 12)
            engine.step(outputs)
            told += "-" if engine.runner.vtoken_step is NO_STEP else "+"
            worker.execute_dummy_batch()
    total = Comparison()
    for life in recorder.lives:
        name = life.req_id.split("-")[0]
        total.add(compare(engine.reference, life, prompts[name] + outputs[name]))
    assert total.max_error <= ABSOLUTE
    assert total.wrong_tokens == 0
    assert total.rows_after_eviction > 20
    assert policy == "h2o" or "-+" in told.partition("+-")[2], "alone, evicting, alone, evicting"


def test_a_dummy_batch_hands_its_queries_over_where_graphs_are_captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM captures CUDA graphs from dummy batches: a copy of q that is not in those is in no
    replay. Without captures a dummy batch is given nothing."""
    runner = engine.runner
    engine.configure(policy="h2o", budget=60, checks=1)

    def copies() -> set[int]:
        runner._dummy_run(1, force_attention=True, uniform_decode=True)
        return set(runner._queries().since(None).values())

    (first,) = copies()
    monkeypatch.setattr(runner, "vtoken_captures", True)
    assert copies() == {first + 1}
    assert copies() == {first + 2}
    monkeypatch.setattr(runner, "vtoken_captures", False)
    assert copies() == {first + 2}


class FirstBlock(Policy):
    """Of the request admitted first, evicts the oldest block's worth of tokens at once, while it
    has more than two."""

    name = "first-block"

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        if self.stream or view.num_live < 2 * BLOCK + 2:
            return np.empty(0, dtype=np.int32)
        return np.flatnonzero(view.live)[:BLOCK].astype(np.int32)


@pytest.mark.parametrize("mode", ["eager", "background"])
def test_s26_a_block_evicted_whole_while_a_step_reads_it(engine: Engine, mode: str) -> None:
    """S26: in a pool that is otherwise taken, whole blocks of one request die while a step that
    reads them is outstanding, and another request gets each of them: both stay exact (the law
    that orders this, L11, is checked in every step at level 3)."""
    engine.configure(policy="random", budget=1, checks=3, **MODES[mode])
    engine.scheduler._policy_class = FirstBlock
    prompts = prompts_of(90, 200, 150, 120, seed=50)
    served = engine.serve(prompts, 45)
    first = served.lives[0]
    assert len(first.evictions) >= 2
    assert all(len(set(ids // BLOCK)) == 1 for _, ids in first.evictions)
    found = engine.compare(served)
    assert found.max_error <= ABSOLUTE
    assert found.wrong_tokens == 0
    assert served.report["blocks_peak"]["vtoken"] > 20, "the pool was not taken"


@cache
def guarded() -> Engine:
    """Left open: closing an engine ends what others of the process share."""
    return Engine(
        ensure_tiny_llama(layers=1), blocks=12, max_model_len=128, logits_processors=[REQUEST_GUARD]
    )


def test_the_guard_of_requests_stands_on_either_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runner has an interface of its own for what the guard is plugged in as."""
    from vllm.exceptions import VLLMValidationError

    settings = VTokenConfig(policy="random", budget=40)
    monkeypatch.setenv(SETTINGS, json.dumps(settings.as_dict()))
    engine = guarded()
    (prompt,) = prompts_of(30, seed=60)
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        engine.submit("0", prompt, 4, prompt_logprobs=1)
    engine.configure(policy="random", budget=20, checks=3)
    served = engine.serve([prompt], 6)
    assert engine.compare(served).max_error <= ABSOLUTE
    assert [len(output) for output in served.outputs] == [6]
