"""H2O, Scissorhands and FastGen against references of some ten lines, over 500 steps of made-up
attention, with evictions by others, late and left-out observations mixed in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from vtoken.policies import Policy, PolicyParams, PolicyView, StepScores, find_policy
from vtoken.policies.fastgen import FastGen
from vtoken.policies.scores import TokenArray, lowest

STEPS = 500
HEADS = 6
PARAMS = PolicyParams(sinks=3, recent_share=0.4, window=20, recovery=0.8)


class Told:
    """What a reference knows: everything that was observed, token by token, in order."""

    def __init__(self) -> None:
        self.seen: list[dict[int, float]] = []
        self.averages: list[float] = []
        self.frequent = self.local = 0

    def add(self, scores: StepScores) -> None:
        weights = zip(scores.token_ids.tolist(), scores.values.tolist(), strict=True)
        self.seen.append(dict(weights))
        self.averages.append(scores.queries * scores.heads / len(scores.token_ids))
        if scores.per_head is not None:
            self.profile(scores.token_ids.tolist(), scores.per_head)

    def total(self, token: int) -> float:
        return sum(seen.get(token, 0.0) for seen in self.seen)

    def profile(self, ids: list[int], per_head: np.ndarray) -> None:
        self.frequent = self.local = 0
        special = {i for i in ids if i < PARAMS.sinks}
        late = set(sorted(ids)[len(ids) - int(0.3 * len(ids)) :])
        for row in per_head.astype(float):
            of = dict(zip(ids, row.tolist(), strict=True))
            heavy = set(sorted(set(ids) - special, key=lambda i: -of[i])[: int(0.3 * len(ids))])
            classes = [special, special | heavy, special | heavy | late, set(ids)]
            enough = [sum(of[i] for i in c) >= PARAMS.recovery * row.sum() for c in classes[:3]]
            chosen = (*enough, True).index(True)
            self.frequent += chosen in (1, 2)
            self.local += chosen == 2


def outside(view: PolicyView, share: float) -> list[int]:
    live = [i for i in range(view.num_tokens) if view.live[i]]
    old = live[: len(live) - int(share * view.kept)]
    may_go = [i for i in live if view.evictable[i]]
    return [i for i in may_go if i in old or may_go.index(i) < view.excess]


def h2o(told: Told, view: PolicyView) -> list[int]:
    order = sorted(outside(view, 0.4), key=lambda i: (told.total(i), i))
    return order[: view.excess]


def scissorhands(told: Told, view: PolicyView) -> list[int]:
    last = list(zip(told.seen, told.averages, strict=True))[-PARAMS.window :]
    low = {i: sum(seen.get(i, 1e9) < mean for seen, mean in last) for i in outside(view, 0.4)}
    return sorted(low, key=lambda i: (-low[i], i))[: view.excess]


def fastgen(told: Told, view: PolicyView) -> list[int]:
    live = [i for i in range(view.num_tokens) if view.live[i]]
    size = int(0.3 * view.kept)
    total = {i: told.total(i) for i in live}
    asking: dict[int, int] = defaultdict(int)
    for i in sorted(live, key=lambda i: (total[i], i))[len(live) - size :]:
        asking[i] += told.frequent
    for i in live[len(live) - size :]:
        asking[i] += told.local
    may_go = [i for i in live if view.evictable[i] and i >= PARAMS.sinks]
    return sorted(may_go, key=lambda i: (asking[i], total[i], i))[: view.excess]


def weights(rng: np.random.Generator, ids: np.ndarray, queries: int, heads: int) -> np.ndarray:
    """Rows that sum to `queries`, some of them flat and some of them peaked; float32."""
    logits = rng.normal(size=(heads, len(ids))) * rng.choice([0.3, 1, 3], size=(heads, 1))
    rows = np.exp(logits + 3 * (ids < 2))
    return (queries * rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("order", ["by id", "as they lie"])
@pytest.mark.parametrize(("slack", "recent"), [(0, 0), (7, 0), (0, 5)])
@pytest.mark.parametrize(
    ("name", "reference"), [("h2o", h2o), ("scissorhands", scissorhands), ("fastgen", fastgen)]
)
def test_victims_are_those_of_the_reference(
    name: str,
    reference: Callable[[Told, PolicyView], list[int]],
    slack: int,
    recent: int,
    order: str,
) -> None:
    rng = np.random.default_rng(slack + recent)
    made: Policy = find_policy(name)(PARAMS, stream=0)
    told, budget, length = Told(), 40, 60
    live = np.zeros(length + STEPS, dtype=np.bool_)
    live[:length] = True
    late: list[StepScores] = []
    calls = 0
    for step in range(STEPS):
        ids = np.flatnonzero(live[:length]).astype(np.int32)
        if order == "as they lie":
            rng.shuffle(ids)
        per_head = weights(rng, ids, 5 if step == 0 else 1, HEADS)
        late.append(
            StepScores(
                ids,
                per_head.sum(axis=0),
                queries=5 if step == 0 else 1,
                heads=HEADS,
                prompt=step == 0,
                per_head=per_head if step == 0 else None,
            )
        )
        if step == 0 or rng.random() < 0.7:  # else a step late, or more
            for scores in late:
                made.observe(scores)
                told.add(scores)
            late.clear()
        if rng.random() < 0.1:
            late.clear()  # never seen
        if rng.random() < 0.1:
            live[rng.choice(np.flatnonzero(live[3 : length - 1]) + 3)] = False
        count = int(live[:length].sum())
        if count + 1 > budget + slack:
            stop = length - 1 - recent
            view = PolicyView(length, live[:length], count, count + 1 - budget, 1, stop)
            victims = made.victims(view)
            assert victims.dtype == np.int32
            assert sorted(victims.tolist()) == sorted(reference(told, view))
            live[victims] = False
            calls += 1
        live[length] = True
        length += 1
    assert calls > (300 if not slack else 40)


def test_the_weights_of_dead_tokens_are_forgotten() -> None:
    sums = TokenArray(np.float64)
    sums.align(np.array([0, 1, 2], dtype=np.int32))[:] = [1, 2, 3]
    assert sums.align(np.array([2, 0, 7], dtype=np.int32)).tolist() == [3, 1, 0]
    assert sums.dense(9).tolist() == [1, 0, 3, 0, 0, 0, 0, 0, 0]
    assert sums.dense(2).tolist() == [1, 0]
    assert sums.align(np.empty(0, dtype=np.int32)).tolist() == []
    many = np.arange(1000, dtype=np.int32)
    assert sums.align(many).sum() == 0


def test_the_lowest_are_found_with_the_older_first_among_equals() -> None:
    scores = np.array([5.0, 1.0, 1.0, 0.0, 1.0, 9.0])
    everyone = np.arange(6)
    assert lowest(scores, everyone, 1).tolist() == [3]
    assert sorted(lowest(scores, everyone, 3).tolist()) == [1, 2, 3]
    assert lowest(scores, np.array([1, 4, 5]), 1).tolist() == [1]
    assert lowest(scores, np.array([4, 5]), 7).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("row", "frequent", "local"),
    [
        ([9, 1, 0, 0, 0, 0, 0, 0, 0, 0], 0, 0),  # the sink is enough
        ([5, 0, 0, 4, 0, 1, 0, 0, 0, 0], 1, 0),
        ([3, 2, 2, 0, 0, 1, 0.5, 0.5, 0.5, 0.5], 1, 1),
        ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0, 0),  # needs them all
    ],
)
def test_a_head_takes_the_first_class_that_retains_enough(
    row: list[float], frequent: int, local: int
) -> None:
    made = FastGen(PolicyParams(sinks=1, recovery=0.9), stream=0)
    per_head = np.array([row], dtype=np.float32)
    ids = np.arange(10, dtype=np.int32)
    made.observe(StepScores(ids, per_head[0], 10, 1, prompt=True, per_head=per_head))
    assert (made.frequent_heads, made.local_heads) == (frequent, local)
