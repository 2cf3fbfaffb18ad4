"""The spec's model in lock step with the implementation (check level 3).

Every event of the reclaimer is also given to `vtoken_spec.step`; a rejection, or a state that
differs afterwards, is a violation. The model is told the choices (slots, victims, moves) and
judges them; it computes the consequences on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import vtoken_spec as spec
from vtoken.core.reclaimer import LayoutChange
from vtoken.core.request_table import IntArray, RequestTable
from vtoken.errors import InvariantViolation

# Which law a rejection speaks for; the rest are faults of placement.
_LAW_OF = {
    spec.Reason.PROTECTED_BLOCK: "L8",
    spec.Reason.CACHED_BLOCK: "L8",
    spec.Reason.NOT_A_HOLE: "L7",
    spec.Reason.NOT_FREE: "L5",
    spec.Reason.NOT_OWNED: "L5",
    spec.Reason.LIVE_BLOCK: "I1",
    spec.Reason.STALE_PLAN: "I4",
    spec.Reason.BAD_SOURCE: "I4",
    spec.Reason.BAD_TARGET: "I4",
    spec.Reason.BAD_RELEASE: "I4",
    spec.Reason.BAD_ORDER: "I4",
    spec.Reason.NO_GAIN: "I4",
}


class Shadow:
    """Drives the model with the implementation's events.

    Args:
        pool: the implementation's pool; what its prefix cache holds is read from it, because
            vLLM caches and un-caches blocks inside its own allocator.
    """

    def __init__(self, pool: spec.PoolView) -> None:
        self._pool = pool
        self.state = spec.State.initial(num_blocks=pool.num_blocks, block_size=pool.block_size)
        self.events = 0

    # ------------------------------------------------------------------ events

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None:
        self._do(spec.Evict(table.req_id, tuple(token_ids.tolist())))

    def reclaimed(self, table: RequestTable, change: LayoutChange) -> None:
        self._follow_cache()
        before = self.state.requests[table.req_id]
        if len(change.token_ids) == 0 and change.dropped and not change.trimmed:
            self._do(spec.Release(table.req_id, tuple(change.dropped)))
            return
        columns = (change.token_ids, change.sources, change.targets)
        moves = zip(*(column.tolist() for column in columns), strict=True)
        plan = spec.Plan(
            req_id=table.req_id,
            version=before.version,
            blocks=before.blocks,
            moves=tuple(spec.Move(*move) for move in moves),
            released=tuple(change.dropped),
            purpose="dense",
            order=tuple(change.blocks),
        )
        self._do(spec.MoveTokens(plan))

    def appended(
        self,
        table: RequestTable,
        slots: IntArray,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None:
        self._follow_cache()
        # A free block that vLLM hands out again leaves the prefix cache; it may be back in it
        # under its new content already, so the comparison above does not show it.
        fresh = new_blocks[adopted // table.block_size :]
        stale = tuple(b for b in fresh if b in self.state.pool.cached)
        if stale:
            self._do(spec.Uncache(stale))
        if recycled:
            self._do(spec.Recycle(table.req_id, int(slots[0]), tuple(new_blocks)))
        else:
            self._do(spec.Append(table.req_id, tuple(slots.tolist()), tuple(new_blocks), adopted))
        self._follow_cache()

    def dropped(self, table: RequestTable) -> None:
        self._follow_cache()
        self._do(spec.Finish(table.req_id))

    # ------------------------------------------------------------------ comparison

    def compare(self, view: spec.StateView) -> None:
        """The model's tables and pool equal the implementation's.

        Raises:
            InvariantViolation
        """
        mine, theirs = self.state.requests, view.requests
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
        free = {int(b) for b in view.pool.free}
        if self.state.pool.free != free:
            self._differ("L5", None, "free blocks", sorted(self.state.pool.free), sorted(free))
        for block, count in enumerate(self.state.pool.refs):
            if block != spec.NULL_BLOCK and count != view.pool.ref_count(block):
                what = f"references to block {block}"
                self._differ("L5", None, what, count, view.pool.ref_count(block))

    # ------------------------------------------------------------------ inside

    def _do(self, event: spec.Event) -> None:
        answer = spec.step(self.state, event)
        self.events += 1
        if isinstance(answer, spec.Rejected):
            raise InvariantViolation(
                law=_LAW_OF.get(answer.reason, "I2"),
                message=f"the spec rejects this event: {answer.detail}\n  event: {event}",
                req_id=getattr(event, "req_id", None),
            )
        self.state = answer

    def _follow_cache(self) -> None:
        """Tell the model which blocks entered or left vLLM's prefix cache meanwhile.

        A block that vLLM cached for tokens which the model has not appended yet (vLLM caches at
        allocation) is not cacheable for the model; it is told after the append.
        """
        cached = self.state.pool.cached
        now = {b for b in range(1, self._pool.num_blocks) if self._pool.is_cached(b)}
        gone = tuple(sorted(cached - now))
        if gone:
            self._do(spec.Uncache(gone))
        for block in sorted(now - cached):
            answer = spec.step(self.state, spec.Cache((block,)))
            if not isinstance(answer, spec.Rejected):
                self.events += 1
                self.state = answer

    def _differ(self, law: str, req_id: str | None, what: str, model: object, real: object) -> None:
        raise InvariantViolation(
            law=law,
            message=f"{what} differ between the spec's model (before) and vToken (after)",
            req_id=req_id,
            before=model,
            after=real,
        )
