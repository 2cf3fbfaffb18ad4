"""A real engine with a pool of 3 blocks, exactly as much as one request may need.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support.engines import BLOCK, Engine
from support.exactness import Recorder, compare
from vtoken.models import ensure_tiny_llama
from vtoken.vllm.metadata import metadata_of

pytestmark = pytest.mark.engine

LONGEST = 3 * BLOCK
MODES = ("off", "eager")


@pytest.fixture(scope="module", params=["sync", "async"])
def shared(request: pytest.FixtureRequest) -> Engine:
    return Engine(
        ensure_tiny_llama(),
        blocks=4,
        max_model_len=LONGEST,
        asynchronous=request.param == "async",
    )


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Must be left drained and free."""
    yield shared
    assert not shared.scheduler.requests
    assert len(shared.scheduler.vtoken.tables) == 0
    assert shared.free == 3


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()  # type: ignore[no-any-return]


class Watch:
    """What vLLM's scheduler did, step by step.

    Attributes:
        scheduled: tokens per step.
        preempted: per step in which there were any, how many were preempted and how few would
            have done.
        targets: blocks that plans copied into, and of those the ones that somebody else could
            read or hit at that time.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scheduled: list[int] = []
        self.preempted: list[tuple[int, int]] = []
        self.targets: set[int] = set()
        self.visible_targets: set[int] = set()
        self._engine = engine
        self._fewest = 0
        scheduler = engine.scheduler
        schedule, reclaim = scheduler.schedule, scheduler._evict_and_reclaim

        def note_need(request: Any) -> None:
            reclaim(request)  # after that of the last request, vLLM allocates
            self._fewest = self._fewest_preemptions()

        def note_step(*args: Any) -> Any:
            before = list(scheduler.running)
            output = schedule(*args)
            self.scheduled.append(output.total_num_scheduled_tokens)
            gone = len([r for r in before if r not in scheduler.running])
            if gone:
                self.preempted.append((gone, self._fewest))
            self._note_targets(output)
            return output

        monkeypatch.setattr(scheduler, "_evict_and_reclaim", note_need)
        monkeypatch.setattr(scheduler, "schedule", note_step)

    @property
    def idle_twice(self) -> bool:
        """Whether two steps in a row computed nothing. One may: it waits for a last token that is
        in flight, where a step is scheduled before the one before it has ended."""
        return any(a == b == 0 for a, b in itertools.pairwise(self.scheduled))

    def _fewest_preemptions(self) -> int:
        """How many of the running, from the last, have to go so that the others can go on."""
        scheduler = self._engine.scheduler
        held, needs = [], []
        for request in scheduler.running:
            have = scheduler.vtoken_manager.block_count(request.request_id)
            pending = request.num_tokens + request.num_output_placeholders
            positions = scheduler.vtoken.physical_need(request.request_id, pending)
            held.append(have)
            needs.append(max(0, -(-positions // BLOCK) - have))
        count, free = len(held), self._engine.free
        stay = max(k for k in range(count + 1) if sum(needs[:k]) <= free + sum(held[k:]))
        return count - stay

    def _note_targets(self, output: Any) -> None:
        step = metadata_of(output)
        pool = self._engine.scheduler.kv_cache_manager.block_pool.blocks
        for change in () if step is None else step.orders.changes:
            for number in set((change.targets // BLOCK).tolist()):
                self.targets.add(number)
                if pool[number].ref_cnt > 1 or pool[number].block_hash is not None:
                    self.visible_targets.add(number)


@pytest.fixture
def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(engine, monkeypatch)


def blocks(engine: Engine, name: str) -> list[int]:
    return [int(b) for b in engine.scheduler.vtoken.tables[name].blocks]


# S05 --------------------------------------------------------------------------------------------
# Fenced blocks come with plans in flight: a preemption that gives only those must not happen.


@pytest.mark.every_runner
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [20, 60])
def test_s05_only_as_many_are_preempted_as_have_to_be(
    engine: Engine, watch: Watch, mode: str, budget: int
) -> None:
    """S05: given three requests that fill the pool; when an allocation fails; then as few are
    preempted as can be, every step computes tokens, all end within the tokens that a run one
    after the other would take, and every output is exact."""
    engine.configure(policy="random", budget=budget, reclaim=mode, checks=3)
    served = engine.serve([prompt(28 + n, seed=n) for n in range(3)], 40)
    assert [len(output) for output in served.outputs] == [40] * 3
    assert all(gone == fewest for gone, fewest in watch.preempted)
    assert bool(watch.preempted) == ((mode, budget) != ("eager", 20))
    assert not watch.idle_twice
    assert len(watch.scheduled) <= 3 * 42
    assert engine.compare(served).max_error <= 1e-5


# S08 --------------------------------------------------------------------------------------------


def cached_blocks(engine: Engine) -> list[int]:
    pool = engine.scheduler.kv_cache_manager.block_pool
    return [block.block_id for block in pool.blocks if block.block_hash is not None]


def cache_one_block(engine: Engine, token_ids: list[int]) -> int:
    """Serve a prompt that begins with this block; the number of the block, free and cached now."""
    engine.configure(policy="random", budget=36, reclaim="eager", checks=3)
    engine.submit("z", [*token_ids, 5], 1)
    engine.drain()
    (number,) = cached_blocks(engine)
    assert engine.free == 3
    return number


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_s08_a_block_that_one_request_hits_is_not_given_to_another(
    engine: Engine, watch: Watch, order: str
) -> None:
    """S08: given three free blocks, X among them cached; when A, which hits X, and B, which needs
    a block, are admitted in one step, in either order; then A has X and B has not, no plan copies
    into a block that others can see, and both outputs are exact."""
    begin = prompt(BLOCK, seed=1)
    tokens = {"A": begin + prompt(8, seed=2), "B": prompt(20, seed=3)}
    cached = cache_one_block(engine, begin)
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    with recorder.watching():
        names = {n: engine.submit(n, tokens[n], 30 if n == "A" else 10) for n in order}
        engine.step(outputs)
        assert cached in blocks(engine, names["A"])
        assert cached not in blocks(engine, names["B"])
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    assert not watch.preempted
    assert watch.targets
    assert not watch.visible_targets
    for life in recorder.lives:
        name = life.req_id.split("-")[0]
        assert compare(engine.reference, life, tokens[name] + outputs[name]).max_error <= 1e-5


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_s08_a_request_that_needs_all_three_blocks_waits_or_takes_the_hit_away(
    engine: Engine, order: str
) -> None:
    """S08: given the same; when B needs all three blocks; then behind A it waits until A has left
    X, and before A it takes X, and A is looked up again and computed anew."""
    begin = prompt(BLOCK, seed=1)
    tokens = {"A": begin + prompt(8, seed=2), "B": prompt(80, seed=3)}
    cached = cache_one_block(engine, begin)
    recorder, outputs = Recorder(engine.llm), dict[str, list[int]]()
    with recorder.watching():
        names = {n: engine.submit(n, tokens[n], 8) for n in order}
        engine.step(outputs)
        first = order[0]
        assert set(engine.scheduler.vtoken.tables) == {names[first]}
        assert cached in blocks(engine, names[first])
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step(outputs)
    for life in recorder.lives:
        name = life.req_id.split("-")[0]
        assert compare(engine.reference, life, tokens[name] + outputs[name]).max_error <= 1e-5


# S23 --------------------------------------------------------------------------------------------
# What is refused at start: test_told.py. A headroom for evacuations will be charged to the same
# pool: then a lone request must be able to take it, or the start has to be refused.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, BLOCK, 2 * BLOCK + 1, LONGEST - 1])
def test_s23_a_request_as_large_as_the_pool_comes_to_its_end(
    engine: Engine, watch: Watch, mode: str, length: int
) -> None:
    """S23: given a pool of exactly one full context, and a budget below it; when requests run to
    the end of the context, alone and behind each other; then each does, within a step per token
    and a few to start and end it, and nobody waits or is preempted for ever."""
    engine.configure(policy="streaming-llm", budget=40, reclaim=mode, checks=3)
    for count in (1, 3):
        watch.scheduled.clear()
        room = LONGEST - length
        served = engine.serve([prompt(length, seed=n) for n in range(count)], room)
        assert [len(output) for output in served.outputs] == [room] * count
        assert len(watch.scheduled) <= count * (room + 3)
        assert engine.compare(served).max_error <= 1e-5
