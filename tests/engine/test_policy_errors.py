"""A policy that fails is contained: its request ends or goes on, and nothing else notices."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import pytest

from support.engines import Engine, engine_on
from support.exactness import Recorder, compare
from vtoken.policies import Policy, PolicyView, ScoreNeed, StepScores, oldest_live

pytestmark = pytest.mark.engine


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()


class Faulty(Policy):
    """Evicts the oldest tokens; the second request's one fails when it is asked for the 5th time.

    What it does then is chosen by `fault`.
    """

    name = "faulty"
    fault: ClassVar[str] = ""

    def __init__(self, params: Any, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._calls = 0
        if stream == 1 and self.fault == "does not start":
            raise RuntimeError("no\nidea")

    def victims(self, view: PolicyView) -> Any:
        self._calls += 1
        good = oldest_live(view, 0, view.excess)
        failing = self.fault and self.stream == 1 and self._calls == 5
        return self._fail(view, good) if failing else good

    def _fail(self, view: PolicyView, good: np.ndarray) -> Any:
        newest = view.num_tokens - 1
        match self.fault:
            case "raises":
                raise RuntimeError("no\nidea")
            case "exits":
                raise SystemExit(3)
            case "is slow":
                time.sleep(0.5)
                return good
            case "writes":
                view.live[:] = False
        answers: dict[str, Any] = {
            "names a foreign token": [newest + 5],
            "names a negative token": [-1],
            "names a dead token": [int(np.flatnonzero(~view.live)[0])],
            "names the newest token": [newest],
            "names a protected token": [newest - 2],
            "names a token twice": [int(good[0]), int(good[0])],
            "answers nothing": None,
            "answers text": ["seven"],
            "answers floats": [7.0],
            "answers a table": [[7], [8]],
        }
        return answers[self.fault]


FAULTS = {
    "does not start": "it raised RuntimeError: no idea",
    "raises": "it raised RuntimeError: no idea",
    "exits": "it raised SystemExit: 3",
    "is slow": "ms, more than policy_time_limit_ms 250",
    "writes": "it raised ValueError: assignment destination is read-only",
    "names a foreign token": "and the request has",
    "names a negative token": "it named token -1, and the request has",
    "names a dead token": "which is dead",
    "names the newest token": "which is the newest",
    "names a protected token": "which is protected",
    "names a token twice": "twice",
    "answers nothing": "its victims are no list of token ids, but object []",
    "answers text": "its victims are no list of token ids",
    "answers floats": "its victims are no list of token ids, but float64 [1]",
    "answers a table": "its victims are no list of token ids, but int64 [2, 1]",
}
PROMPTS = {str(n): random_prompt(length, seed=n) for n, length in enumerate((70, 100, 50))}
TOKENS = 40


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the policy host says in the log."""
    from vtoken.vllm import policy_host

    said: list[str] = []
    monkeypatch.setattr(
        policy_host.logger, "warning", lambda text, *values: said.append(text % values)
    )
    return said


def serve(engine: Engine, **options: Any) -> tuple[dict[str, Any], Recorder]:
    """The three prompts' last outputs, at check level 3."""
    engine.configure(
        policy="sliding-window",
        budget=40,
        keep_recent=4,
        checks=3,
        policy_time_limit_ms=250 if Faulty.fault == "is slow" else None,
        **options,
    )
    engine.scheduler._policy_class = Faulty
    recorder, last = Recorder(engine.llm), dict[str, Any]()
    with recorder.watching():
        for name, prompt in PROMPTS.items():
            engine.submit(name, prompt, TOKENS)
        while engine.llm.llm_engine.has_unfinished_requests():
            for output in engine.llm.llm_engine.step():
                last[output.request_id] = output.outputs[0]
    assert len(engine.scheduler.vtoken_policies) == 0
    return last, recorder


@pytest.fixture(params=["tiny", "tiny async"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    for which in ("tiny", "tiny async"):  # before anything is copied: Numba and vLLM's start clash
        engine_on(which)
    return str(request.param)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("outcome", ["stop-request", "keep-tokens"])
def test_a_fault_concerns_its_own_request_alone(
    kind: str, fault: str, outcome: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(kind)
    free = engine.free
    monkeypatch.setattr(Faulty, "fault", "")
    healthy, _ = serve(engine)
    assert not messages
    monkeypatch.setattr(Faulty, "fault", fault)
    last, recorder = serve(engine, on_policy_error=outcome)
    assert engine.free == free
    assert engine.scheduler.vtoken_policies.failures == 1
    # Once for the request, with the reason and the way out.
    (message,) = messages
    assert "policy faulty failed for request 1" in message
    assert FAULTS[fault] in message
    assert "--on-policy-error" in message
    assert "\n" not in message
    for name in ("0", "2"):
        assert last[name].finish_reason == "length"
        assert list(last[name].token_ids) == list(healthy[name].token_ids)
    failed = last["1"]
    lives = {life.req_id.split("-")[0]: life for life in recorder.lives}
    if outcome == "stop-request":
        assert failed.finish_reason == "abort"
        assert FAULTS[fault] in failed.stop_reason
        assert len(failed.token_ids) < TOKENS
    else:
        assert failed.finish_reason == "length"
        assert len(failed.token_ids) == TOKENS
        # What it read is what was there: everything that had not gone before the fault.
        served = PROMPTS["1"] + list(failed.token_ids)
        comparison = compare(engine.reference, lives["1"], served)
        assert comparison.max_error <= 1e-5
        assert comparison.wrong_tokens == 0


class Deaf(Faulty):
    """Fails when it is shown attention weights, from the moment that the test says so."""

    needs: ClassVar[ScoreNeed] = ScoreNeed.TOKENS
    fault = ""
    deaf: ClassVar[bool] = False

    def observe(self, scores: StepScores) -> None:
        if self.deaf:
            raise KeyError("what is this")


def test_a_fault_while_observing_ends_the_request_before_the_next_step(
    shared_tiny: Engine, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = shared_tiny
    engine.configure(policy="sliding-window", budget=40, checks=3)
    engine.scheduler._policy_class = Deaf
    host, last = engine.scheduler.vtoken_policies, dict[str, Any]()
    for name, prompt in PROMPTS.items():
        engine.submit(name, prompt, TOKENS)
    for _ in range(10):
        engine.step({})
    victim = next(r for r in engine.scheduler.running if r.request_id.startswith("1"))
    ids = np.arange(3, dtype=np.int32)
    scores = StepScores(ids, np.ones(3, dtype=np.float32), queries=1, heads=3, prompt=False)
    assert host.needs(victim.request_id) is ScoreNeed.TOKENS
    with monkeypatch.context() as patch:
        patch.setattr(Deaf, "deaf", True)
        host.observe(victim.request_id, scores)
        host.observe(victim.request_id, scores)
    assert host.needs(victim.request_id) is ScoreNeed.NONE
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            last[output.request_id] = output.outputs[0]
    assert {name: output.finish_reason for name, output in last.items()} == {
        "0": "length",
        "1": "abort",
        "2": "length",
    }
    assert len(messages) == 1
    assert "it raised KeyError: 'what is this'" in messages[0]
    host.observe("long gone", scores)
    assert len(host) == 0


def test_a_violation_is_never_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it concerns, it is not one request's matter."""
    from types import SimpleNamespace

    from vtoken.config import VTokenConfig
    from vtoken.core import RequestTable
    from vtoken.errors import InvariantViolation
    from vtoken.vllm.policy_host import PolicyHost

    class Unlawful(Faulty):
        def victims(self, view: PolicyView) -> Any:
            raise InvariantViolation("I2", "slot 17 belongs to two tokens")

    host = PolicyHost(VTokenConfig(policy="random", budget=2))
    host.policy_class = Unlawful
    table = RequestTable("r", 4)
    table.append([1, 2], 8)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=5)
    with pytest.raises(InvariantViolation):
        host.victims(request, table)  # type: ignore[arg-type]
    assert host.failures == 0


def test_a_request_has_the_policy_that_it_asks_for(shared_tiny: Engine) -> None:
    """Beside others, and exact: its own policy and budget, none at all, and one that is refused
    by what only the scheduler knows."""
    engine = shared_tiny
    engine.configure(policy="streaming-llm", budget=40, checks=3)
    asked: dict[str, dict[str, Any]] = {
        "0": {},
        "1": {"vtoken_policy": "random", "vtoken_budget": 20},
        "2": {"vtoken_policy": "none"},
        "3": {"vtoken_budget_ratio": 0.5},
        "4": {"vtoken_budget": 4},
    }
    prompts = {name: random_prompt(80, seed=int(name)) for name in asked}
    recorder, last = Recorder(engine.llm), dict[str, Any]()
    with recorder.watching():
        for name, arguments in asked.items():
            engine.submit(name, prompts[name], TOKENS, extra_args=arguments)
        while engine.llm.llm_engine.has_unfinished_requests():
            for output in engine.llm.llm_engine.step():
                last[output.request_id] = output.outputs[0]
    refused = last.pop("4")
    assert refused.finish_reason == "abort"
    assert "budget 4 is too small for streaming-llm: at least 5" in refused.stop_reason
    lives = {life.req_id.split("-")[0]: life for life in recorder.lives}
    gone = {}
    for name, output in last.items():
        assert output.finish_reason == "length"
        comparison = compare(engine.reference, lives[name], prompts[name] + list(output.token_ids))
        assert comparison.max_error <= 1e-5
        gone[name] = sum(len(ids) for _, ids in lives[name].evictions)
    length = 80 + TOKENS - 1  # the last token is never computed
    assert gone == {"0": length - 39 - 1, "1": length - 19 - 1, "2": 0, "3": length - 60}
