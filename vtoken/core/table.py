"""The token tables of all running requests: the boundary that policies and vLLM speak to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vtoken.core.arrays import IntArray
from vtoken.core.request_table import RequestTable
from vtoken.errors import Rejected


class TokenTable:
    """One `RequestTable` per running request, behind the three operations of the boundary.

    Policies call `evict_token(s)`, the scheduler `sync_new_tokens`, the reclamation backend
    `apply_moves`. None of them needs to know what the others do.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise Rejected(f"block_size {block_size} is not positive")
        self.block_size = block_size
        self._tables: dict[str, RequestTable] = {}
        self._opened = 0

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, req_id: str) -> RequestTable:
        try:
            return self._tables[req_id]
        except KeyError:
            raise Rejected(f"request {req_id} has no token table") from None

    def get(self, req_id: str) -> RequestTable | None:
        return self._tables.get(req_id)

    def values(self) -> Iterable[RequestTable]:
        return self._tables.values()

    def open(self, req_id: str) -> RequestTable:
        """The request's table, made empty if it has none."""
        table = self._tables.get(req_id)
        if table is None:
            table = self._tables[req_id] = RequestTable(req_id, self.block_size)
            self._opened += 1
            table.life = self._opened
        return table

    def drop(self, req_id: str) -> RequestTable | None:
        """Forget a request (finish, abort, preemption); returns its table, if it had one."""
        return self._tables.pop(req_id, None)

    def evict_token(self, req_id: str, token_id: int) -> None:
        """Mark one token dead, O(1). Raises `Rejected`, see `RequestTable.evict`."""
        self[req_id].evict(np.array([token_id]))

    def evict_tokens(self, req_id: str, token_ids: npt.ArrayLike) -> None:
        """Bulk form of `evict_token`: all ids or none."""
        ids = np.asarray(token_ids).reshape(-1)
        if len(ids):  # an empty list has no integer type
            self[req_id].evict(ids)

    def sync_new_tokens(self, req_id: str, block_ids: Sequence[int], total_len: int) -> IntArray:
        """Register new tokens up to `total_len`, placed at the end of `block_ids`.

        Args:
            block_ids: the request's whole current block list; it must extend the known one.
            total_len: logical length after the step.

        Returns:
            slots of the new tokens, int32 `[n]`.

        Raises:
            Rejected: the list does not extend the known one, or does not hold the tokens.
        """
        is_new = req_id not in self._tables
        table = self.open(req_id)
        known = table.num_blocks
        if len(block_ids) < known or list(block_ids[:known]) != table.blocks.tolist():
            raise Rejected(f"request {req_id}: block list does not extend the known one")
        try:
            return table.slots_at(table.append(block_ids[known:], total_len))
        except Rejected:
            if is_new:  # nothing changed, so there is still no such request
                del self._tables[req_id]
            raise

    def apply_moves(self, req_id: str, moves: Sequence[tuple[int, tuple[int, int]]]) -> None:
        """Commit relocations: `(token_id, (block, offset))` each, all or none.

        Raises:
            Rejected: a target block is not owned by the request, or the offset is out of range.
            InvariantViolation: I2 would break. Nothing changes then.
        """
        table = self[req_id]
        if not moves:
            return
        targets = []
        for token_id, (block, offset) in moves:
            position = table.position_of_slot(block * self.block_size + offset)
            if not 0 <= offset < self.block_size or position < 0:
                raise Rejected(
                    f"request {req_id}: target ({block}, {offset}) of token {token_id} is not owned"
                )
            targets.append(position)
        ids = np.array([token_id for token_id, _ in moves], dtype=np.int32)
        table.move(ids, np.array(targets, dtype=np.int32))
