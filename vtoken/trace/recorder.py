"""Records a serving engine's events; one point of emission for all of them."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vtoken_spec as spec
from vtoken.core.arrays import IntArray
from vtoken.core.observer import LayoutChange
from vtoken.core.planner import DensePlan
from vtoken.core.request_table import RequestTable
from vtoken.errors import Rejected
from vtoken.trace.format import Header, Record, end_line, header_line, line_of


class Recorder:
    """Writes a trace; implements `vtoken.core.reclaimer.Observer`.

    Each record is written before the online checks judge the event, so a trace of a violation
    ends with the event that broke a law.

    Args:
        file: the trace, overwritten.
        pool: read for what the prefix cache holds and how many blocks are free.
        about: for the header.

    Raises:
        Rejected: the file cannot be written.
    """

    def __init__(self, file: Path, pool: spec.PoolView, *, about: dict[str, Any]) -> None:
        self._pool = pool
        self._cached: set[int] = set()
        self.records = 0
        header = Header(pool.block_size, pool.num_blocks, about)
        try:
            self._stream = file.open("w", encoding="utf-8")
            self._stream.write(header_line(header) + "\n")
        except OSError as error:
            raise Rejected(f"cannot write trace {file}: {error}") from error
        # An engine process may end without anybody closing its scheduler.
        atexit.register(self.close)

    def close(self) -> None:
        """Write the end line; idempotent. A trace without it counts as truncated."""
        if not self._stream.closed:
            self._stream.write(end_line(self.records) + "\n")
            self._stream.close()
        atexit.unregister(self.close)

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
        slots: IntArray,
        new_blocks: Sequence[int],
        adopted: int,
        *,
        recycled: bool,
    ) -> None:
        self._write(
            table,
            "recycle" if recycled else "append",
            slots=tuple(slots.tolist()),
            blocks=tuple(new_blocks),
            adopted=adopted,
        )

    def dropped(self, table: RequestTable) -> None:
        self._write(table, "finish")

    def _write(self, table: RequestTable, event: str, **fields: Any) -> None:
        # Only blocks that the event touches can have entered or left the prefix cache in a way
        # that matters to it or to a later hit.
        near = {*table.blocks.tolist(), *fields.get("blocks", ())}
        now = {block for block in near if self._pool.is_cached(block)}
        entered, left = now - self._cached, (near & self._cached) - now
        self._cached = (self._cached | entered) - left
        post = {}
        if event != "finish":
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
        self._stream.write(line_of(record) + "\n")
        self.records += 1
