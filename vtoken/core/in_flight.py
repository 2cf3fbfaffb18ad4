"""The `background` mode of the reclaimer: the life of a plan, and the headroom.

A plan is prepared in one step and committed in a later one, or aborted; `background.py` decides
when. Here its consequences are carried out: on the table, the pool and the worker's orders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from vtoken.core.arrays import IntArray
from vtoken.core.background import Background, BackgroundParams
from vtoken.core.flight import Flight
from vtoken.core.layout import CopyOrder, LayoutChange
from vtoken.core.observer import Observer
from vtoken.core.ports import PoolPort, ReclaimCounters
from vtoken.core.request_table import RequestTable
from vtoken.core.table import TokenTable


class PlansInFlight(ABC):
    """What a `Reclaimer` does about plans in flight.

    Args:
        block_size: tokens per block.
        pool: the block allocator.
        observer: online checks, or None.
        params: of the mode, or None in the other modes, in which no plan is ever in flight.

    Raises:
        Rejected: a parameter cannot work.
    """

    def __init__(
        self,
        *,
        block_size: int,
        pool: PoolPort,
        observer: Observer | None,
        params: BackgroundParams | None,
    ) -> None:
        self.background = None if params is None else Background(params, block_size=block_size)
        self.tables = TokenTable(block_size)
        self.counters = ReclaimCounters()
        self.observer = observer
        self._pool = pool
        self._changes: dict[str, tuple[RequestTable, LayoutChange]] = {}
        self._launches: list[CopyOrder] = []
        self._waits: list[int] = []
        # Position of the hole that a request's next token takes; valid for this step only.
        self._holes: dict[str, int] = {}

    @property
    def flights(self) -> Sequence[Flight]:
        """Plans in flight, as the laws see them."""
        return () if self.background is None else list(self.background.flights.values())

    def begin_step(self) -> None:
        """Set headroom aside, or give it back where an allocation failed for want of a block."""
        if self.background is None:
            return
        wanted, spare = self.background.begin_step(), self.background.headroom
        if not len(self.tables):  # nobody could draw it, and a pool in use cannot be reset
            wanted = -len(spare)
        if wanted > 0 and (blocks := self._pool.reserve(wanted)):
            spare += blocks
            if self.observer is not None:
                self.observer.reserved(blocks)
        elif wanted < 0:
            self._unreserve(spare[wanted:])
            del spare[wanted:]

    def yield_headroom(self) -> None:
        """Give back what is set aside and in no plan: an allocation is about to fail for want of a
        block, and somebody would be preempted for it."""
        if self.background is not None and self.background.headroom:
            self._unreserve(self.background.headroom)
            self.background.headroom = []

    def _unreserve(self, blocks: Sequence[int]) -> None:
        self._pool.unreserve(blocks)
        if self.observer is not None and blocks:
            self.observer.unreserved(blocks)

    def _reclaim_beside(self, table: RequestTable, flying: Background, *, recycle: bool) -> None:
        """The background mode: while a plan is in flight, tokens are appended and evicted and
        nothing else happens to the table."""
        flight = flying.flights.get(table.req_id)
        if flight is not None:
            if flying.is_due(flight):
                self._land(table, flight)
            return
        if table.num_holes == 0:
            return
        self._release_only(table)
        # The worker is told of one structural change of a request in a step.
        busy = flying.params.commit_delay == 0 and table.req_id in self._changes
        if flying.is_eligible(table):
            if busy:
                return  # planned for in the next step: a token in a hole might have to move then
            private = self._pool.private(table.blocks)
            plan = flying.plan(table, private)
            if plan is not None:
                self._pool.uncache(np.array(plan.written, dtype=np.int32))
                flight = flying.flight_of(table, plan)
                if self.observer is not None:
                    self.observer.prepared(table, flight)
                flying.launch(flight)
                self._launches.append(flight.copies)
                self.counters.plans += 1
                self.counters.copied += len(plan.token_ids)
                if flying.params.commit_delay == 0:
                    self._land(table, flight)
                return
        if recycle and table.num_holes:
            self._recycle_any_hole(table)

    def abort_flight(self, number: int) -> None:
        """A worker could not copy what the plan moves: the old layout stays. Unknown numbers, of
        plans that have ended since, are ignored."""
        for flight in self.flights:
            if flight.number == number:
                self._abort(flight.req_id)

    def _recycle_any_hole(self, table: RequestTable) -> None:
        hole, size = table.recent_hole(), table.block_size
        if not self._pool.private(table.blocks[hole // size : hole // size + 1])[0]:
            holes = table.hole_positions()
            holes = holes[self._pool.private(table.blocks)[holes // size]]
            if len(holes) == 0:
                return
            hole = int(holes[0])
        self._pool.uncache(table.blocks[hole // size : hole // size + 1])
        self._holes[table.req_id] = hole

    def _land(self, table: RequestTable, flight: Flight) -> None:
        """Commit: switch the table to the plan, give back what it emptied."""
        assert self.background is not None
        if self.observer is not None:
            self.observer.landing(table, flight)
        self.background.land(table.req_id)
        flight.waited = True
        self._waits.append(flight.number)
        plan, size = flight.moves, table.block_size
        # A token evicted since stays where it was, a hole, and goes with its block.
        still = table.live[plan.token_ids]
        ids, sources, targets = plan.token_ids[still], plan.sources[still], plan.targets[still]
        end = table.physical_len + (len(plan.drawn) - len(plan.released)) * size
        table.join(plan.drawn)
        table.move(ids, table.positions_of(targets))
        # What was drawn comes first: the block with the physical end stays last.
        count = table.num_blocks - len(plan.drawn)
        kept = np.flatnonzero(~np.isin(table.blocks[:count], plan.released))
        keep = np.concatenate([np.arange(count, table.num_blocks), kept]).astype(np.int32)
        self._commit(table, ids, sources, targets, keep, end, trimmed=True, flight=flight)
        self.counters.moved += len(ids)

    def _abort(self, req_id: str) -> None:
        """Take the request's plan out of flight for good; its copies are waited for at the start
        of the next step that the worker hears of."""
        flight = None if self.background is None else self.background.land(req_id)
        if flight is None or self.background is None:
            return
        flight.aborted = flight.waited = True
        started = [order for order in self._launches if order.flight != flight.number]
        if len(started) == len(self._launches):
            self._waits.append(flight.number)
        else:
            self.counters.copied -= len(flight.moves.token_ids)
        self._launches = started  # what the worker has not heard of is not copied at all
        self.counters.aborted_plans += 1
        self.background.headroom += flight.moves.drawn
        if self.observer is not None:
            self.observer.aborted(flight)

    # ------------------------------------------------------------------ the reclaimer's own

    @abstractmethod
    def _release_only(self, table: RequestTable) -> None:
        """Give back the blocks without a live token."""

    @abstractmethod
    def _commit(
        self,
        table: RequestTable,
        token_ids: IntArray,
        sources: IntArray,
        targets: IntArray,
        keep: IntArray,
        physical_len: int,
        *,
        trimmed: bool,
        flight: Flight | None = None,
    ) -> None:
        """Switch the layout, give back what is dropped, and tell the worker and the observer."""
