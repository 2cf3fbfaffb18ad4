"""Faults that hurt people in systems of this kind, on the real engine with the tiny model.

Each test's name carries the scenario's id; its docstring says when, and what is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support.engines import BLOCK, Engine
from support.exactness import Comparison, Recorder, compare
from vtoken.policies import Policy, PolicyParams, PolicyView

pytestmark = pytest.mark.engine


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()  # type: ignore[no-any-return]


class OnlyFirst(Policy):
    """Evicts in the request admitted first, scattered over its prompt, and nowhere else."""

    name = "only-first"

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        self._rng = np.random.default_rng(params.seed)
        self._mine = stream == 0

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        if not self._mine:
            return np.empty(0, dtype=np.int32)
        candidates = np.flatnonzero(view.live[:-1])
        return self._rng.choice(candidates, view.excess, replace=False).astype(np.int32)


class TwoEachStep(Policy):
    """Evicts two tokens a step in the first two requests, so that each step has a plan of theirs:
    one hole is recycled, the other closed."""

    name = "two-each-step"

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._rng = np.random.default_rng([params.seed, stream])

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        if self.stream > 1:
            return np.empty(0, dtype=np.int32)
        return self._rng.choice(np.flatnonzero(view.live[:-1]), 2, replace=False).astype(np.int32)


def check_exact(engine: Engine, recorder: Recorder, tokens: dict[str, Sequence[int]]) -> Comparison:
    total = Comparison()
    for life in recorder.lives:
        total.add(compare(engine.reference, life, tokens[life.req_id.split("-")[0]]))
    assert total.max_error <= 1e-5
    assert total.wrong_tokens == 0
    return total


@pytest.mark.every_runner
def test_s01_a_request_does_not_depend_on_its_batch_neighbours(engine: Engine) -> None:
    """S01: alone and among 3 and 15 others, every request evicting each step: same output."""
    prompts = [random_prompt(20 + n, seed=n) for n in range(16)]
    outputs = []
    for count in (1, 4, 16):
        engine.configure(policy="streaming-llm", budget=16, reclaim="eager", checks=3)
        outputs.append(engine.serve(prompts[:count], 16).outputs)
    assert outputs[1][:1] == outputs[0]
    assert outputs[2][:4] == outputs[1]


@pytest.mark.every_runner
def test_s04_aborting_a_request_that_a_later_step_holds(engine: Engine) -> None:
    """S04: abort while a step with the request is scheduled: nobody else's bytes change."""
    prompts = [random_prompt(100, seed=s) for s in (1, 2, 3)]
    engine.configure(policy="random", budget=40, reclaim="eager", checks=3)
    expected = engine.serve(prompts, 36).outputs
    engine.configure(policy="random", budget=40, reclaim="eager", checks=3)
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, 36)
    for _ in range(20):
        engine.step(outputs)
    engine.llm.llm_engine.abort_request(["1"])
    # New requests take the freed blocks at once.
    engine.submit("3", random_prompt(90, seed=9), 20)
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.step(outputs)
    assert [outputs["0"], outputs["2"]] == [expected[0], expected[2]]


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_s09_evicting_a_shared_prefix_leaves_the_other_request_alone(
    engine: Engine, mode: str
) -> None:
    """S09: two requests share 3 prefix blocks, one evicts in them: the other is unchanged."""
    engine.configure(checks=3)
    engine.scheduler._policy_class = OnlyFirst
    engine.scheduler.vtoken.mode = type(engine.scheduler.vtoken.mode)(mode)
    object.__setattr__(engine.scheduler.vtoken_config, "budget", 60)
    prefix = random_prompt(3 * BLOCK, seed=4)
    prompts = {"0": prefix + random_prompt(9, seed=5), "1": prefix + random_prompt(14, seed=6)}
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    with recorder.watching():
        engine.submit("0", prompts["0"], 40)
        for _ in range(4):  # its prefix is cached and hit by the second before it is evicted
            engine.step(outputs)
            if len(engine.scheduler.requests) == 1:
                engine.submit("1", prompts["1"], 40)
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    tokens = {name: prompt + outputs[name] for name, prompt in prompts.items()}
    check_exact(engine, recorder, tokens)
    lives = {life.req_id.split("-")[0]: life for life in recorder.lives}
    assert lives["0"].evictions
    assert not lives["1"].evictions
    # The second run must find the prefix in the cache, unharmed.
    engine.scheduler._policy_class = None
    again = Recorder(engine.llm)
    with again.watching():
        engine.submit("1", prompts["1"], 40)
        repeated = engine.drain()["1"]
    assert repeated == outputs["1"]
    check_exact(engine, again, {"1": prompts["1"] + repeated})


def test_a_prompt_hit_after_eviction_reads_no_pruned_block(engine: Engine) -> None:
    """Nothing of a request is cached after its first eviction: the same prompt again is exact."""
    prompt = random_prompt(200, seed=8)
    engine.configure(policy="random", budget=40, reclaim="eager", checks=3)
    first = engine.serve([prompt], 80)
    second = engine.serve([prompt + first.outputs[0]], 10)
    assert engine.compare(second).max_error <= 1e-5
    engine.scheduler._policy_class = None
    third = engine.serve([prompt], 10)
    assert engine.compare(third).max_error <= 1e-5


def test_s10_preempt_and_resume_readmits_every_token(engine: Engine) -> None:
    """S10: at preemption the table is gone, at resume reclaimed is 0; the output follows the
    documented rule: all tokens are computed anew and live again."""
    prompt = random_prompt(120, seed=10)
    engine.configure(policy="streaming-llm", budget=40, reclaim="eager", checks=3)
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    scheduler = engine.scheduler
    with recorder.watching():
        name = engine.submit("0", prompt, 60)
        for _ in range(25):
            engine.step(outputs)
        assert scheduler.vtoken.tables[name].reclaimed > 0
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert name not in scheduler.vtoken.tables
        engine.step(outputs)
        while name not in scheduler.vtoken.tables:
            engine.step(outputs)
        assert scheduler.vtoken.tables[name].reclaimed >= 0
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    assert scheduler.vtoken.counters.recomputed_requests == 1
    assert len(recorder.lives) == 2
    # The policy starts afresh as well: one that went on would take the old evictions for done.
    assert [life.blocks[-1][0] for life in recorder.lives] == [40, 40]
    check_exact(engine, recorder, {"0": prompt + outputs["0"]})


@pytest.mark.every_runner
def test_s11_a_moved_batch_row_keeps_its_layout(engine: Engine) -> None:
    """S11: the middle of three requests ends after evictions, the batch condenses, a new request
    takes the row: the moved row keeps its layout, the new one starts clean."""
    prompts = {str(i): random_prompt(60 + 7 * i, seed=20 + i) for i in range(4)}
    engine.configure(policy="random", budget=40, reclaim="eager", checks=3)
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    with recorder.watching():
        for name, length in (("0", 70), ("1", 25), ("2", 70)):
            engine.submit(name, prompts[name], length)
        while "1" not in outputs or len(engine.scheduler.requests) == 3:
            engine.step(outputs)
        engine.submit("3", prompts["3"], 40)
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    check_exact(engine, recorder, {n: p + outputs[n] for n, p in prompts.items()})


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_s12_s25_token_zero_is_evicted(engine: Engine, mode: str) -> None:
    """S12, S25: the prefix with token 0 goes; then one token at a time, and several at a time."""
    engine.configure(policy="sliding-window", budget=20, reclaim=mode, checks=3)
    served = engine.serve([random_prompt(30, seed=30), random_prompt(310, seed=31)], 40)
    comparison = engine.compare(served)
    assert comparison.max_error <= 1e-5
    assert comparison.wrong_tokens == 0
    assert all(any(0 in ids for _, ids in life.evictions) for life in served.lives)


@pytest.mark.every_runner
def test_s18_the_policy_fires_between_the_chunks_of_a_prompt(engine: Engine) -> None:
    """S18: a prompt of 3.5 chunks: physical length never exceeds logical length; exact."""
    engine.configure(policy="random", budget=50, reclaim="eager", checks=3)
    served = engine.serve([random_prompt(336, seed=40)], 20)
    (life,) = served.lives
    assert len({at for at, _ in life.evictions if at < 336}) == 3
    assert engine.compare(served).max_error <= 1e-5


@pytest.mark.every_runner
def test_s22_a_plan_of_a_request_that_is_preempted_in_the_same_step_is_dropped(
    engine: Engine,
) -> None:
    """S22: growing requests push out later ones that evict and plan in every step: their plans
    are dropped with them, and every counter agrees at the end."""
    engine.configure(policy="random", budget=120, reclaim="eager", checks=3)
    growing = [random_prompt(58, seed=50 + i) for i in range(6)]
    served = engine.serve([*growing, random_prompt(200, seed=57), random_prompt(210, seed=58)], 36)
    assert served.report["tokens"]["recomputed_requests"] > 0
    comparison = engine.compare(served)
    assert comparison.max_error <= 1e-5
    assert comparison.wrong_tokens == 0
    assert any(life.evictions for life in served.lives if life.req_id[0] in "67")


def test_s24_bookkeeping_is_flat_over_many_short_requests(shared_tiny: Engine) -> None:
    """S24: 10,000 short requests leave nothing behind."""
    engine = shared_tiny
    engine.configure(policy="streaming-llm", budget=6, reclaim="eager", checks=1)
    scheduler, runner = engine.scheduler, engine.runner
    prompts = [random_prompt(7, seed=60 + i) for i in range(16)]
    for round_ in range(625):
        for index, prompt in enumerate(prompts):
            engine.submit(f"{round_}.{index}", prompt, 2)
        engine.drain()
    assert scheduler.vtoken.counters.evicted >= 10_000
    assert len(scheduler.vtoken.tables) == 0
    assert len(scheduler.vtoken_policies) == 0
    assert not scheduler.vtoken._changes
    assert not scheduler.vtoken._holes
    assert not scheduler.vtoken.meter._shares
    assert not scheduler.vtoken_checker._references
    assert not scheduler.vtoken_checker._touched
    assert not runner.vtoken_checker._seen


def test_s27_an_abort_storm_at_a_full_pool(engine: Engine) -> None:
    """S27: more requests than the pool holds, most aborted at random moments: nothing leaks."""
    rng = np.random.default_rng(70)
    engine.configure(policy="random", budget=60, reclaim="eager", checks=3)
    outputs: dict[str, list[int]] = {}
    alive: list[str] = []
    fullest = 1.0
    for number in range(120):
        name = str(number)
        engine.submit(name, random_prompt(int(rng.integers(5, 200)), seed=number), 30)
        alive.append(name)
        engine.step(outputs)
        fullest = min(fullest, engine.free / 23)
        if len(alive) > 14:
            victims = rng.choice(alive, 2, replace=False).tolist()
            engine.llm.llm_engine.abort_request(victims)
            alive = [n for n in alive if n not in victims]
    assert fullest < 0.1
    engine.drain()


def test_a_session_goes_on_after_a_turn_that_ended_with_a_step_in_flight(engine: Engine) -> None:
    """Streaming input: a stop token ends a turn, and with async scheduling the token after it is
    in flight, which vLLM takes back. The next turn's single token comes to the same place."""
    engine.configure(policy="random", budget=24, checks=3)
    core, stops = engine.core, list(range(3, 259, 3))
    recorder = Recorder(engine.llm)

    def take_turn(token_ids: list[int]) -> None:
        core.add_request(*core.preprocess_add_request(engine.session_turn(token_ids, stops)))
        core.step_fn()
        while core.scheduler.running or core.batch_queue:
            core.step_fn()
        # What vLLM took back is no part of the session.
        (session,) = engine.scheduler.requests.values()
        rows = recorder.life(session.request_id).rows
        for position in [p for p in rows if p >= session.num_computed_tokens]:
            del rows[position]

    with recorder.watching():
        for turn in ([*random_prompt(40, seed=80)], [7], [8], [9, 10, 11], [12]):
            take_turn(turn)
        (session,) = engine.scheduler.requests.values()
        tokens = list(session.all_token_ids)
        core.abort_requests([session.request_id])
        core.step_fn()
    assert not any(life.evictions for life in recorder.lives)
    assert check_exact(engine, recorder, {"session": tokens}).rows > 10


def test_prompt_logprobs_see_the_whole_prompt_where_no_guard_refuses_them(engine: Engine) -> None:
    """Enabled by flags without the request guard: eviction waits until the prompt is computed."""
    prompt = random_prompt(250, seed=90)
    engine.configure(policy="random", budget=40, reclaim="eager", checks=3)
    engine.submit("0", prompt, 20, prompt_logprobs=0)
    found = None
    while engine.llm.llm_engine.has_unfinished_requests():
        for result in engine.llm.llm_engine.step():
            found = result.prompt_logprobs or found
    expected = engine.reference.logits(prompt, None).log_softmax(-1)
    assert found is not None
    for position, token in enumerate(prompt[1:]):
        error = found[position + 1][token].logprob - float(expected[position, token])
        assert abs(error) <= 1e-5
    assert engine.scheduler.vtoken.counters.evicted > 200


def test_requests_that_sit_out_steps_come_back_with_their_layout(engine: Engine) -> None:
    """Paused as for a weight update: the batch empties, plans still reach the worker, and each
    request is added again from its own block list."""
    from vllm.v1.core.sched.interface import PauseState

    prompts = {str(i): random_prompt(70 + 40 * i, seed=100 + i) for i in range(3)}
    engine.configure(policy="random", budget=40, reclaim="eager", checks=3)
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    with recorder.watching():
        for name, prompt in prompts.items():
            engine.submit(name, prompt, 60)
        for pause_at in (3, 5, 20):  # inside the prompts, behind them, in steady state
            for _ in range(pause_at):
                engine.step(outputs)
            engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            # A paused engine only steps to tell its workers of a finished request.
            engine.submit("gone", [3], 1)
            engine.llm.llm_engine.abort_request(["gone"])
            for _ in range(3):
                engine.step(outputs)
            assert engine.runner.input_batch.num_reqs == 0
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    check_exact(engine, recorder, {n: p + outputs[n] for n, p in prompts.items()})


def test_a_request_scheduled_and_preempted_in_one_step_takes_its_plan_along(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With priorities the victim may stand before the request that needs its blocks: it has been
    planned for and scheduled in this very step, and neither may reach the worker."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    from vtoken.vllm.metadata import metadata_of

    scheduler = engine.scheduler
    monkeypatch.setattr(scheduler, "policy", SchedulingPolicy.PRIORITY)
    for queue in ("waiting", "kv_holding_waiting"):
        empty = create_request_queue(SchedulingPolicy.PRIORITY)
        monkeypatch.setattr(scheduler, queue, empty)
    engine.configure(policy="random", budget=5, reclaim="eager", checks=3)
    scheduler._policy_class = TwoEachStep
    prompts = {str(i): random_prompt(200 + i, seed=110 + i) for i in range(2)}
    prompts |= {str(i): random_prompt(10, seed=110 + i) for i in range(2, 8)}
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    planned, told = list[str](), set[str]()
    preempt = scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> None:
        if request.request_id in scheduler.vtoken._changes:
            planned.append(request.request_id.split("-")[0])
        preempt(request, *args, **kwargs)

    schedule = scheduler.schedule

    def watch(*args: Any) -> Any:
        output = schedule(*args)
        step = metadata_of(output)
        for change in () if step is None else step.orders.changes:
            told.add(change.req_id.split("-")[0])
            assert change.req_id in scheduler.vtoken.tables, "a dropped plan reaches the worker"
        return output

    monkeypatch.setattr(scheduler, "_preempt_request", note)
    monkeypatch.setattr(scheduler, "schedule", watch)
    with recorder.watching():
        for name, prompt in prompts.items():
            engine.submit(name, prompt, 110, priority=9 if name in "01" else 0)
            for _ in range(6 if name in "01" else 0):
                engine.step(outputs)
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    assert planned
    assert set(planned) <= told <= {"0", "1"}
    check_exact(engine, recorder, {n: p + outputs[n] for n, p in prompts.items()})
