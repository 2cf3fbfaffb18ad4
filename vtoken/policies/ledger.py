"""The scheduler's half of the score tap: which rows are tapped, and whose ids the values belong to.

The worker knows rows and slots, the scheduler knows ids. When a row is tapped, the ledger notes the
ids in the row's attention order as they are in that very step; when the values come back, with
asynchronous scheduling after the next step has been scheduled, relocation and recycling in between
cannot mix them up. Values of a request that has finished or was preempted meanwhile are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vtoken.core.arrays import IntArray
from vtoken.core.request_table import RequestTable
from vtoken.errors import InvariantViolation
from vtoken.policies.scores import ScoreNeed, StepScores
from vtoken.policies.taps import RowTap, ScoreOptions, ScoreSettings, TappedStep, Taps


class Tables(Protocol):
    """Request tables by id."""

    def get(self, req_id: str) -> RequestTable | None: ...


@dataclass(frozen=True)
class TappedRow:
    """What is remembered of a tapped row until its values come.

    Attributes:
        life: of the table.
        token_ids: in attention order, int32 `[k]`.
    """

    life: int
    token_ids: IntArray
    queries: int
    prompt: bool


def ids_in_attention_order(table: RequestTable) -> IntArray:
    """Ids of the live tokens as attention meets them in this step, int32 `[num_live]`: by position
    in the dense view, by id in the gather view."""
    if table.num_holes:
        return np.flatnonzero(table.live).astype(np.int32)
    return table.owners_at(np.arange(table.physical_len, dtype=np.int32))


class ScoreLedger:
    """Taps that are under way, oldest first.

    Attributes:
        dropped: rows whose values came too late.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._number = 0
        self._step: dict[str, TappedRow] = {}
        self._taps: dict[str, RowTap] = {}
        self._open: deque[tuple[int, Mapping[str, TappedRow]]] = deque()
        self.configure(ScoreOptions())

    def configure(self, settings: ScoreSettings) -> None:
        """Take a configuration; what is under way is dropped when it comes."""
        self._settings = settings
        self._open = deque((number, {}) for number, _ in self._open)
        self.dropped = 0

    def row(
        self,
        table: RequestTable,
        need: ScoreNeed,
        *,
        count: int,
        prompt: bool,
        settings: ScoreSettings | None = None,
    ) -> None:
        """A request is scheduled, its step's tokens are in the table.

        Sampled decode steps are chosen by the request's own length, so that they do not depend on
        who else is served; prompt chunks are observed in every step.

        Args:
            count: tokens that are computed in the step.
            prompt: whether these are of its prompt, or of a context that is computed anew.
            settings: the request's own, if it has any.
        """
        if need is ScoreNeed.NONE:
            return
        mine = settings or self._settings
        sampled = mine.score_mode == "sampled"
        if sampled and not prompt and table.logical_len % mine.score_every:
            return
        queries = min(count, mine.score_window)
        by_head = prompt and need is ScoreNeed.HEADS
        stride = mine.score_layers if sampled else 1
        self._taps[table.req_id] = RowTap(queries, by_head, stride)
        ids = ids_in_attention_order(table)
        self._step[table.req_id] = TappedRow(table.life, ids, queries, prompt)

    def end_step(self) -> Taps | None:
        """The step's taps for the workers, or None."""
        if not self._taps:
            return None
        self._number += 1
        taps = Taps(self._number, self._taps)
        self._open.append((self._number, self._step))
        self._taps, self._step = {}, {}
        return taps

    def arrived(self, step: TappedStep, tables: Tables) -> Iterator[tuple[str, StepScores]]:
        """Values put onto ids, for those requests that still have the life they were seen in.

        Raises:
            InvariantViolation: I4, if a step's scores were lost or came twice; L6, if another
                number of tokens was read than the table has.
        """
        number, rows = self._open.popleft() if self._open else (0, {})
        if step.number != number:
            raise InvariantViolation(
                law="I4",
                message="a step's scores were lost or came twice",
                before=number,
                after=step.number,
            )
        for req_id, row in rows.items():
            table = tables.get(req_id)
            if table is None or table.life != row.life:
                self.dropped += 1
                continue
            found = step.rows[req_id]
            if len(found.values) != len(row.token_ids):
                raise InvariantViolation(
                    law="L6",
                    message="the score tap read another number of tokens than are live",
                    req_id=req_id,
                    before=len(row.token_ids),
                    after=len(found.values),
                )
            yield (
                req_id,
                StepScores(
                    token_ids=row.token_ids,
                    values=found.values,
                    queries=row.queries,
                    heads=found.heads,
                    prompt=row.prompt,
                    per_head=found.per_head,
                ),
            )
