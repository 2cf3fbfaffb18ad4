"""The reference model behind the operations of the boundary: what a token table has to answer.

`answer` turns one call into events of `vtoken_spec` and says what the state is then, or why the
call is refused. `ModelTable` is a token table made of it: slow, obvious, and a fake for tests.

- `sync_new_tokens` is `Allocate` of the blocks that are new, and `Append`. Blocks that another
  request has, at the start of a request's first list, are a shared prefix: `Cache`, `Hit` and
  `Uncache` come first.
- `evict_token` and `evict_tokens` are `Evict`, and `drop` is `Finish`.
- `apply_moves` is `Prepare`, `Copy` of each move, `Wait` and `Commit`: nothing is released or
  trimmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import vtoken_spec as spec
from vtoken.errors import Rejected
from vtoken_spec import NO_SLOT, Reason, RequestState, RequestView, State

__all__ = [
    "ApplyMoves",
    "Call",
    "Drop",
    "EvictMany",
    "EvictOne",
    "ModelTable",
    "Refusal",
    "Sync",
    "TokenTableLike",
    "answer",
]

Moves: TypeAlias = Sequence[tuple[int, tuple[int, int]]]


class TokenTableLike(Protocol):
    """A token table as the suite needs it: the operations of the boundary, and reading.

    What is refused raises `vtoken.errors.Rejected` and changes nothing; moves that would break a
    law may raise `vtoken.errors.InvariantViolation` instead. Lists belong to the caller.
    """

    def sync_new_tokens(
        self, req_id: str, block_ids: Sequence[int], total_len: int
    ) -> Iterable[int]:
        """Register tokens up to `total_len`; `block_ids` is the request's whole list, which
        extends the known one. A request begins with its first call. Returns the slots of the new
        tokens."""

    def evict_token(self, req_id: str, token_id: int) -> object: ...

    def evict_tokens(self, req_id: str, token_ids: Sequence[int]) -> object:
        """All or none."""

    def apply_moves(self, req_id: str, moves: Moves) -> object:
        """`(token_id, (block, offset))` each, all or none: live tokens to slots of the request's
        blocks without a live token, not even one that another of the moves leaves."""

    def drop(self, req_id: str) -> object:
        """Forget a request."""

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests there are."""

    def __getitem__(self, req_id: str) -> RequestView: ...


# Calls ------------------------------------------------------------------------------------------
# Lists given are emptied after the call, so that a table that keeps one shows it.


@dataclass(frozen=True, slots=True)
class Sync:
    req_id: str
    block_ids: tuple[int, ...]
    total_len: int

    def on(self, table: TokenTableLike) -> object:
        given = list(self.block_ids)
        slots = table.sync_new_tokens(self.req_id, given, self.total_len)
        given.clear()
        return slots

    def __str__(self) -> str:
        return f"sync_new_tokens({self.req_id!r}, {list(self.block_ids)}, {self.total_len})"


@dataclass(frozen=True, slots=True)
class EvictOne:
    req_id: str
    token_id: int

    def on(self, table: TokenTableLike) -> object:
        return table.evict_token(self.req_id, self.token_id)

    def __str__(self) -> str:
        return f"evict_token({self.req_id!r}, {self.token_id})"


@dataclass(frozen=True, slots=True)
class EvictMany:
    req_id: str
    token_ids: tuple[int, ...]

    def on(self, table: TokenTableLike) -> object:
        given = list(self.token_ids)
        result = table.evict_tokens(self.req_id, given)
        given.clear()
        return result

    def __str__(self) -> str:
        return f"evict_tokens({self.req_id!r}, {list(self.token_ids)})"


@dataclass(frozen=True, slots=True)
class ApplyMoves:
    req_id: str
    moves: tuple[tuple[int, tuple[int, int]], ...]

    def on(self, table: TokenTableLike) -> object:
        given = list(self.moves)
        result = table.apply_moves(self.req_id, given)
        given.clear()
        return result

    def __str__(self) -> str:
        return f"apply_moves({self.req_id!r}, {list(self.moves)})"


@dataclass(frozen=True, slots=True)
class Drop:
    req_id: str

    def on(self, table: TokenTableLike) -> object:
        return table.drop(self.req_id)

    def __str__(self) -> str:
        return f"drop({self.req_id!r})"


Call = Sync | EvictOne | EvictMany | ApplyMoves | Drop

# What the model answers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the model takes no call.

    Attributes:
        verdict: "refuse": every table must; "either": a table may take it for nothing, but nothing
            changes; "open": the boundary does not say, so no suite may try it.
    """

    reason: str
    detail: str
    verdict: Literal["refuse", "either", "open"] = "refuse"


_OPEN = frozenset({Reason.PROTECTED_BLOCK, Reason.AT_THE_END})
"""What a table by itself cannot know or need not allow: which blocks are shared or cached, and
moves to the end of the block list, where new tokens go."""


def answer(state: State, call: Call) -> State | Refusal:
    """The state after `call`, or why it is refused."""
    match call:
        case Sync():
            return _synced(state, call)
        case EvictOne(req_id, token_id):
            return _stepped(state, spec.Evict(req_id, (token_id,)))
        case EvictMany(req_id, token_ids):
            if not token_ids:
                return _nothing(req_id)
            return _stepped(state, spec.Evict(req_id, token_ids))
        case ApplyMoves():
            return _moved(state, call)
        case Drop(req_id):
            if req_id not in state.requests:
                return Refusal(Reason.UNKNOWN_REQUEST.value, req_id, "either")
            return _stepped(state, spec.Finish(req_id))


def _synced(state: State, call: Sync) -> State | Refusal:
    table = state.requests.get(call.req_id, RequestState(call.req_id))
    known, fresh = table.blocks, call.block_ids[len(table.blocks) :]
    if call.block_ids[: len(known)] != known:
        return Refusal("the block list does not extend the known one", f"{known}")
    if call.total_len <= table.logical_len:
        return Refusal("there is no new token", f"{table.logical_len} are known")
    if len(set(call.block_ids)) != len(call.block_ids):
        return Refusal(Reason.DUPLICATE.value, f"blocks {call.block_ids}")
    others = {b for other in state.tables if other.req_id != call.req_id for b in other.blocks}
    adopted = fresh[: next((i for i, b in enumerate(fresh) if b not in others), len(fresh))]
    if adopted:
        shared = (spec.Cache(adopted), spec.Hit(call.req_id, adopted), spec.Uncache(adopted))
        after = _stepped(state, *shared)
        if isinstance(after, Refusal) or after.requests[call.req_id].logical_len > call.total_len:
            return Refusal("the blocks are another request's", f"{adopted}", "open")
        state = after
    rest = fresh[len(adopted) :]
    if others.intersection(rest):
        return Refusal("a block is another request's", f"{rest}", "open")
    after = _stepped(state, spec.Allocate(call.req_id, rest)) if rest else state
    if isinstance(after, Refusal):
        return after
    table, size = after.requests.get(call.req_id, table), after.pool.block_size
    count = call.total_len - table.logical_len
    slots = table.places(block_size=size)[table.physical_len :][:count]
    if not count:
        return after
    # Where there are too few, the model is asked for one that there is not, and says so.
    missing = (NO_SLOT,) * (count - len(slots))
    return _stepped(after, spec.Append(call.req_id, slots + missing))


def _moved(state: State, call: ApplyMoves) -> State | Refusal:
    table, size = state.requests.get(call.req_id), state.pool.block_size
    if table is None:
        return Refusal(Reason.UNKNOWN_REQUEST.value, call.req_id)
    if not call.moves:
        return _nothing(call.req_id)
    moves = []
    for token, (block, offset) in call.moves:
        if not 0 <= offset < size:
            return Refusal("the offset is outside a block", f"{offset} of {size}")
        source = table.slots[token] if 0 <= token < table.logical_len else NO_SLOT
        moves.append(spec.Move(token, source, block * size + offset))
    plan = spec.Plan(call.req_id, table.version, table.blocks, tuple(moves), (), "dense")
    copies = [spec.Copy(call.req_id, index) for index in range(len(moves))]
    return _stepped(
        state, spec.Prepare(plan), *copies, spec.Wait(call.req_id), spec.Commit(call.req_id)
    )


def _stepped(state: State, *events: spec.Event) -> State | Refusal:
    for event in events:
        after = spec.step(state, event)
        if isinstance(after, spec.Rejected):
            verdict: Literal["refuse", "open"] = "open" if after.reason in _OPEN else "refuse"
            detail = after.detail.removeprefix(f"{after.reason.value}: ")
            return Refusal(after.reason.value, detail, verdict)
        state = after
    return state


def _nothing(req_id: str) -> Refusal:
    return Refusal(Reason.NOTHING_TO_DO.value, req_id, "either")


class ModelTable:
    """The reference model as a token table; see `TokenTableLike` for the operations.

    Args:
        block_size: slots per block.
        num_blocks: the pool; block ids lie below it, and block 0 is nobody's.
    """

    def __init__(self, block_size: int, *, num_blocks: int = 64) -> None:
        self.state = State.initial(num_blocks=num_blocks, block_size=block_size)

    def sync_new_tokens(
        self, req_id: str, block_ids: Sequence[int], total_len: int
    ) -> Sequence[int]:
        before = self.state.requests.get(req_id, RequestState(req_id)).logical_len
        self._take(Sync(req_id, tuple(block_ids), total_len))
        return self[req_id].slots[before:]

    def evict_token(self, req_id: str, token_id: int) -> None:
        self._take(EvictOne(req_id, token_id))

    def evict_tokens(self, req_id: str, token_ids: Sequence[int]) -> None:
        self._take(EvictMany(req_id, tuple(token_ids)))

    def apply_moves(self, req_id: str, moves: Moves) -> None:
        self._take(ApplyMoves(req_id, tuple(moves)))

    def drop(self, req_id: str) -> None:
        self._take(Drop(req_id))

    def __iter__(self) -> Iterator[str]:
        return iter(self.state.requests)

    def __getitem__(self, req_id: str) -> RequestState:
        return self.state.requests[req_id]

    def _take(self, call: Call) -> None:
        after = answer(self.state, call)
        if isinstance(after, Refusal):
            raise Rejected(f"{call}: {after.reason}: {after.detail}")
        self.state = after
