"""Real policies for the walk: drawn for each request, with its own options, and shown the weights
that the engine's ledger puts onto ids."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from vtoken.core import RequestTable
from vtoken.policies import Policy, PolicyParams, StepScores
from vtoken.policies.fastgen import FastGen
from vtoken.policies.judging import Unfit, judged, view_to_ask
from vtoken.policies.registry import BUILT_IN
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.testing.faults import must
from vtoken.testing.harness import FakeEngine, FakeRequest


@dataclass(frozen=True)
class Drawn:
    """One request's policy, and its options as a server or a request would set them.

    Attributes:
        sinks: first tokens that the policy itself keeps.
    """

    policy: Policy
    sinks: int
    life: int
    budget: int
    slack: int
    keep_first: int
    keep_recent: int
    keep_prompt: bool

    @classmethod
    def by(cls, rng: random.Random, *, life: int, stream: int) -> Drawn:
        params = PolicyParams(
            sinks=rng.randint(0, 3),
            seed=rng.randint(0, 99),
            recent_share=rng.choice([0.0, 0.3, 0.5, 0.9]),
            window=rng.choice([1, 5, 32]),
            recovery=rng.choice([0.3, 0.6, 0.95, 1.0]),
        )
        policy = rng.choice(BUILT_IN)
        first, recent = rng.choice([0, 0, 1, 4]), rng.choice([0, 0, 1, 4])
        least = max(policy.min_budget(params), first + 1) + recent
        return cls(
            policy(params, stream=stream),
            params.sinks if policy in (StreamingLLM, FastGen) else 0,
            life,
            rng.randint(least, least + 24),
            rng.choice([0, 0, 1, 7]),
            first,
            recent,
            rng.random() < 0.15,
        )


class Choosers:
    """The policies of one engine's requests; a preempted request gets another one.

    Attributes:
        asked: how often a policy was.
    """

    def __init__(self, engine: FakeEngine, rng: random.Random) -> None:
        self.asked = 0
        self._engine, self._rng = engine, rng
        self._drawn: dict[str, Drawn] = {}
        engine.scores.listener = self._hear

    def victims(self, request: FakeRequest) -> list[int]:
        """What the request's policy evicts before the next step.

        Raises:
            ByteFault: its answer cannot be carried out, or is not what its options say.
        """
        table = self._engine.reclaimer.tables.get(request.req_id)
        if table is None:
            return []
        mine = self._of(request.req_id)
        view = view_to_ask(
            table.live,
            table.num_live,
            budget=mine.budget,
            protection=mine,
            num_prompt=request.prompt_len,
        )
        who = f"{request.req_id}, {mine.policy.name}"
        chosen: list[int] = []
        if view is not None:
            self.asked += 1
            try:
                chosen = judged(mine.policy.victims(view), view).tolist()
            except Unfit as unfit:
                must(False, f"{who}: {unfit}")
        may_go = self._may_go(mine, table, request)
        foreign = sorted(set(chosen) - set(may_go))
        must(not foreign, f"{who}: {foreign} are protected or dead")
        over = table.num_live + 1 - mine.budget
        due = min(over, len(may_go)) if over > mine.slack else 0
        must(len(chosen) == due, f"{who}: {len(chosen)} are evicted, not {due}")
        return chosen

    @staticmethod
    def _may_go(mine: Drawn, table: RequestTable, request: FakeRequest) -> list[int]:
        """As the options' descriptions have it."""
        first = max(mine.keep_first, mine.sinks, request.prompt_len if mine.keep_prompt else 0)
        last = table.logical_len - 1 - mine.keep_recent
        return [token for token in np.flatnonzero(table.live).tolist() if first <= token < last]

    def policy_of(self, req_id: str) -> Policy:
        """That of a running request."""
        return self._of(req_id).policy

    def _hear(self, req_id: str, scores: StepScores) -> None:
        self._of(req_id).policy.observe(scores)

    def _of(self, req_id: str) -> Drawn:
        life = self._engine.table(req_id).life
        found = self._drawn.get(req_id)
        if found is None or found.life != life:
            found = Drawn.by(self._rng, life=life, stream=len(self._drawn))
            self._drawn[req_id] = found
        return found
