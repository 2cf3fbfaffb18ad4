"""Who is told of the reclaimer's events: online checks, the trace recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vtoken.core.arrays import IntArray
from vtoken.core.planner import DensePlan
from vtoken.core.request_table import RequestTable


@dataclass(frozen=True)
class LayoutChange:
    """One request's structural change in one step, as the worker needs it.

    Attributes:
        token_ids, sources, targets: the moves, in slots; int32 `[n]` each.
        blocks: the whole block list after the change and before this step's new blocks.
        dropped: blocks the request gave back.
        trimmed: whether the physical end was also cut back to the last live token.
    """

    req_id: str
    token_ids: IntArray
    sources: IntArray
    targets: IntArray
    blocks: list[int]
    dropped: list[int]
    trimmed: bool

    @property
    def only_released(self) -> bool:
        """Whole blocks went back; nothing moved and the physical end was not cut."""
        return len(self.token_ids) == 0 and len(self.dropped) > 0 and not self.trimmed


class Observer(Protocol):
    """Online checks: told before and after each change, so a broken law stops it."""

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None: ...

    def planned(self, table: RequestTable, plan: DensePlan) -> None: ...

    def reclaimed(self, table: RequestTable, change: LayoutChange) -> None: ...

    def writing(self, table: RequestTable, slots: IntArray, new_blocks: Sequence[int]) -> None: ...

    def appended(
        self,
        table: RequestTable,
        slots: IntArray,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None: ...

    def dropped(self, table: RequestTable) -> None: ...


class Observers:
    """Tells several observers, in order.

    A recorder comes before the checks, so that a trace holds the event that broke a law.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None:
        for observer in self._observers:
            observer.evicted(table, token_ids)

    def planned(self, table: RequestTable, plan: DensePlan) -> None:
        for observer in self._observers:
            observer.planned(table, plan)

    def reclaimed(self, table: RequestTable, change: LayoutChange) -> None:
        for observer in self._observers:
            observer.reclaimed(table, change)

    def writing(self, table: RequestTable, slots: IntArray, new_blocks: Sequence[int]) -> None:
        for observer in self._observers:
            observer.writing(table, slots, new_blocks)

    def appended(
        self,
        table: RequestTable,
        slots: IntArray,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None:
        for observer in self._observers:
            observer.appended(table, slots, new_blocks, adopted, recycled=recycled)

    def dropped(self, table: RequestTable) -> None:
        for observer in self._observers:
            observer.dropped(table)
