"""Drives the spec's model with an implementation's events, live or from a trace.

The model is told the choices (slots, victims, moves, blocks) and judges them; it computes the
consequences on its own. vLLM's prefix cache changes inside its own allocator, so its state is
observed instead: a block cached for tokens that the model has not appended yet (vLLM caches at
allocation) is not cacheable for the model, and is offered again after the append.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import vtoken_spec as spec
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


class Follower:
    """The model's state after the events so far.

    Attributes:
        state: `vtoken_spec.State`.
        events: events accepted.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.state = spec.State.initial(num_blocks=num_blocks, block_size=block_size)
        self.events = 0
        self._offered: set[int] = set()

    # ------------------------------------------------------------------ events

    def append(
        self, req_id: str, slots: Sequence[int], new_blocks: Sequence[int], adopted: int
    ) -> None:
        self._forget_contents(new_blocks[adopted // self.state.pool.block_size :])
        self._do(spec.Append(req_id, tuple(slots), tuple(new_blocks), adopted))

    def recycle(self, req_id: str, slot: int, new_blocks: Sequence[int]) -> None:
        self._forget_contents(new_blocks)
        self._do(spec.Recycle(req_id, slot, tuple(new_blocks)))

    def evict(self, req_id: str, token_ids: Sequence[int]) -> None:
        self._do(spec.Evict(req_id, tuple(token_ids)))

    def release(self, req_id: str, blocks: Sequence[int]) -> None:
        self._do(spec.Release(req_id, tuple(blocks)))

    def move(
        self,
        req_id: str,
        moves: Iterable[tuple[int, int, int]],
        dropped: Sequence[int],
        order: Sequence[int],
    ) -> None:
        """A plan of `(token, source, target)` moves that gives back `dropped`."""
        before = self.state.requests.get(req_id)
        plan = spec.Plan(
            req_id=req_id,
            version=0 if before is None else before.version,
            blocks=() if before is None else before.blocks,
            moves=tuple(spec.Move(*move) for move in moves),
            released=tuple(dropped),
            purpose="dense",
            order=tuple(order),
        )
        self._do(spec.MoveTokens(plan))

    def finish(self, req_id: str) -> None:
        self._do(spec.Finish(req_id))

    # ------------------------------------------------------------------ prefix cache

    def cache_changed(self, entered: Iterable[int], left: Iterable[int]) -> None:
        """Blocks entered or left the prefix cache since the last event."""
        gone = set(left)
        self._offered = (self._offered | set(entered)) - gone
        stale = tuple(sorted(self.state.pool.cached & gone))
        if stale:
            self._do(spec.Uncache(stale))
        self.settle_cache()

    def settle_cache(self) -> None:
        """Offer the model the cached blocks that it could not accept yet."""
        for block in sorted(self._offered):
            answer = spec.step(self.state, spec.Cache((block,)))
            if not isinstance(answer, spec.Rejected):
                self.events += 1
                self.state = answer
                self._offered.discard(block)

    def _forget_contents(self, allotted: Sequence[int]) -> None:
        """Blocks allotted to be filled left the prefix cache then, even if vLLM has put them
        back under this step's contents already."""
        stale = tuple(sorted(self.state.pool.cached.intersection(allotted)))
        if stale:
            self._do(spec.Uncache(stale))
            self._offered.update(stale)

    def _do(self, event: spec.Event) -> None:
        answer = spec.step(self.state, event)
        if isinstance(answer, spec.Rejected):
            raise InvariantViolation(
                law=_LAW_OF.get(answer.reason, "I2"),
                message=f"the spec rejects this event: {answer.detail}\n  event: {event}",
                req_id=getattr(event, "req_id", None),
            )
        self.events += 1
        self.state = answer
