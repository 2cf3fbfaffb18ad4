"""An engine without a model: a scheduler, a worker and a KV cache of real bytes around the real
`Reclaimer`, `Mover`, `OnlineChecker` and `WorkerChecker`.

Each token's payload is a number that stands for its K and V: tokens of one prompt family that
were computed in a full context have the same one (as vLLM's prefix cache assumes); a token that
was computed after an eviction has one of its own, because it depends on the pruned context.

The step mirrors vLLM's: evict and reclaim for every running request, allocate, preempt on
exhaustion, admit with prefix hits, cache full blocks at allocation, register; then the worker
(`worker.py`) copies, clears new blocks, writes, and reads. As with async scheduling, later steps
may be scheduled before an earlier one is executed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vtoken.checks.online import OnlineChecker
from vtoken.checks.worker import WorkerChecker
from vtoken.core import (
    BackgroundParams,
    Flight,
    Observer,
    Observers,
    Reclaimer,
    ReclaimMode,
    RequestTable,
    StepLayout,
)
from vtoken.kv import KVLayout, Mover, TokenRowLayout, TransposedKeyLayout
from vtoken.testing.device import SimulatedDevice
from vtoken.testing.faults import ByteFault, must
from vtoken.testing.pool import FakePool
from vtoken.testing.scores import ScoreWatch
from vtoken.testing.worker import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    POISON,
    FakeWorker,
    Row,
    Step,
    numbers_of,
)
from vtoken.trace.format import Record
from vtoken.trace.recorder import Emitter

__all__ = ["POISON", "ByteFault", "FakeEngine", "FakeRequest", "Row", "Step"]


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


class FakeView:
    """`vtoken_spec.StateView` of the fake engine."""

    def __init__(self, pool: FakePool, reclaimer: Reclaimer) -> None:
        self.pool = pool
        self._reclaimer = reclaimer

    @property
    def requests(self) -> Mapping[str, RequestTable]:
        return {table.req_id: table for table in self._reclaimer.tables.values()}

    @property
    def flights(self) -> Sequence[Flight]:
        return self._reclaimer.flights


class FakeEngine:
    """See the module's docstring. `level` is that of both checkers; `device` and `lag` are the
    worker's."""

    def __init__(
        self,
        *,
        mode: ReclaimMode | str,
        block_size: int,
        num_blocks: int,
        level: int = 3,
        transposed: bool = False,
        recorded: bool = False,
        background: BackgroundParams | None = None,
        device: SimulatedDevice | None = None,
        lag: int = 1,
    ) -> None:
        self.block_size = block_size
        self.pool = FakePool(num_blocks=num_blocks, block_size=block_size)
        self.checker = OnlineChecker(level=level)
        self.reclaimer = Reclaimer(
            block_size=block_size,
            mode=ReclaimMode(mode),
            pool=self.pool,
            background=background,
        )
        if self.reclaimer.background is not None:
            beside = self.reclaimer.background
            self.pool.held_by = lambda: beside.held
        self.records: list[Record] = []
        observers: list[Observer] = []
        if recorded:
            observers.append(Emitter(self.pool, self.records.append))
        if level:
            observers.append(self.checker)
        self.reclaimer.observer = Observers(*observers) if observers else None
        self.view = FakeView(self.pool, self.reclaimer)
        self.checker.bind(self.view, background=self.reclaimer.background)
        self.cache = torch.full(
            (LAYERS, num_blocks, HEADS, block_size, 2 * HEAD_DIM), POISON, dtype=torch.int32
        )
        layout_class = TransposedKeyLayout if transposed else TokenRowLayout
        self.layout: KVLayout = layout_class([self.cache])
        self.executor = FakeWorker(self.layout, level=level, device=device, lag=lag)
        self.scores = ScoreWatch()
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.layouts: dict[str, StepLayout] = {}
        self.preemptions = 0
        self._victims: dict[str, list[int]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._gone: list[str] = []
        self._finished: list[str] = []
        # Blocks that were shared when their request was planned for, in this step.
        self._shared: dict[str, set[int]] = {}
        self._failed_allocations = 0

    @property
    def worker(self) -> WorkerChecker:
        """The worker's checks."""
        return self.executor.checker

    @property
    def mover(self) -> Mover:
        return self.executor.relocator.mover

    @mover.setter
    def mover(self, mover: Mover) -> None:
        self.executor.relocator.mover = mover

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
        self._drop(request, preempted=True)
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
        self._failed_allocations = 0
        self.reclaimer.begin_step()
        for request in self.running:
            self._evict_and_reclaim(request)
        self._victims.clear()
        scheduled, adopted = self._allocate(frozenset(skip), cap)
        step = Step(self._gone, self._finished, self.reclaimer.take_orders(), [], [])
        self._gone, self._finished, self.layouts = [], [], {}
        for req_id, count in scheduled.items():
            step.rows.append(self._register(req_id, count, adopted.get(req_id)))
            hits = adopted.get(req_id, 0) // self.block_size
            step.fresh += step.rows[-1].new_blocks[hits:]
        step.taps = self.scores.end_step()
        self.reclaimer.end_step(pressure=self._failed_allocations > 0)
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
        live = np.flatnonzero(table.live)
        numbers = [request.payloads[token] for token in live.tolist()]
        self.scores.row(
            table, prompt_len=request.prompt_len, count=count, ids=live, numbers=numbers
        )
        return Row(
            req_id,
            start,
            count,
            adopted is not None,
            new_blocks,
            layout,
            [request.payloads[token] for token in range(start, end)],
            sorted(numbers),
            table.snapshot() if watched else None,
        )

    def execute(self, step: Step) -> None:
        """The worker's half: steps are executed in the order in which they were scheduled."""
        self.executor.execute(step)
        self.scores.hear(self.executor.take_scores(), self.reclaimer.tables)

    def _evict_and_reclaim(self, request: FakeRequest) -> None:
        table = self.reclaimer.tables.get(request.req_id)
        if table is None:
            return
        shared = {b for b in table.blocks.tolist() if self.pool.ref_count(b) > 1}
        self._shared[request.req_id] = shared
        victims = self._victims.get(request.req_id)
        if victims:
            self.reclaimer.evict(request.req_id, np.array(victims, dtype=np.int32))
        if table.num_holes or self.reclaimer.background is not None:
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
            total = self._blocks(known + count)
            unused = sum(self.pool.ref_count(block) == 0 for block in hits)
            self._make_room(total - len(hits) + unused)
            if not self.pool.adopt(request.req_id, hits, total):
                self._failed_allocations += 1
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
        self._make_room(need - have)
        if not self.pool.extend(request.req_id, max(need, have)):
            self._failed_allocations += 1
            return False
        self._cache_full(request, total)
        return True

    def _make_room(self, wanted: int) -> None:
        if wanted > self.pool.num_free:
            self.reclaimer.yield_headroom()

    def _cache_full(self, request: FakeRequest, total: int) -> None:
        table = self.reclaimer.tables.get(request.req_id)
        if table is not None and table.evicted:
            return
        for index, block in enumerate(self.pool.lists[request.req_id][: total // self.block_size]):
            self.pool.cache(block, self._key(request, index))

    # ------------------------------------------------------------------ what must hold

    def verify(self) -> None:
        """The promises of a step on bytes, counts and views; checks nothing by the checkers."""
        self.executor.synchronize()
        self.scores.hear(self.executor.take_scores(), self.reclaimer.tables)
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
        beside = self.reclaimer.background
        if beside is not None:
            known = sorted(beside.headroom) == sorted(self.pool.headroom)
            must(known, f"headroom {beside.headroom}, but {self.pool.headroom} are reserved for it")
        keys = {block: self.pool.key(block) for block in range(1, self.pool.num_blocks)}
        cached = [block for block, key in keys.items() if key is not None]
        slots = torch.tensor(cached)[:, None] * self.block_size + torch.arange(self.block_size)
        found = numbers_of(self.layout.read(slots.reshape(-1))) if cached else []
        for index, block in enumerate(cached):
            content = [self._numbers.get(name) for name in keys[block] or ()]
            kept = found[index * self.block_size : (index + 1) * self.block_size] == content
            must(kept, f"cached block {block} changed")

    def _verify_size(self, request: FakeRequest, table: RequestTable) -> None:
        if self.reclaimer.mode is not ReclaimMode.EAGER:
            return
        shared = self._shared.get(request.req_id, set())
        layout = self.layouts.get(request.req_id)
        if layout is not None and layout.holes:
            holes = set((table.hole_positions() // self.block_size).tolist())
            private = {int(table.blocks[i]) for i in holes} - shared
            must(not private, f"{request.req_id}: holes in private blocks {sorted(private)}")
        if layout is not None and not shared:
            few = table.num_blocks <= self._blocks(table.num_live) + 1
            must(few, f"{request.req_id}: {table.num_blocks} blocks for {table.num_live} tokens")

    def seen(self, req_id: str) -> dict[int, int]:
        """Live id -> payload, as the bytes in the cache say."""
        table = self.table(req_id)
        slots = torch.from_numpy(table.live_slots().astype(np.int64))
        payload = self.layout.read(slots)
        return dict(zip(np.flatnonzero(table.live).tolist(), numbers_of(payload), strict=True))

    def visible(self) -> dict[str, dict[int, int]]:
        return {req_id: self.seen(req_id) for req_id in self.reclaimer.tables}

    # ------------------------------------------------------------------ inside

    def _drop(self, request: FakeRequest, *, preempted: bool = False) -> None:
        self.reclaimer.drop(request.req_id, preempted=preempted)
        self.pool.release(request.req_id)
        self.running.remove(request)
        self._gone.append(request.req_id)
        self._victims.pop(request.req_id, None)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

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
