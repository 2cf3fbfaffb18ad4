"""The checker beside the scheduler: every structural change and every step, before the worker
hears of it.

Level 1: counters and touched entries: L5's equation from its own block count, I2 and L7 of new
slots, I4 of each plan's touched blocks.
Level 2: also I2 of every request whose layout changed, I4 by the spec's predicate, and a full
scan (I2, L5) every `SCAN_PERIOD` steps.
Level 3: everything every step by the spec's predicates, and the spec's model in lock step.

The block counts are kept independently of the tables and of vLLM's pool, so agreement of the
three is evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import vtoken_spec as spec
from vtoken.checks import fast
from vtoken.checks.judge import LawCounts, judge, screened
from vtoken.checks.shadow import Shadow
from vtoken.core.arrays import IntArray
from vtoken.core.background import Background
from vtoken.core.flight import Flight
from vtoken.core.layout import LayoutChange, StepLayout
from vtoken.core.planner import DensePlan
from vtoken.core.request_table import RequestTable
from vtoken.errors import InvariantViolation

SCAN_PERIOD = 16


class OnlineChecker:
    """Implements `vtoken.core.reclaimer.Observer`.

    Args:
        level: 0 to 3; at 0 nothing is called.
        scan_period: steps between two full scans at level 2.
    """

    def __init__(self, *, level: int, scan_period: int = SCAN_PERIOD) -> None:
        self.level = level
        self._scan_period = scan_period
        self._view: spec.StateView
        self._shadow: Shadow | None = None
        self._counts = LawCounts()
        self._references: dict[int, int] = {}
        self._touched: dict[str, RequestTable] = {}
        self._step = 0
        self._background: Background | None = None
        self._overdue: dict[str, int] = {}
        self._crowd = 0
        self._begun: dict[str, int] = {}  # step in which the plan in flight was prepared
        self._scheduled: dict[str, RequestTable] = {}
        self._returned: set[str] = set()

    def bind(self, view: spec.StateView, *, background: Background | None = None) -> None:
        """Set the view that the laws read, and whose progress L10 awaits; before any event."""
        self._view = view
        self._background = background
        if self.level >= 3:
            self._shadow = Shadow(view.pool)

    @property
    def shadow(self) -> Shadow | None:
        """The spec's model in lock step, at level 3."""
        return self._shadow

    def counts(self) -> dict[str, int]:
        """Evaluations per law since start."""
        return self._counts.as_dict()

    @property
    def _scans(self) -> bool:
        return self.level >= 3 or (self.level == 2 and self._step % self._scan_period == 0)

    def watches_reads(self, req_id: str) -> bool:
        """Whether the worker shall compare this request's accesses in this step (L6, L7)."""
        return self.level >= 2 and (self._scans or req_id in self._touched)

    # ------------------------------------------------------------------ events

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None:
        self._touch(table)
        if self._shadow is not None:
            self._shadow.evicted(table, token_ids)

    def planned(self, table: RequestTable, plan: DensePlan) -> None:
        """I4, before anything of the plan is applied."""
        self._counts.add("I4")
        if plan.version != table.version:
            raise InvariantViolation(
                law="I4",
                message="a plan of another table version would be applied",
                req_id=table.req_id,
                before=plan.version,
                after=table.version,
            )
        if len(plan.token_ids) == 0:
            return
        if self.level >= 2:
            judge(spec.i4_planning(self._view, _spec_plan(table, plan), version=table.version))
            return
        pool = self._view.pool
        size = pool.block_size
        for block in np.unique(table.slots_at(plan.targets) // size).tolist():
            if block == spec.NULL_BLOCK or pool.ref_count(block) > 1 or pool.is_cached(block):
                judge(spec.i4_planning(self._view, _spec_plan(table, plan), version=plan.version))

    def reclaimed(self, table: RequestTable, change: LayoutChange) -> None:
        self._touch(table)
        if change.dropped:
            self._returned.add(table.req_id)
        for block in change.dropped:
            self._unreference(table.req_id, block)
        if self._shadow is not None:
            self._shadow.reclaimed(table, change)

    def writing(self, table: RequestTable, slots: IntArray, new_blocks: Sequence[int]) -> None:
        """L7, before the table knows the step's tokens.

        vLLM caches a block when it is allotted, so another request may hit it within the same
        step, before this one is registered; it reads what is written now. Such a block is not
        shared at the moment that L7 speaks of, which is why the checker's own count decides.
        """
        self._counts.add("L7", len(slots))
        pool = self._view.pool
        size = pool.block_size
        for block in new_blocks:
            if block in self._references or block == spec.NULL_BLOCK or pool.ref_count(block) < 1:
                self._bad_write(table, block * size, "a block that is not the request's alone")
        single = int(slots[0]) if len(slots) == 1 else -1
        place = table.position_of_slot(single) if single >= 0 else -1
        for block in (single // size,) if single >= 0 else np.unique(slots // size).tolist():
            owned = place >= 0 or table.position_of_slot(block * size) >= 0
            if not owned and block not in new_blocks:
                self._bad_write(table, block * size, "a block that the request does not own")
            cached = pool.is_cached(block)
            shared = pool.ref_count(block) > 1 and not cached
            if shared or self._references.get(block, 1) > 1:
                self._bad_write(table, block * size, "a shared block")
            if cached and table.evicted:  # then it was not cached by this step's allotment
                self._bad_write(table, block * size, "a block that the prefix cache can hit")
        for slot in slots.tolist() if single >= 0 or self.level >= 2 else ():
            position = place if single >= 0 else table.position_of_slot(slot)
            owner = table.owner_at(position) if position >= 0 else -1
            if owner >= 0 and table.live[owner]:
                self._bad_write(table, slot, f"live token {owner}")

    def _bad_write(self, table: RequestTable, slot: int, what: str) -> None:
        raise InvariantViolation(
            law="L7",
            message=f"a new token would be written onto {what}",
            req_id=table.req_id,
            token_id=table.logical_len,
            slot=slot,
        )

    def appended(
        self,
        table: RequestTable,
        layout: StepLayout,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None:
        for block in new_blocks:
            self._references[block] = self._references.get(block, 0) + 1
        self._scheduled[table.req_id] = table
        if new_blocks or recycled:
            self._touch(table)
        self._check_counters(table)
        if self._shadow is not None:
            self._shadow.appended(table, layout, new_blocks, adopted, recycled=recycled)

    def dropped(self, table: RequestTable, *, preempted: bool) -> None:
        for block in table.blocks.tolist():
            self._unreference(table.req_id, block)
        self._touched.pop(table.req_id, None)
        self._overdue.pop(table.req_id, None)
        self._scheduled.pop(table.req_id, None)
        if self._shadow is not None:
            self._shadow.dropped(table, preempted=preempted)

    # ------------------------------------------------------------------ plans in flight

    def reserved(self, blocks: Sequence[int]) -> None:
        if self._shadow is not None:
            self._shadow.reserved(blocks)

    def unreserved(self, blocks: Sequence[int]) -> None:
        if self._shadow is not None:
            self._shadow.unreserved(blocks)

    def prepared(self, table: RequestTable, flight: Flight) -> None:
        """I4, before anything of the plan is done."""
        self._counts.add("I4")
        version = table.version
        judge(spec.i4_planning(self._view, flight.plan, version=version, in_flight=True))
        self._begun[table.req_id] = self._step
        if self._shadow is not None:
            self._shadow.prepared(flight)

    def landing(self, table: RequestTable, flight: Flight) -> None:
        """I4 again, before the table switches."""
        self._counts.add("I4")
        judge(spec.i4_commit(self._view, flight, version=table.version))

    def committed(self, table: RequestTable, flight: Flight, change: LayoutChange) -> None:
        self._touch(table)
        self._returned.add(table.req_id)
        self._begun.pop(table.req_id, None)
        for block in flight.moves.drawn:
            self._references[block] = self._references.get(block, 0) + 1
        for block in change.dropped:
            self._unreference(table.req_id, block)
        if self._shadow is not None:
            self._shadow.committed(flight)

    def aborted(self, flight: Flight) -> None:
        self._begun.pop(flight.req_id, None)
        if self._shadow is not None:
            self._shadow.aborted(flight)

    # ------------------------------------------------------------------ steps

    def end_step(self) -> None:
        """L5's equation, and whatever the level asks for."""
        if self.level == 0:
            return
        self._counts.add("L5")
        pool = self._view.pool
        free, owned = len_free(pool), len(self._references)
        other = len(pool.headroom) + len(pool.held)
        if free + owned + other != pool.num_blocks - 1:
            judge(spec.l5_accounting(self._view))
            raise InvariantViolation(
                law="L5",
                message=f"free {free} + owned {owned} + headroom and held {other} is not the "
                f"{pool.num_blocks - 1} blocks besides the null block",
            )
        if self.level >= 3:
            self._check_all()
        elif self._scans:
            self._scan()
        elif self.level == 2:
            for table in self._touched.values():
                self._scan_request(table)
        if self._shadow is not None:
            self._shadow.compare(self._view)
        if self.level >= 3 and self._background is not None:
            self._check_progress(self._background)
        self._touched.clear()
        self._scheduled.clear()
        self._returned.clear()
        self._step += 1

    def _check_progress(self, background: Background) -> None:
        """L10, for the requests of this step: they had their turn before it. What is fragmented is
        read off the table, not asked of whoever decides about plans."""
        params, requests = background.params, len(self._view.requests)
        # Turns are given among as many as there were when somebody began to wait.
        self._crowd = max(requests, self._crowd if self._overdue else 0)
        for req_id, table in self._scheduled.items():
            holes = table.physical_len - int(np.count_nonzero(table.live))
            enough = background.pressure or holes >= params.threshold * table.physical_len
            begun = self._begun.get(req_id)
            in_time = begun is not None and self._step < begun + params.commit_delay
            waits = enough and not in_time
            came_back = req_id in self._returned
            if waits and not came_back and spec.reclaimable_blocks(self._view, table) > 0:
                self._overdue[req_id] = self._overdue.get(req_id, 0) + 1
            else:
                self._overdue.pop(req_id, None)
        bound = self._crowd + params.commit_delay + 2
        self._counts.add("L10", len(self._scheduled))
        judge(spec.l10_progress(self._view, self._overdue, bound=bound))

    def _check_all(self) -> None:
        """Level 3: the spec's predicates themselves."""
        view = self._view
        self._counts.add("I2", len(view.requests))
        judge(spec.i2_unique_mapping(view))
        judge(spec.l5_accounting(view))
        if view.flights:
            self._counts.add("L11")
            judge(spec.l11_fence(view))

    def _scan(self) -> None:
        """Level 2, now and then: the fast forms over everything."""
        pool, requests = self._view.pool, self._view.requests
        for request in requests.values():
            self._scan_request(request)
        screened(
            law="I2",
            holds=fast.i2_across(pool, requests),
            breaches=spec.i2_unique_mapping(self._view),
            what="slots across requests",
        )
        screened(
            law="L5",
            holds=fast.l5_pool(pool, requests),
            breaches=spec.l5_accounting(self._view),
            what="pool",
        )

    def _scan_request(self, request: spec.RequestView) -> None:
        self._counts.add("I2")
        screened(
            law="I2",
            holds=fast.i2_request(self._view.pool, request),
            breaches=spec.i2_unique_mapping(self._view),
            what=f"request {request.req_id}",
        )

    def _check_counters(self, table: RequestTable) -> None:
        """Level 1's I2: counts agree, and the newest token is where the table says."""
        self._counts.add("I2")
        newest = table.logical_len - 1
        position = int(table.positions[newest])
        if self.level >= 2 and position != table.position_of_slot(table.slot_of(newest)):
            position = -1
        size = table.block_size
        spare = table.num_blocks * size - table.physical_len
        if (
            not table.live[newest]
            or table.owner_at(position) != newest
            or not 0 <= spare < 2 * size
            or not 0 < table.num_live <= table.physical_len
        ):
            judge(spec.i2_unique_mapping(self._view))
            raise InvariantViolation(
                law="I2",
                message=f"counters disagree: {table.num_live} live tokens, physical length "
                f"{table.physical_len}, {table.num_blocks} blocks of {size}",
                req_id=table.req_id,
                token_id=newest,
                slot=table.slot_of(newest),
            )

    # ------------------------------------------------------------------ inside

    def _touch(self, table: RequestTable) -> None:
        self._touched[table.req_id] = table

    def _unreference(self, req_id: str, block: int) -> None:
        left = self._references.get(block, 0) - 1
        if left < 0:
            raise InvariantViolation(
                law="L5",
                message=f"block {block} is returned more often than it was owned",
                req_id=req_id,
            )
        if left:
            self._references[block] = left
        else:
            del self._references[block]


def len_free(pool: spec.PoolView) -> int:
    """Free blocks, from the pool's own counter where it has one."""
    counted: int | None = getattr(pool, "num_free", None)
    return len(pool.free) if counted is None else counted


def _spec_plan(table: RequestTable, plan: DensePlan) -> spec.Plan:
    sources = table.slots_at(table.positions[plan.token_ids]).tolist()
    targets = table.slots_at(plan.targets).tolist()
    moves = zip(plan.token_ids.tolist(), sources, targets, strict=True)
    blocks = table.blocks
    dropped = np.setdiff1d(np.arange(len(blocks)), plan.keep)
    return spec.Plan(
        req_id=table.req_id,
        version=plan.version,
        blocks=tuple(blocks.tolist()),
        moves=tuple(spec.Move(*move) for move in moves),
        released=tuple(blocks[dropped].tolist()),
        purpose="dense",
        order=tuple(blocks[plan.keep].tolist()),
    )
