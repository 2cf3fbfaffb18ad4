"""The spec's model in lock step with the implementation (check level 3).

Every event of the reclaimer is also given to `vtoken_spec.step`; a rejection, or a state that
differs afterwards, is a violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import vtoken_spec as spec
from vtoken.checks.follower import Follower
from vtoken.core.arrays import IntArray
from vtoken.core.flight import Flight
from vtoken.core.layout import LayoutChange, StepLayout
from vtoken.core.request_table import RequestTable
from vtoken.errors import InvariantViolation


class Shadow:
    """A `Follower` fed by the events of a running `Reclaimer`.

    Args:
        pool: the implementation's pool; what its prefix cache holds is read from it.
    """

    def __init__(self, pool: spec.PoolView) -> None:
        self._pool = pool
        self._follower = Follower(num_blocks=pool.num_blocks, block_size=pool.block_size)
        self._cached: set[int] = set()

    @property
    def state(self) -> spec.State:
        return self._follower.state

    @property
    def events(self) -> int:
        return self._follower.events

    @property
    def kinds(self) -> Counter[str]:
        """Events the model accepted, by kind."""
        return self._follower.kinds

    # ------------------------------------------------------------------ events

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None:
        self._follower.evict(table.req_id, token_ids.tolist())

    def reclaimed(self, table: RequestTable, change: LayoutChange) -> None:
        self._look_at_cache()
        if change.only_released:
            self._follower.release(table.req_id, change.dropped)
            return
        columns = (change.token_ids, change.sources, change.targets)
        moves = zip(*(column.tolist() for column in columns), strict=True)
        self._follower.move(table.req_id, moves, change.dropped, change.blocks)

    def appended(
        self,
        table: RequestTable,
        layout: StepLayout,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None:
        self._look_at_cache()
        slots: list[int] = layout.new_slots.tolist()
        if recycled:
            self._follower.recycle(table.req_id, slots[0], new_blocks)
        else:
            self._follower.append(table.req_id, slots, new_blocks, adopted)
        self._follower.settle_cache()
        reads: list[int] = layout.reads(table).tolist()
        self._follower.attend(table.req_id, reads, len(slots) - adopted)

    def reserved(self, blocks: Sequence[int]) -> None:
        self._look_at_cache()
        self._follower.reserve(blocks)

    def unreserved(self, blocks: Sequence[int]) -> None:
        self._follower.unreserve(blocks)

    def prepared(self, flight: Flight) -> None:
        self._look_at_cache()
        plan = flight.plan
        moves = [(move.token_id, move.src, move.dst) for move in plan.moves]
        self._follower.prepare(flight.req_id, moves, plan.released)

    def committed(self, flight: Flight) -> None:
        self._look_at_cache()
        self._follower.commit(flight.req_id)

    def aborted(self, flight: Flight) -> None:
        self._follower.abort(flight.req_id)

    def dropped(self, table: RequestTable, *, preempted: bool) -> None:
        self._look_at_cache()
        if preempted:
            self._follower.preempt(table.req_id)
        else:
            self._follower.finish(table.req_id)

    def _look_at_cache(self) -> None:
        now = {b for b in range(1, self._pool.num_blocks) if self._pool.is_cached(b)}
        self._follower.cache_changed(now - self._cached, self._cached - now)
        self._cached = now

    # ------------------------------------------------------------------ comparison

    def compare(self, view: spec.StateView) -> None:
        """The model's tables and pool equal the implementation's.

        Raises:
            InvariantViolation
        """
        state = self._follower.state
        mine, theirs = state.requests, view.requests
        if mine.keys() != theirs.keys():
            self._differ("I2", None, "requests", sorted(mine), sorted(theirs))
        for req_id, model in mine.items():
            real = theirs[req_id]
            for law, name in (("I2", "blocks"), ("I2", "slots"), ("I1", "live")):
                want = list(getattr(model, name))
                have = [type(w)(h) for w, h in zip(want, getattr(real, name), strict=False)]
                if want != have or len(want) != len(getattr(real, name)):
                    self._differ(law, req_id, name, want, have)
            if model.physical_len != real.physical_len:
                self._differ("I2", req_id, "physical length", model.physical_len, real.physical_len)
        for name in ("free", "headroom", "held"):
            want, have = getattr(state.pool, name), {int(b) for b in getattr(view.pool, name)}
            if want != have:
                self._differ("L5", None, f"{name} blocks", sorted(want), sorted(have))
        flying = [flight.req_id for flight in state.flights]
        if flying != sorted(flight.req_id for flight in view.flights):
            self._differ("I4", None, "plans in flight", flying, list(view.flights))
        for block, count in enumerate(state.pool.refs):
            if block != spec.NULL_BLOCK and count != view.pool.ref_count(block):
                what = f"references to block {block}"
                self._differ("L5", None, what, count, view.pool.ref_count(block))

    def _differ(self, law: str, req_id: str | None, what: str, model: object, real: object) -> None:
        raise InvariantViolation(
            law=law,
            message=f"{what} differ between the spec's model (before) and vToken (after)",
            req_id=req_id,
            before=model,
            after=real,
        )
