"""An engine without a model: a scheduler, a worker and a KV cache of real bytes around the real
`Reclaimer`, `Mover`, `OnlineChecker` and `WorkerChecker`.

Each token's payload is a number that stands for its K and V: tokens of one prompt family that
were computed in a full context have the same one (as vLLM's prefix cache assumes); a token that
was computed after an eviction has one of its own, because it depends on the pruned context.

The step mirrors vLLM's: evict and reclaim for every running request, allocate, preempt on
exhaustion, admit with prefix hits, cache full blocks at allocation, register; then the worker
copies, clears new blocks, writes, and reads. As with async scheduling, later steps may be
scheduled before an earlier one is executed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from vtoken.checks.online import OnlineChecker
from vtoken.checks.worker import WorkerChecker
from vtoken.core import (
    LayoutChange,
    Observer,
    Observers,
    Reclaimer,
    ReclaimMode,
    RequestTable,
    StepLayout,
)
from vtoken.core.arrays import TableSnapshot
from vtoken.kv import KVLayout, Mover, TokenRowLayout, TransposedKeyLayout
from vtoken.testing.pool import FakePool
from vtoken.trace.format import Record
from vtoken.trace.recorder import Emitter

LAYERS, HEADS, HEAD_DIM = 2, 2, 2
_VALUES = LAYERS * 2 * HEADS * HEAD_DIM
POISON = -7


class ByteFault(AssertionError):
    """What the harness sees in the cache itself is not what was promised."""


def must(holds: bool, what: str) -> None:
    """Raise `ByteFault` unless it holds."""
    if not holds:
        raise ByteFault(what)


@dataclass
class FakeRequest:
    """`target` tokens are known, the first `computed` of them are in the cache."""

    req_id: str
    family: int
    prompt_len: int
    target: int
    computed: int = 0
    life: int = 0
    payloads: dict[int, int] = field(default_factory=dict)


@dataclass
class Row:
    """One scheduled request, as a worker is told of it.

    Attributes:
        start, count: its new tokens are `start .. start + count - 1`.
        is_new: whether the worker has no row of it yet.
        written: payloads of the new tokens.
        live: payloads of all live tokens, sorted: what attention has to see.
        expected: the table, where the checker wants to compare.
    """

    req_id: str
    start: int
    count: int
    is_new: bool
    new_blocks: list[int]
    layout: StepLayout
    written: list[int]
    live: list[int]
    expected: TableSnapshot | None


@dataclass
class Step:
    """What the scheduler hands to the worker: nothing in it changes when the tables do.

    Attributes:
        gone: requests that finished or were preempted since the step before.
        finished: those of them that will not come back.
        fresh: blocks that are new to their request and hold nothing of it.
    """

    gone: list[str]
    finished: list[str]
    changes: list[LayoutChange]
    fresh: list[int]
    rows: list[Row]


class FakeView:
    """`vtoken_spec.StateView` of the fake engine."""

    def __init__(self, pool: FakePool, reclaimer: Reclaimer) -> None:
        self.pool = pool
        self._reclaimer = reclaimer

    @property
    def requests(self) -> Mapping[str, RequestTable]:
        return {table.req_id: table for table in self._reclaimer.tables.values()}


class FakeEngine:
    """See the module's docstring. `level` is that of both checkers."""

    def __init__(
        self,
        *,
        mode: ReclaimMode | str,
        block_size: int,
        num_blocks: int,
        level: int = 3,
        transposed: bool = False,
        recorded: bool = False,
    ) -> None:
        self.block_size = block_size
        self.pool = FakePool(num_blocks=num_blocks, block_size=block_size)
        self.checker = OnlineChecker(level=level)
        self.reclaimer = Reclaimer(
            block_size=block_size,
            mode=ReclaimMode(mode),
            pool=self.pool,
        )
        self.records: list[Record] = []
        observers: list[Observer] = []
        if recorded:
            observers.append(Emitter(self.pool, self.records.append))
        if level:
            observers.append(self.checker)
        self.reclaimer.observer = Observers(*observers) if observers else None
        self.view = FakeView(self.pool, self.reclaimer)
        self.checker.bind(self.view)
        self.cache = torch.full(
            (LAYERS, num_blocks, HEADS, block_size, 2 * HEAD_DIM), POISON, dtype=torch.int32
        )
        layout_class = TransposedKeyLayout if transposed else TokenRowLayout
        self.layout: KVLayout = layout_class([self.cache])
        self.mover = Mover(self.layout)
        self.worker = WorkerChecker(self.layout, level=level)
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.rows: dict[str, list[int]] = {}
        self.layouts: dict[str, StepLayout] = {}
        self.preemptions = 0
        self._victims: dict[str, list[int]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._gone: list[str] = []
        self._finished: list[str] = []
        # Blocks that were shared when their request was planned for, in this step.
        self._shared: dict[str, set[int]] = {}

    # ------------------------------------------------------------------ what a test asks for

    def add(self, req_id: str, *, prompt_len: int, family: int = 0) -> None:
        self.waiting.append(FakeRequest(req_id, family, prompt_len, target=prompt_len))

    def evict(self, req_id: str, token_ids: Iterable[int]) -> None:
        """A policy's decision, carried out at the start of the next step."""
        self._victims.setdefault(req_id, []).extend(int(token) for token in token_ids)

    def forget_evictions(self) -> None:
        self._victims.clear()

    def grow(self, req_id: str, count: int) -> None:
        """More input tokens arrive: the next step computes several at once."""
        self.request(req_id).target += count

    def finish(self, req_id: str) -> None:
        request = self.request(req_id)
        self._drop(request)
        self._finished.append(req_id)

    def preempt(self, req_id: str) -> None:
        request = self.request(req_id)
        self._drop(request)
        request.computed, request.life = 0, request.life + 1
        request.payloads.clear()
        self.waiting.insert(0, request)
        self.preemptions += 1

    def request(self, req_id: str) -> FakeRequest:
        return next(request for request in self.running if request.req_id == req_id)

    def table(self, req_id: str) -> RequestTable:
        return self.reclaimer.tables[req_id]

    def evictable(self, req_id: str) -> list[int]:
        """Ids that a policy may name now."""
        live = np.flatnonzero(self.table(req_id).live)[:-1].tolist()
        return [token for token in live if token not in self._victims.get(req_id, ())]

    # ------------------------------------------------------------------ one step

    def step(self, *, skip: Iterable[str] = (), cap: int = 1_000_000) -> dict[str, int]:
        """One scheduler and one worker step; returns the new tokens per request.

        Args:
            skip: running requests that are planned for but then not scheduled.
            cap: most tokens of one request in this step (chunked prefill).
        """
        step = self.schedule(skip=skip, cap=cap)
        self.execute(step)
        return {row.req_id: row.count for row in step.rows}

    def schedule(self, *, skip: Iterable[str] = (), cap: int = 1_000_000) -> Step:
        """The scheduler's half of a step; see `step`."""
        self._shared.clear()
        for request in self.running:
            self._evict_and_reclaim(request)
        self._victims.clear()
        scheduled, adopted = self._allocate(frozenset(skip), cap)
        step = Step(self._gone, self._finished, self.reclaimer.take_changes(), [], [])
        self._gone, self._finished, self.layouts = [], [], {}
        for req_id, count in scheduled.items():
            step.rows.append(self._register(req_id, count, adopted.get(req_id)))
            hits = adopted.get(req_id, 0) // self.block_size
            step.fresh += step.rows[-1].new_blocks[hits:]
        self.reclaimer.end_step()
        self.checker.end_step()
        return step

    def _register(self, req_id: str, count: int, adopted: int | None) -> Row:
        request = self.request(req_id)
        table = self.reclaimer.tables.get(req_id)
        known = 0 if table is None else table.num_blocks
        new_blocks = self.pool.lists[req_id][known:]
        start, end = request.computed, request.computed + count
        layout = self.reclaimer.schedule(req_id, new_blocks, end, adopted=adopted or 0)
        self.layouts[req_id] = layout
        table = self.table(req_id)
        for token in range(start, end):
            request.payloads[token] = self._payload(request, token, evicted=table.evicted)
        request.computed = end
        request.target = max(request.target, end + 1)
        watched = self.checker.watches_reads(req_id)
        return Row(
            req_id,
            start,
            count,
            adopted is not None,
            new_blocks,
            layout,
            [request.payloads[token] for token in range(start, end)],
            sorted(request.payloads[token] for token in np.flatnonzero(table.live).tolist()),
            table.snapshot() if watched else None,
        )

    def execute(self, step: Step) -> None:
        """The worker's half: steps are executed in the order in which they were scheduled."""
        for req_id in step.gone:
            self.rows.pop(req_id, None)
        for req_id in step.finished:
            self.worker.forget(req_id)
        self._copy(step.changes)
        self.cache[:, step.fresh] = POISON
        # As in vLLM's runner: inputs are prepared and checked, then all rows are written and read.
        for row in step.rows:
            known = [] if row.is_new else self.rows[row.req_id]
            self.rows[row.req_id] = known + row.new_blocks
        self._check_inputs(step)
        for row in step.rows:
            self.layout.write(_long(self._new_slots(row)), _bytes_of(row.written))
        for row in step.rows:
            found = self.layout.read(_long(self._slots_to_read(row)))
            must(
                sorted(_numbers_of(found)) == row.live, f"{row.req_id}: attention reads other bytes"
            )

    def _check_inputs(self, step: Step) -> None:
        dense = [row for row in step.rows if row.layout.live_slots is None]
        if dense and self.worker.level:
            self.worker.check_lengths(
                [row.req_id for row in dense],
                np.array([row.start + row.count - row.layout.reclaimed for row in dense]),
                np.array([row.layout.num_live for row in dense]),
            )
        for row in step.rows:
            if row.expected is not None:
                end = row.start + row.count
                self.worker.check_access(
                    row.expected,
                    block_row=np.array(self.rows[row.req_id], dtype=np.int32),
                    seq_len=end - row.layout.reclaimed,
                    gathered=row.layout.live_slots,
                    writes=self._new_slots(row),
                    query_positions=np.arange(row.start, end),
                )

    def _evict_and_reclaim(self, request: FakeRequest) -> None:
        table = self.reclaimer.tables.get(request.req_id)
        if table is None:
            return
        shared = {b for b in table.blocks.tolist() if self.pool.ref_count(b) > 1}
        self._shared[request.req_id] = shared
        victims = self._victims.get(request.req_id)
        if victims:
            self.reclaimer.evict(request.req_id, np.array(victims, dtype=np.int32))
        if table.num_holes:
            self.reclaimer.prepare(request.req_id, pending=request.target - request.computed)

    def _allocate(self, skip: frozenset[str], cap: int) -> tuple[dict[str, int], dict[str, int]]:
        scheduled: dict[str, int] = {}
        adopted: dict[str, int] = {}
        before = self.preemptions
        for request in list(self.running):
            if request not in self.running or request.req_id in skip:
                continue
            count = min(cap, request.target - request.computed)
            while not self._grow_list(request, count):
                victim = self.running[-1]
                scheduled.pop(victim.req_id, None)
                self.preempt(victim.req_id)
                if victim is request:
                    break
            else:
                scheduled[request.req_id] = count
        while self.waiting and self.preemptions == before:
            request = self.waiting[0]
            limit = (request.target - 1) // self.block_size
            hits = self.pool.lookup([self._key(request, i) for i in range(limit)])
            known = len(hits) * self.block_size
            count = min(cap, request.target - known)
            if not self.pool.adopt(request.req_id, hits, self._blocks(known + count)):
                break
            self.running.append(self.waiting.pop(0))
            request.computed = known
            for token in range(known):
                request.payloads[token] = self._payload(request, token, evicted=False)
            self._cache_full(request, known + count)
            scheduled[request.req_id] = count
            adopted[request.req_id] = known
        return scheduled, adopted

    def _grow_list(self, request: FakeRequest, count: int) -> bool:
        total = request.computed + count
        need = self._blocks(self.reclaimer.physical_need(request.req_id, total))
        have = len(self.pool.lists[request.req_id])
        if not self.pool.extend(request.req_id, max(need, have)):
            return False
        self._cache_full(request, total)
        return True

    def _cache_full(self, request: FakeRequest, total: int) -> None:
        table = self.reclaimer.tables.get(request.req_id)
        if table is not None and table.evicted:
            return
        for index, block in enumerate(self.pool.lists[request.req_id][: total // self.block_size]):
            self.pool.cache(block, self._key(request, index))

    def _copy(self, changes: list[LayoutChange]) -> None:
        if self.worker.watches_moves:
            self.worker.before_moves(changes)
        for change in changes:
            self.mover.move(_long(change.sources), _long(change.targets))
        if self.worker.watches_moves:
            self.worker.after_moves(changes)
        for change in changes:
            self.rows[change.req_id] = list(change.blocks)

    def _new_slots(self, row: Row) -> np.ndarray:
        """Slots as told, which several tokens also derive from row, logical position and lag."""
        places = np.arange(row.start, row.start + row.count) - row.layout.reclaimed
        told = row.layout.new_slots[-row.count :].astype(np.int64)
        if row.count > 1:  # a single one may recycle a hole
            derived = self._slots(self.rows[row.req_id], places)
            must(np.array_equal(told, derived), f"{row.req_id}: told slots are not the row's")
        return told

    def _slots_to_read(self, row: Row) -> np.ndarray:
        """What attention is given: the dense view, or the slots to gather."""
        if row.layout.live_slots is not None:
            return row.layout.live_slots
        length = row.start + row.count - row.layout.reclaimed
        return self._slots(self.rows[row.req_id], np.arange(length))

    # ------------------------------------------------------------------ what must hold

    def verify(self) -> None:
        """The promises of a step on bytes, counts and views; checks nothing by the checkers."""
        for request in self.running:
            if request.req_id not in self.reclaimer.tables:
                continue
            table = self.table(request.req_id)
            want = {
                int(token): request.payloads[int(token)] for token in np.flatnonzero(table.live)
            }
            must(self.seen(request.req_id) == want, f"{request.req_id}: live tokens' bytes changed")
            listed = self.pool.lists[request.req_id] == table.blocks.tolist()
            must(listed, f"{request.req_id}: pool and table list other blocks")
            self._verify_size(request, table)
        for block in range(1, self.pool.num_blocks):
            key = self.pool.key(block)
            if key is not None:
                slots = torch.arange(self.block_size) + block * self.block_size
                content = [self._numbers.get(name) for name in key]
                kept = _numbers_of(self.layout.read(slots)) == content
                must(kept, f"cached block {block} changed")

    def _verify_size(self, request: FakeRequest, table: RequestTable) -> None:
        if self.reclaimer.mode is not ReclaimMode.EAGER:
            return
        shared = self._shared.get(request.req_id, set())
        layout = self.layouts.get(request.req_id)
        if layout is not None and layout.live_slots is not None:
            holes = set((table.hole_positions() // self.block_size).tolist())
            private = {int(table.blocks[i]) for i in holes} - shared
            must(not private, f"{request.req_id}: holes in private blocks {sorted(private)}")
        if layout is not None and not shared:
            few = table.num_blocks <= self._blocks(table.num_live) + 1
            must(few, f"{request.req_id}: {table.num_blocks} blocks for {table.num_live} tokens")

    def seen(self, req_id: str) -> dict[int, int]:
        """Live id -> payload, as the bytes in the cache say."""
        table = self.table(req_id)
        payload = self.layout.read(_long(table.live_slots()))
        return dict(zip(np.flatnonzero(table.live).tolist(), _numbers_of(payload), strict=True))

    def visible(self) -> dict[str, dict[int, int]]:
        return {req_id: self.seen(req_id) for req_id in self.reclaimer.tables}

    # ------------------------------------------------------------------ inside

    def _drop(self, request: FakeRequest) -> None:
        self.reclaimer.drop(request.req_id)
        self.pool.release(request.req_id)
        self.running.remove(request)
        self._gone.append(request.req_id)
        self._victims.pop(request.req_id, None)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _slots(self, row: list[int], places: np.ndarray) -> np.ndarray:
        blocks = np.array(row, dtype=np.int64)[places // self.block_size]
        return blocks * self.block_size + places % self.block_size

    def _key(self, request: FakeRequest, index: int) -> tuple[Hashable, ...]:
        """What vLLM's block hash stands for: here, the names of the block's payloads. A name
        with the request in it fixes the prefix too, and so does one of a prompt family."""
        first = index * self.block_size
        return tuple(self._name(request, token) for token in range(first, first + self.block_size))

    @staticmethod
    def _name(request: FakeRequest, token: int) -> Hashable:
        return (request.family if token < request.prompt_len else request.req_id, token)

    def _payload(self, request: FakeRequest, token: int, *, evicted: bool) -> int:
        name = (request.req_id, request.life, token) if evicted else self._name(request, token)
        return self._numbers.setdefault(name, len(self._numbers) + 1)


def _long(slots: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64))


def _bytes_of(numbers: list[int]) -> torch.Tensor:
    """K and V of tokens whose payloads have these numbers; no two values are equal."""
    values = torch.tensor(numbers, dtype=torch.int32)[:, None] * _VALUES + torch.arange(_VALUES)
    return values.to(torch.int32).reshape(len(numbers), LAYERS, 2, HEADS, HEAD_DIM)


def _numbers_of(payload: torch.Tensor) -> list[int]:
    """Inverse of `_bytes_of`; a payload that is nobody's gives -1."""
    flat = payload.reshape(len(payload), _VALUES).to(torch.int64)
    number = flat[:, :1] // _VALUES
    whole = (flat == number * _VALUES + torch.arange(_VALUES)).all(dim=1)
    return torch.where(whole, number[:, 0], -1).tolist()
