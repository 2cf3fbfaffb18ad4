"""The reclamation backend's scheduler half: turns dead tokens into layout changes.

One `Reclaimer` per scheduler. Within a step, in this order:

1. `begin_step` sets headroom aside (`background`);
2. `evict` marks a request's victims dead;
3. `prepare` reclaims: slot recycling, whole-block release and tail fill (`eager`), whole-block
   release alone (`off`), or release, recycling and the plans in flight (`background`). Freed
   blocks are back in the pool before vLLM allocates;
4. vLLM's own scheduler runs and asks `physical_need` how many positions a request needs; where
   that is more than there is, `yield_headroom` comes before any preemption;
5. `schedule` registers the tokens that were really scheduled;
6. `take_orders` hands the worker what changed, `end_step` closes the step.

Every structural change is complete before vLLM allocates a block in the same step, so blocks
that two plans touch are disjoint. The worker executes steps in order and copies at the start
of a step, before any KV write of that step: a block freed here is written by its next owner
only after the copies out of it (L11 for copies in step order). Copies in flight are waited for at
the start of the step that commits or aborts them, so the same holds for the blocks they touch:
whoever gets one in that step, or later, writes it behind the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from vtoken.core.arrays import IntArray
from vtoken.core.background import BackgroundParams
from vtoken.core.flight import Flight
from vtoken.core.in_flight import PlansInFlight
from vtoken.core.layout import NO_FLIGHT, LayoutChange, StepLayout, StepOrders
from vtoken.core.meter import BlockMeter
from vtoken.core.observer import Observer
from vtoken.core.planner import plan_dense, plan_release
from vtoken.core.ports import PoolPort
from vtoken.core.request_table import RequestTable
from vtoken.core.views import ViewNews
from vtoken.errors import InvariantViolation

_NO_SLOTS = np.empty(0, dtype=np.int32)


class ReclaimMode(StrEnum):
    """What happens to dead tokens' memory.

    off: "naive": dead tokens are not seen; a block returns only when all its tokens are dead.
    eager: holes are recycled or closed before the next attention.
    background: holes may stay for several steps; relocation runs beside the steps.
    """

    OFF = "off"
    EAGER = "eager"
    BACKGROUND = "background"


class Reclaimer(PlansInFlight):
    """Token tables plus the three modes of reclamation.

    Args:
        block_size: tokens per block.
        mode: see `ReclaimMode`.
        pool: the block allocator.
        observer: online checks, or None.
        background: parameters of that mode.

    Raises:
        Rejected: a parameter cannot work.
    """

    def __init__(
        self,
        *,
        block_size: int,
        mode: ReclaimMode,
        pool: PoolPort,
        observer: Observer | None = None,
        background: BackgroundParams | None = None,
    ) -> None:
        params = None
        if mode is ReclaimMode.BACKGROUND:
            params = background or BackgroundParams()
        super().__init__(block_size=block_size, pool=pool, observer=observer, params=params)
        self.mode = mode
        self.meter = BlockMeter()
        self.views = ViewNews()

    # ------------------------------------------------------------------ one step

    def evict(self, req_id: str, token_ids: IntArray) -> None:
        """Mark tokens dead from this step on. Raises `Rejected`; nothing changes then."""
        table = self.tables[req_id]
        table.evict(token_ids)
        self.views.evicted(table, token_ids)
        self.counters.evicted += len(token_ids)
        if self.observer is not None and len(token_ids):
            self.observer.evicted(table, token_ids)

    def prepare(self, req_id: str, *, pending: int) -> None:
        """Reclaim what this request's dead tokens hold, before vLLM allocates.

        Args:
            pending: tokens the request still has to compute; with exactly one, it recycles.

        Raises:
            InvariantViolation: the step has a plan of this request already (I4); a second one
                would replace the moves that the worker has not heard of yet.
        """
        table = self.tables[req_id]
        if req_id in self._changes:
            raise InvariantViolation(
                law="I4", message="a request is planned for twice in one step", req_id=req_id
            )
        self._holes.pop(req_id, None)
        if self.background is not None:
            self._reclaim_beside(table, self.background, recycle=pending == 1)
        elif table.num_holes == 0:
            return
        elif self.mode is ReclaimMode.OFF:
            self._release_only(table)
        else:
            self._make_dense(table, recycle=pending == 1)

    def _release_only(self, table: RequestTable) -> None:
        planned = plan_release(table)
        if planned is None:
            return
        keep, physical_len = planned
        self._commit(table, _NO_SLOTS, _NO_SLOTS, _NO_SLOTS, keep, physical_len, trimmed=False)

    def _make_dense(self, table: RequestTable, *, recycle: bool) -> None:
        if recycle and table.num_holes == 1 and self._recycle_only_hole(table):
            return
        private = self._pool.private(table.blocks)
        plan = plan_dense(table, private, recycle=recycle)
        if plan is None:
            return
        if len(plan.written):
            # Unreachable first, written after: never the other way round (L8).
            self._pool.uncache(table.blocks[plan.written])
        if self.observer is not None:
            self.observer.planned(table, plan)
        self.counters.plans += 1
        hole_slot = table.slot_at(plan.hole) if plan.hole >= 0 else -1
        # Nothing moves, leaves or is cut: the steady state, which also keeps the block order.
        steady = (
            len(plan.token_ids) == 0
            and len(plan.keep) == table.num_blocks
            and plan.physical_len == table.physical_len
        )
        if not steady:
            sources = table.slots_at(table.positions[plan.token_ids])
            targets = table.slots_at(plan.targets)
            table.move(plan.token_ids, plan.targets)
            self._commit(
                table,
                plan.token_ids,
                sources,
                targets,
                plan.keep,
                plan.physical_len,
                trimmed=True,
            )
            self.counters.moved += len(plan.token_ids)
            self.counters.copied += len(plan.token_ids)
        if plan.hole >= 0:
            self._holes[table.req_id] = plan.hole if steady else table.position_of_slot(hole_slot)

    def _recycle_only_hole(self, table: RequestTable) -> bool:
        """The steady state of a fixed budget, as `plan_dense` has it but without a plan: the one
        hole there is becomes the next token's slot. False where that is not the whole story."""
        hole = table.recent_hole()
        index = hole // table.block_size
        if hole == table.physical_len - 1 or table.block_live[index] == 0:
            return False
        block = table.blocks[index : index + 1]
        if not self._pool.private(block)[0]:
            return False
        self._pool.uncache(block)
        self._holes[table.req_id] = hole
        return True

    # ------------------------------------------------------------------ structural changes

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
        dropped = table.set_layout(keep, physical_len)
        self.views.forget(table.req_id)
        blocks: list[int] = table.blocks.tolist()
        joined = [] if flight is None else flight.moves.drawn
        self._pool.set_blocks(table.req_id, blocks, dropped, joined)
        self.counters.released_blocks += len(dropped)
        number = NO_FLIGHT if flight is None else flight.number
        change = LayoutChange(
            table.req_id, token_ids, sources, targets, blocks, dropped, trimmed, number
        )
        self._changes[table.req_id] = (table, change)
        if self.observer is not None and flight is not None:
            self.observer.committed(table, flight, change)
        elif self.observer is not None:
            self.observer.reclaimed(table, change)

    def physical_need(self, req_id: str, num_tokens: int) -> int:
        """Positions the request needs once it has `num_tokens` logical tokens.

        A request without a table (not scheduled yet) needs one per token.
        """
        table = self.tables.get(req_id)
        if table is None:
            return num_tokens
        new = num_tokens - table.logical_len
        if new == 1 and req_id in self._holes:
            return table.physical_len
        return table.physical_len + max(new, 0)

    def schedule(
        self, req_id: str, new_blocks: Sequence[int], total_len: int, *, adopted: int = 0
    ) -> StepLayout:
        """Register the tokens scheduled in this step.

        Args:
            new_blocks: blocks that the request gained in this step, in order.
            total_len: its logical length after the step.
            adopted: leading tokens of a new request that come from the prefix cache.
        """
        table = self.tables.open(req_id)
        hole = self._holes.pop(req_id, None)
        recycled = hole is not None and total_len == table.logical_len + 1
        place = hole if recycled else None
        slots = table.next_slots(new_blocks, total_len, hole=place)
        if self.observer is not None:
            fresh = new_blocks[adopted // table.block_size :]
            self.observer.writing(table, slots[adopted:], fresh)
        table.append(new_blocks, total_len, hole=place)
        if recycled:
            self.counters.recycled += 1
        layout = StepLayout(table.reclaimed, table.num_live, slots)
        self.views.tell(table, layout)
        self.meter.update(table)
        if self.observer is not None:
            self.observer.appended(table, layout, new_blocks, adopted, recycled=recycled)
        return layout

    def take_orders(self) -> StepOrders:
        """What the worker has to do, once; changes of requests dropped since are left out."""
        changes = [
            change
            for req_id, (table, change) in self._changes.items()
            if self.tables.get(req_id) is table
        ]
        orders = StepOrders(self._launches, self._waits, changes)
        self._changes.clear()
        self._launches, self._waits = [], []
        return orders

    def end_step(self, *, pressure: bool = False) -> None:
        """Close the step: holes of requests that were not scheduled are planned anew.

        Args:
            pressure: whether an allocation failed in it for want of a block.
        """
        self._holes.clear()
        self.meter.end_step()
        if self.background is not None:
            self.background.end_step(pressure=pressure)

    def drop(self, req_id: str, *, preempted: bool = False) -> None:
        """A request finished, was aborted or preempted: its table goes, its plan with it."""
        self._abort(req_id)
        table = self.tables.drop(req_id)
        self.views.forget(req_id)
        self._changes.pop(req_id, None)
        self._holes.pop(req_id, None)
        self.meter.drop(req_id)
        if table is not None and self.observer is not None:
            self.observer.dropped(table, preempted=preempted)
        if len(self.tables) == 0:
            # Nobody is left to need it, and vLLM resets its prefix cache only in an unused pool.
            self.yield_headroom()
