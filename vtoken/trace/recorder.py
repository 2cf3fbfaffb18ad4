"""Records a serving engine's events; one point of emission for all of them."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vtoken_spec as spec
from vtoken.core.arrays import IntArray
from vtoken.core.flight import Flight
from vtoken.core.layout import LayoutChange, StepLayout
from vtoken.core.planner import DensePlan
from vtoken.core.request_table import RequestTable
from vtoken.errors import Rejected
from vtoken.trace.format import ENDINGS, Header, Record, end_line, header_line, line_of


class Emitter:
    """Turns the reclaimer's events into records; implements `vtoken.core.observer.Observer`.

    Args:
        pool: read for what the prefix cache holds.
        sink: takes each record.
    """

    def __init__(self, pool: spec.PoolView, sink: Callable[[Record], None]) -> None:
        self._pool = pool
        self._sink = sink
        self._cached: set[int] = set()

    # ------------------------------------------------------------------ events

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None:
        self._write(table, "evict", tokens=tuple(token_ids.tolist()))

    def planned(self, table: RequestTable, plan: DensePlan) -> None:
        """Nothing has changed yet; `reclaimed` tells what did."""

    def reclaimed(self, table: RequestTable, change: LayoutChange) -> None:
        if change.only_released:
            self._write(table, "release", blocks=tuple(change.dropped))
            return
        self._write(
            table,
            "move",
            tokens=tuple(change.token_ids.tolist()),
            sources=tuple(change.sources.tolist()),
            targets=tuple(change.targets.tolist()),
            blocks=tuple(change.dropped),
            order=tuple(change.blocks),
        )

    def writing(self, table: RequestTable, slots: IntArray, new_blocks: Sequence[int]) -> None:
        """`appended` tells what was written."""

    def appended(
        self,
        table: RequestTable,
        layout: StepLayout,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None:
        self._write(
            table,
            "recycle" if recycled else "append",
            slots=tuple(layout.new_slots.tolist()),
            blocks=tuple(new_blocks),
            adopted=adopted,
            reads=tuple(layout.reads(table).tolist()),
        )

    def reserved(self, blocks: Sequence[int]) -> None:
        self._sink(Record("reserve", blocks=tuple(blocks)))

    def unreserved(self, blocks: Sequence[int]) -> None:
        self._sink(Record("unreserve", blocks=tuple(blocks)))

    def prepared(self, table: RequestTable, flight: Flight) -> None:
        plan = flight.moves
        self._write(
            table,
            "prepare",
            tokens=tuple(plan.token_ids.tolist()),
            sources=tuple(plan.sources.tolist()),
            targets=tuple(plan.targets.tolist()),
            blocks=tuple(plan.released),
        )

    def landing(self, table: RequestTable, flight: Flight) -> None:
        """`committed` tells what came of it."""

    def committed(self, table: RequestTable, flight: Flight, change: LayoutChange) -> None:
        self._write(table, "commit")

    def aborted(self, flight: Flight) -> None:
        self._sink(Record("abort", flight.req_id))

    def dropped(self, table: RequestTable, *, preempted: bool) -> None:
        self._write(table, "preempt" if preempted else "finish")

    def _write(self, table: RequestTable, event: str, **fields: Any) -> None:
        # Only blocks that the event touches can have entered or left the prefix cache in a way
        # that matters to it or to a later hit.
        near = {*table.blocks.tolist(), *fields.get("blocks", ())}
        now = {block for block in near if self._pool.is_cached(block)}
        entered, left = now - self._cached, (near & self._cached) - now
        self._cached = (self._cached | entered) - left
        post = {}
        if event not in ENDINGS:
            post = {
                "live": table.num_live,
                "physical": table.physical_len,
                "blocks": table.num_blocks,
            }
        record = Record(
            event=event,
            req=table.req_id,
            cached=tuple(sorted(entered)),
            uncached=tuple(sorted(left)),
            post=post,
            **fields,
        )
        self._sink(record)


class Recorder(Emitter):
    """Writes a trace.

    Each record is written before the online checks judge the event, so a trace of a violation
    ends with the event that broke a law.

    Args:
        file: the trace, overwritten.
        pool: as for `Emitter`.
        about: for the header.

    Raises:
        Rejected: the file cannot be written.
    """

    def __init__(self, file: Path, pool: spec.PoolView, *, about: dict[str, Any]) -> None:
        super().__init__(pool, self._put)
        self.kinds: Counter[str] = Counter()
        header = Header(pool.block_size, pool.num_blocks, about)
        try:
            self._stream = file.open("w", encoding="utf-8")
            self._stream.write(header_line(header) + "\n")
        except OSError as error:
            raise Rejected(f"cannot write trace {file}: {error}") from error
        # An engine process may end without anybody closing its scheduler.
        atexit.register(self.close)

    def _put(self, record: Record) -> None:
        self._stream.write(line_of(record) + "\n")
        self.kinds[record.event] += 1

    def close(self) -> None:
        """Write the end line; idempotent. A trace without it counts as truncated."""
        if not self._stream.closed:
            self._stream.write(end_line(self.kinds.total()) + "\n")
            self._stream.close()
        atexit.unregister(self.close)
