"""Who is told of the reclaimer's events: online checks, the trace recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vtoken.core.arrays import IntArray
from vtoken.core.flight import Flight
from vtoken.core.layout import LayoutChange, StepLayout
from vtoken.core.planner import DensePlan
from vtoken.core.request_table import RequestTable


class Observer(Protocol):
    """Online checks: told before and after each change, so a broken law stops it."""

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None: ...

    def planned(self, table: RequestTable, plan: DensePlan) -> None: ...

    def reclaimed(self, table: RequestTable, change: LayoutChange) -> None: ...

    def writing(self, table: RequestTable, slots: IntArray, new_blocks: Sequence[int]) -> None: ...

    def appended(
        self,
        table: RequestTable,
        layout: StepLayout,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None: ...

    def reserved(self, blocks: Sequence[int]) -> None: ...

    def unreserved(self, blocks: Sequence[int]) -> None: ...

    def prepared(self, table: RequestTable, flight: Flight) -> None: ...

    def landing(self, table: RequestTable, flight: Flight) -> None: ...

    def committed(self, table: RequestTable, flight: Flight, change: LayoutChange) -> None: ...

    def aborted(self, flight: Flight) -> None: ...

    def dropped(self, table: RequestTable, *, preempted: bool) -> None: ...


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
        layout: StepLayout,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None:
        for observer in self._observers:
            observer.appended(table, layout, new_blocks, adopted, recycled=recycled)

    def reserved(self, blocks: Sequence[int]) -> None:
        for observer in self._observers:
            observer.reserved(blocks)

    def unreserved(self, blocks: Sequence[int]) -> None:
        for observer in self._observers:
            observer.unreserved(blocks)

    def prepared(self, table: RequestTable, flight: Flight) -> None:
        for observer in self._observers:
            observer.prepared(table, flight)

    def landing(self, table: RequestTable, flight: Flight) -> None:
        for observer in self._observers:
            observer.landing(table, flight)

    def committed(self, table: RequestTable, flight: Flight, change: LayoutChange) -> None:
        for observer in self._observers:
            observer.committed(table, flight, change)

    def aborted(self, flight: Flight) -> None:
        for observer in self._observers:
            observer.aborted(flight)

    def dropped(self, table: RequestTable, *, preempted: bool) -> None:
        for observer in self._observers:
            observer.dropped(table, preempted=preempted)
