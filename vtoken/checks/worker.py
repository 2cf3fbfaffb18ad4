"""The checker beside the model runner: what was really copied (I1) and really read (L6, L7).

Level 1: L6 by count: each dense row's length in slots is the number of live tokens.
Level 2: also I1 for every move, by digests of K and V in all layers before and after; L6 and L7
against the table for requests whose layout changed, and for all requests every few steps.
Level 3: L6 and L7 for every request every step, and I1 over time: each live token's payload is
what it was when it was first seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

import vtoken_spec as spec
from vtoken.checks import fast
from vtoken.checks.judge import LawCounts, judge, screened
from vtoken.core.arrays import TableSnapshot
from vtoken.core.layout import CopyOrder, LayoutChange
from vtoken.errors import InvariantViolation
from vtoken.kv.digests import payload_digests
from vtoken.kv.layouts import KVLayout

Ints = npt.NDArray[np.integer]
_BATCH_BYTES = 64 * 1024 * 1024


class WorkerChecker:
    """Compares bytes and buffers with what the token table promises.

    Args:
        layout: the KV cache.
        level: 0 to 3.
    """

    def __init__(self, layout: KVLayout, *, level: int) -> None:
        self.level = level
        self._layout = layout
        self._counts = LawCounts()
        self._before: dict[str, dict[int, bytes]] = {}
        self._flying: dict[int, dict[int, bytes]] = {}
        self._seen: dict[str, tuple[int, dict[int, bytes]]] = {}

    @property
    def watches_moves(self) -> bool:
        return self.level >= 2

    @property
    def watched_flights(self) -> frozenset[int]:
        """Plans of which it keeps digests."""
        return frozenset(self._flying)

    def counts(self) -> dict[str, int]:
        """Evaluations per law since start: tokens for I1, rows for L6, writes for L7."""
        return self._counts.as_dict()

    # ------------------------------------------------------------------ I1

    def before_moves(self, changes: Sequence[LayoutChange]) -> None:
        """Digest what is about to move."""
        self._before = {
            change.req_id: self._digests(change.token_ids, change.sources) for change in changes
        }

    def after_moves(self, changes: Sequence[LayoutChange]) -> None:
        """I1: every moved token has the same K and V bytes in every layer.

        Raises:
            InvariantViolation
        """
        for change in changes:
            if len(change.token_ids) == 0:
                continue
            after = self._digests(change.token_ids, change.targets)
            judge(spec.i1_conservation(self._before[change.req_id], after, req_id=change.req_id))
            self._counts.add("I1", len(after))
        self._before = {}

    def launching(self, order: CopyOrder) -> None:
        """Digest what a plan is going to copy beside the steps."""
        self._flying[order.flight] = self._digests(order.token_ids, order.sources)

    def landed(self, change: LayoutChange) -> None:
        """I1 for a plan that is committed, behind the wait for its copies: each token that moves
        has the bytes that it had when the copies were started.

        Raises:
            InvariantViolation
        """
        before = self._flying.pop(change.flight)
        after = self._digests(change.token_ids, change.targets)
        kept = {token: before[token] for token in after}
        judge(spec.i1_conservation(kept, after, req_id=change.req_id))
        self._counts.add("I1", len(after))

    def dropped_flight(self, flight: int) -> None:
        """The plan was aborted."""
        self._flying.pop(flight, None)

    def _digests(self, token_ids: Ints, slots: Ints) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        step = max(1, _BATCH_BYTES // self._layout.token_bytes)
        for first in range(0, len(token_ids), step):
            batch = torch.from_numpy(slots[first : first + step].astype(np.int64))
            payload = self._layout.read(batch.to(self._layout.device))
            ids = token_ids[first : first + step].tolist()
            found.update(zip(ids, payload_digests(payload), strict=True))
        return found

    def _check_payloads(self, table: TableSnapshot, first_new: int) -> None:
        """Level 3: a token's payload never changes as long as the request lives."""
        life, seen = self._seen.get(table.req_id, (0, {}))
        if life != table.life:
            # New, or preempted and begun anew. What it adopts may still be written in this very
            # step, by the request that it shares the prefix with: its payloads count from the next.
            self._seen[table.req_id] = (table.life, {})
            return
        old = np.flatnonzero(table.live[:first_new])
        now = self._digests(old, table.slots[old])
        before = {token: seen[token] for token in now if token in seen}
        after = {token: digest for token, digest in now.items() if token in seen}
        judge(spec.i1_conservation(before, after, req_id=table.req_id))
        self._counts.add("I1", len(after))
        self._seen[table.req_id] = (table.life, now)

    def forget(self, req_id: str) -> None:
        """The request is gone."""
        self._seen.pop(req_id, None)

    # ------------------------------------------------------------------ L6, L7

    def check_lengths(self, req_ids: Sequence[str], lengths: Ints, live: Ints) -> None:
        """Level 1's L6: dense rows have as many slots as the request has live tokens.

        Raises:
            InvariantViolation
        """
        self._counts.add("L6", len(req_ids))
        wrong = np.flatnonzero(lengths != live)
        if len(wrong):
            row = int(wrong[0])
            raise InvariantViolation(
                law="L6",
                message=f"attention would read {int(lengths[row])} slots for {int(live[row])} "
                "live tokens",
                req_id=req_ids[row],
            )

    def check_access(
        self,
        table: TableSnapshot,
        *,
        block_row: Ints,
        seq_len: int,
        gathered: Ints | None,
        writes: Ints,
        query_positions: Ints,
    ) -> None:
        """L6 and L7 from the buffers that attention and the cache write are given.

        Args:
            table: the request's table with this step's tokens in it.
            block_row: the row of vLLM's block table.
            seq_len: the row's length in slots.
            gathered: slots of the gather view, or None for the dense view.
            writes: slot mapping of the row's new tokens.
            query_positions: their logical positions.

        Raises:
            InvariantViolation
        """
        size = self._layout.block_size
        if gathered is None:
            place = np.arange(seq_len)
            reads = block_row[place // size].astype(np.int64) * size + place % size
        else:
            reads = gathered.astype(np.int64)
        request = _OneRequest(table)
        count = len(writes)
        self._counts.add("L6")
        screened(
            law="L6",
            holds=fast.l6_reads(table.slots, table.live, reads, query_positions),
            breaches=spec.l6_read_set(request, spec.ReadSet(table.req_id, reads, query_positions)),
            what=f"request {table.req_id}",
        )
        self._counts.add("L7", count)
        wrong = np.flatnonzero(writes != table.slots[-count:])
        if len(wrong):
            index = int(wrong[0])
            token = table.logical_len - count + index
            raise InvariantViolation(
                law="L7",
                message="a new token's KV would be written to another slot than the table's",
                req_id=table.req_id,
                token_id=token,
                slot=int(writes[index]),
                before=int(table.slots[token]),
                after=int(writes[index]),
            )
        if self.level >= 3:
            self._check_payloads(table, table.logical_len - count)

    def check_scores(
        self, req_id: str, values: npt.NDArray[np.float32], *, queries: int, heads: int
    ) -> None:
        """Level 2: a row's attention weights are non-negative and sum to one per observed query
        and head: no layer, head, query or rank was left out or counted twice. Which slots were
        read does not show in the sum, since each softmax makes it one; `check_access` looks at
        those.

        Args:
            values: summed over queries and heads, float32 `[k]`.
            heads: query heads times tapped layers, over all ranks.

        Raises:
            InvariantViolation: L6.
        """
        if self.level < 2:
            return
        self._counts.add("L6")
        total, due = float(values.sum(dtype=np.float64)), queries * heads
        if not (np.isfinite(values).all() and values.min() >= 0 and abs(total - due) <= 1e-3 * due):
            raise InvariantViolation(
                law="L6",
                message=f"attention weights of {queries} queries and {heads} heads sum to {total}",
                req_id=req_id,
                before=due,
            )


class _OneRequest:
    """A `StateView` of one request; L6 reads nothing of the pool."""

    pool: spec.PoolView

    flights: tuple[spec.FlightView, ...] = ()

    def __init__(self, table: TableSnapshot) -> None:
        self.requests = {table.req_id: table}
