"""Token tables with one fault each, and the law or check that names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support.faults import Fault
from vtoken.core import RequestTable, TokenTable
from vtoken.errors import Rejected
from vtoken.testing import ModelTable


class SlotsOneFurther(TokenTable):
    """Says other slots than the table has."""

    def sync_new_tokens(self, *given: Any) -> Any:
        return super().sync_new_tokens(*given) + 1


class SkipsASlot(ModelTable):
    """New tokens lie one slot too far along."""

    def sync_new_tokens(self, req_id: str, block_ids: Sequence[int], total_len: int) -> Any:
        slots = super().sync_new_tokens(req_id, block_ids, total_len)
        table, size = self[req_id], self.state.pool.block_size
        places = table.places(block_size=size)
        if table.physical_len < len(places):
            moved = (*table.slots[:-1], places[table.physical_len])
            table = replace(table, slots=moved, physical_len=table.physical_len + 1)
            self.state = self.state.settled(table=table)
        return slots


class LastOfABulkLives(TokenTable):
    def evict_tokens(self, req_id: str, token_ids: Any) -> None:
        super().evict_tokens(req_id, token_ids)
        if len(token_ids) > 1:
            table, token = self[req_id], token_ids[-1]
            table._live[token] = True
            table.num_live += 1


class EvictsTheNewest(ModelTable):
    def evict_token(self, req_id: str, token_id: int) -> None:
        table = self.state.requests.get(req_id)
        if table is not None and token_id == table.logical_len - 1 and table.live[token_id]:
            table = replace(table, live=(*table.live[:-1], False))
            self.state = self.state.settled(table=table)
        else:
            super().evict_token(req_id, token_id)


class HalfTheMoves(TokenTable):
    """Applies the first of several moves before it looks at the rest."""

    def apply_moves(self, req_id: str, moves: Any) -> None:
        try:
            super().apply_moves(req_id, moves)
        except Exception:
            if len(moves) > 1:
                super().apply_moves(req_id, moves[:1])
            raise


class BlockListNotCompared(TokenTable):
    def sync_new_tokens(self, req_id: str, block_ids: Any, total_len: int) -> Any:
        known = self[req_id].blocks.tolist() if req_id in self else []
        return super().sync_new_tokens(req_id, known + block_ids[len(known) :], total_len)


class RefusedRequestStays(TokenTable):
    def sync_new_tokens(self, req_id: str, *given: Any) -> Any:
        try:
            return super().sync_new_tokens(req_id, *given)
        except Rejected:
            self.open(req_id)
            raise


class RefusedBulkEvictsSome(TokenTable):
    def evict_tokens(self, req_id: str, token_ids: Any) -> None:
        self[req_id]
        for token in token_ids:
            self.evict_token(req_id, token)


class HoleKeepsItsToken(TokenTable):
    """A dead token is not told that its slot was taken."""

    def apply_moves(self, req_id: str, moves: Any) -> None:
        before = self[req_id].positions.copy()
        super().apply_moves(req_id, moves)
        table = self[req_id]
        lost = (table.positions < 0) & (before >= 0)
        table.positions[lost] = before[lost]


class MovesCrossed(TokenTable):
    """Each token lands where the next one should."""

    def apply_moves(self, req_id: str, moves: Any) -> None:
        targets = [target for _, target in moves]
        turned = targets[1:] + targets[:1]
        super().apply_moves(req_id, [(t, to) for (t, _), to in zip(moves, turned, strict=True)])


class VersionStays(TokenTable):
    def apply_moves(self, req_id: str, moves: Any) -> None:
        version = self[req_id].version
        super().apply_moves(req_id, moves)
        self[req_id].version = version


class UnknownIsAKeyError(TokenTable):
    def __getitem__(self, req_id: str) -> RequestTable:
        return self._tables[req_id]


class LivenessBySlot(ModelTable):
    """Who shares a block sees the evictions of the other."""

    def evict_token(self, req_id: str, token_id: int) -> None:
        super().evict_token(req_id, token_id)
        gone = self[req_id].slots[token_id]
        for other in self.state.tables:
            pairs = zip(other.slots, other.live, strict=True)
            live = tuple(alive and slot != gone for slot, alive in pairs)
            self.state = self.state.settled(table=replace(other, live=live))


class KeepsTheCallersList(ModelTable):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.lists: dict[str, Any] = {}

    def sync_new_tokens(self, req_id: str, block_ids: Any, total_len: int) -> Any:
        slots = super().sync_new_tokens(req_id, block_ids, total_len)
        self.lists[req_id] = block_ids
        return slots

    def __getitem__(self, req_id: str) -> Any:
        return replace(super().__getitem__(req_id), blocks=self.lists.get(req_id, ()))


class FifthEvictionInARowIsLost(TokenTable):
    """One by one, with nothing else in between."""

    row = 0

    def sync_new_tokens(self, *given: Any) -> Any:
        self.row = 0
        return super().sync_new_tokens(*given)

    def evict_tokens(self, *given: Any) -> None:
        self.row = 0
        super().evict_tokens(*given)

    def apply_moves(self, *given: Any) -> None:
        self.row = 0
        super().apply_moves(*given)

    def evict_token(self, req_id: str, token_id: int) -> None:
        super().evict_token(req_id, token_id)
        self.row += 1
        if self.row == 5:
            self[req_id]._live[token_id] = True
            self[req_id].num_live += 1


class RefusesASpareBlock(TokenTable):
    def sync_new_tokens(self, req_id: str, block_ids: Any, total_len: int) -> Any:
        if (len(block_ids) - 1) * self.block_size >= total_len:
            raise Rejected("more blocks than tokens need")
        return super().sync_new_tokens(req_id, block_ids, total_len)


class TrimsAfterMoves(TokenTable):
    """Moves give back what lies behind the last live token."""

    def apply_moves(self, req_id: str, moves: Any) -> None:
        super().apply_moves(req_id, moves)
        if moves:
            table = self[req_id]
            table.physical_len = int(table.positions[table.live].max()) + 1
            table.positions[table.positions >= table.physical_len] = -1


class DropForgetsNothing(TokenTable):
    def drop(self, req_id: str) -> RequestTable | None:
        return self.get(req_id)


class ReadingBreaks(TokenTable):
    """A table of many tokens cannot be read."""

    def __getitem__(self, req_id: str) -> RequestTable:
        table = super().__getitem__(req_id)
        if table.logical_len > 20:
            raise OverflowError("too many tokens")
        return table


TABLE_FAULTS = [
    Fault(SlotsOneFurther, "L7"),
    Fault(SkipsASlot, "L6"),
    Fault(LastOfABulkLives, "L6"),
    Fault(EvictsTheNewest, "rejection"),
    Fault(HalfTheMoves, "atomicity"),
    Fault(BlockListNotCompared, "rejection"),
    Fault(RefusedRequestStays, "unchanged"),
    Fault(RefusedBulkEvictsSome, "unchanged"),
    Fault(HoleKeepsItsToken, "I2"),
    Fault(MovesCrossed, "I1"),
    Fault(VersionStays, "I4"),
    Fault(UnknownIsAKeyError, "rejection"),
    Fault(LivenessBySlot, "L6"),
    Fault(KeepsTheCallersList, "I2"),
    Fault(FifthEvictionInARowIsLost, "bulk"),
    Fault(RefusesASpareBlock, "acceptance"),
    Fault(TrimsAfterMoves, "model"),
    Fault(DropForgetsNothing, "model"),
    Fault(ReadingBreaks, "error"),
]
