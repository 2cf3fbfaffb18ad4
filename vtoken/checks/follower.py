"""Drives the spec's model with an implementation's events, live or from a trace.

The model is told the choices (slots, victims, moves, blocks) and judges them; it computes the
consequences on its own. When a copy in flight really happens is not observed: the model is told of
it at the last moment, when the compute stream waits. vLLM's prefix cache changes inside its own
allocator, so its state is observed instead: a block cached for tokens that the model has not
appended yet (vLLM caches at allocation) is not cacheable for the model, and is offered again
after the append.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

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
    spec.Reason.AT_THE_END: "I4",
    spec.Reason.IN_FLIGHT: "I4",
    spec.Reason.NOT_IN_FLIGHT: "I4",
    spec.Reason.COPY_PENDING: "I3",
    spec.Reason.NOT_WAITED: "I3",
    spec.Reason.BAD_READ: "L6",
    spec.Reason.NOT_RESERVED: "L5",
}


class Follower:
    """The model's state after the events so far.

    Attributes:
        state: `vtoken_spec.State`.
        kinds: events accepted, by kind.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.state = spec.State.initial(num_blocks=num_blocks, block_size=block_size)
        self.kinds: Counter[str] = Counter()
        self._offered: set[int] = set()

    @property
    def events(self) -> int:
        return self.kinds.total()

    # ------------------------------------------------------------------ events

    def append(
        self, req_id: str, slots: Sequence[int], new_blocks: Sequence[int], adopted: int
    ) -> None:
        """New tokens at the physical end; of a new request, the first `adopted` are a hit."""
        hit = tuple(new_blocks[: adopted // self.state.pool.block_size])
        self._back(req_id)
        if hit:
            self._do(spec.Hit(req_id, hit))
            found = self.state.requests[req_id].slots
            if found != tuple(slots[:adopted]):
                self._wrong("L6", req_id, "adopted slots differ", found, tuple(slots[:adopted]))
        self._allocate(req_id, new_blocks[len(hit) :])
        if len(slots) > adopted or not hit:
            self._do(spec.Append(req_id, tuple(slots[adopted:])))

    def recycle(self, req_id: str, slot: int, new_blocks: Sequence[int]) -> None:
        self._allocate(req_id, new_blocks)
        self._do(spec.Recycle(req_id, slot))

    def attend(self, req_id: str, slots: Sequence[int], queries: int) -> None:
        """Attention is given `slots` for the newest `queries` tokens."""
        table = self.state.requests.get(req_id)
        end = 0 if table is None else table.logical_len
        read = spec.ReadSet(req_id, tuple(slots), tuple(range(end - queries, end)))
        self._do(spec.Attend(read))

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
        """A plan of `(token, source, target)` moves that gives back `dropped`, in step order."""
        self._do(spec.MoveTokens(self._plan(req_id, moves, dropped, order, "dense")))

    def prepare(
        self,
        req_id: str,
        moves: Iterable[tuple[int, int, int]],
        released: Sequence[int],
    ) -> None:
        """The same, but in flight."""
        self._do(spec.Prepare(self._plan(req_id, moves, released, (), "reclaim")))

    def commit(self, req_id: str) -> None:
        self._wait(req_id)
        self._do(spec.Commit(req_id))

    def abort(self, req_id: str) -> None:
        self._do(spec.Abort(req_id))
        self._wait(req_id)

    def reserve(self, blocks: Sequence[int]) -> None:
        self._forget_contents(blocks)
        self._do(spec.Reserve(tuple(blocks)))

    def unreserve(self, blocks: Sequence[int]) -> None:
        self._do(spec.Unreserve(tuple(blocks)))

    def finish(self, req_id: str) -> None:
        self._do(spec.Finish(req_id))

    def preempt(self, req_id: str) -> None:
        self._do(spec.Preempt(req_id))

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
                self.kinds["Cache"] += 1
                self.state = answer
                self._offered.discard(block)

    def _forget_contents(self, allotted: Sequence[int]) -> None:
        """Blocks allotted to be filled left the prefix cache then, even if vLLM has put them
        back under this step's contents already."""
        stale = tuple(sorted(self.state.pool.cached.intersection(allotted)))
        if stale:
            self._do(spec.Uncache(stale))
            self._offered.update(stale)

    # ------------------------------------------------------------------ inside

    def _allocate(self, req_id: str, blocks: Sequence[int]) -> None:
        if len(blocks):
            self._forget_contents(blocks)
            self._do(spec.Allocate(req_id, tuple(blocks)))

    def _back(self, req_id: str) -> None:
        """A preempted request that has tokens again has resumed."""
        if req_id in self.state.preempted:
            self._do(spec.Resume(req_id))

    def _wait(self, req_id: str) -> None:
        flight = self.state.flight(req_id)
        for index in range(0 if flight is None else len(flight.plan.moves)):
            self._do(spec.Copy(req_id, index))
        self._do(spec.Wait(req_id))

    def _plan(
        self,
        req_id: str,
        moves: Iterable[tuple[int, int, int]],
        released: Sequence[int],
        order: Sequence[int],
        purpose: Literal["dense", "reclaim"],
    ) -> spec.Plan:
        before = self.state.requests.get(req_id)
        return spec.Plan(
            req_id=req_id,
            version=0 if before is None else before.version,
            blocks=() if before is None else before.blocks,
            moves=tuple(spec.Move(*move) for move in moves),
            released=tuple(released),
            purpose=purpose,
            order=tuple(order),
        )

    def _do(self, event: spec.Event) -> None:
        answer = spec.step(self.state, event)
        if isinstance(answer, spec.Rejected):
            raise InvariantViolation(
                law=_LAW_OF.get(answer.reason, "I2"),
                message=f"the spec rejects this event: {answer.detail}\n  event: {event}",
                req_id=getattr(event, "req_id", None),
            )
        self.kinds[type(event).__name__] += 1
        self.state = answer

    def _wrong(self, law: str, req_id: str, what: str, before: object, after: object) -> None:
        raise InvariantViolation(law=law, message=what, req_id=req_id, before=before, after=after)
