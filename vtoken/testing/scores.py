"""Attention weights for the engine without a model, and whether each comes to the token it is of.

What a token is given depends on its bytes alone, so a weight says whose it is: the worker makes it
from what it reads in the slots that attention reads, the real `ScoreLedger` puts it onto an id, and
here that id has to be the token with those bytes, in the very step that was looked at, however its
slots have changed since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.core import RequestTable
from vtoken.policies import ScoreNeed, StepScores
from vtoken.policies.ledger import ScoreLedger, Tables
from vtoken.policies.taps import RowScores, RowTap, ScoreOptions, TappedStep, Taps
from vtoken.testing.faults import must

Floats = npt.NDArray[np.float32]
HEADS = 2
_SPREAD = np.array([[40503], [30011]], dtype=np.int64)


def weights_of(numbers: Sequence[int]) -> Floats:
    """By head, `[HEADS, n]`, in (0, 1]: another pair for each payload number below 2 ** 16."""
    found = np.array(numbers, dtype=np.int64) * _SPREAD % (1 << 16) + 1
    return (found / (1 << 16)).astype(np.float32)


@dataclass
class Coming:
    """What the worker reads for one step's taps; whole when all its rows have been attended to."""

    taps: Taps
    rows: dict[str, RowScores]

    @property
    def whole(self) -> bool:
        return len(self.rows) == len(self.taps.rows)

    def read(self, req_id: str, numbers: Sequence[int]) -> None:
        """A row's payloads, in attention order."""
        tap: RowTap | None = self.taps.rows.get(req_id)
        if tap is not None:
            heads = weights_of(numbers)
            self.rows[req_id] = RowScores(heads.sum(0), HEADS, heads if tap.per_head else None)


@dataclass(frozen=True)
class Due:
    """What has to come of one row of a step; `weights` are those of `ids`, by head."""

    life: int
    ids: npt.NDArray[np.intp]
    weights: Floats
    queries: int
    prompt: bool


class ScoreWatch:
    """The ledger of an engine, and what it has to say.

    Attributes:
        listener: called with each request's weights as they come, as a policy would be.
        arrived: rows whose weights came.
    """

    def __init__(self) -> None:
        self.ledger = ScoreLedger()
        self.listener: Callable[[str, StepScores], None] | None = None
        self.arrived = 0
        self._step: dict[str, Due] = {}
        self._due: deque[dict[str, Due]] = deque()

    @staticmethod
    def options_of(prompt_len: int) -> ScoreOptions:
        """How a request is looked at: by its length, so that a script has it again."""
        mode = "sampled" if prompt_len % 2 else "exact"
        return ScoreOptions(mode, 1, 1 + prompt_len % 3, 1 + prompt_len % 5)

    def row(
        self,
        table: RequestTable,
        *,
        prompt_len: int,
        count: int,
        ids: npt.NDArray[np.intp],
        numbers: Sequence[int],
    ) -> None:
        """A request is scheduled: `count` new tokens; its live ids, and their payloads' numbers."""
        options, prompt = self.options_of(prompt_len), count > 1
        need = ScoreNeed.HEADS
        self.ledger.row(table, need, count=count, prompt=prompt, settings=options)
        every = options.score_every if options.score_mode == "sampled" else 1
        if prompt or table.logical_len % every == 0:
            queries = min(count, options.score_window)
            self._step[table.req_id] = Due(table.life, ids, weights_of(numbers), queries, prompt)

    def end_step(self) -> Taps | None:
        taps = self.ledger.end_step()
        wanted = set() if taps is None else set(taps.rows)
        must(wanted == set(self._step), f"{sorted(wanted)} are looked at, not {list(self._step)}")
        if taps is not None:
            self._due.append(self._step)
            self._step = {}
        return taps

    def hear(self, steps: Iterable[TappedStep], tables: Tables) -> None:
        """Values come from the worker.

        Raises:
            ByteFault: one is another token's, or is missing, or comes when its request is gone.
        """
        for step in steps:
            due = self._due.popleft()
            for req_id, scores in self.ledger.arrived(step, tables):
                _check(req_id, scores, due.pop(req_id, None), tables.get(req_id))
                self.arrived += 1
                if self.listener is not None:
                    self.listener(req_id, scores)
            for req_id, row in due.items():
                table = tables.get(req_id)
                gone = table is None or table.life != row.life
                must(gone, f"{req_id}: the weights of a step are missing")


def _check(req_id: str, scores: StepScores, due: Due | None, table: RequestTable | None) -> None:
    if due is None or table is None or table.life != due.life:
        must(False, f"{req_id}: weights for a request that is gone, or that nobody asked for")
        return
    order = np.argsort(scores.token_ids)
    must(
        np.array_equal(scores.token_ids[order], due.ids),
        f"{req_id}: weights of other tokens than attention saw in the step",
    )
    right = np.array_equal(scores.values[order], due.weights.sum(0))
    if due.prompt:
        right = right and scores.per_head is not None
        right = right and np.array_equal(scores.per_head[:, order], due.weights)
    must(right, f"{req_id}: a token was given the weight of another")
    looked = (scores.queries, scores.prompt, scores.heads)
    must(looked == (due.queries, due.prompt, HEADS), f"{req_id}: {looked} is not how it was asked")
