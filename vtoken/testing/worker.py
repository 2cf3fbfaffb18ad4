"""The worker of the engine without a model: executes steps on a cache of real bytes.

With a `SimulatedDevice` nothing runs when a step is executed: its operations are queued, copies in
flight interleave with them as the adversary likes, and what goes wrong shows when the host
synchronises. Without one everything runs at once, in step order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from vtoken.checks.judge import judge
from vtoken.checks.worker import WorkerChecker
from vtoken.core import StepLayout, StepOrders
from vtoken.core.arrays import TableSnapshot
from vtoken.core.layout import LayoutChange
from vtoken.kv import KVLayout, Mover
from vtoken.kv.relocator import Relocator, run_now
from vtoken.kv.streams import CopyStream, SynchronousCopyStream
from vtoken.kv.translation import TranslationCache
from vtoken.policies.taps import TappedStep, Taps
from vtoken.testing.device import COMPUTE, COPY, AdversarialCopyStream, SimulatedDevice
from vtoken.testing.faults import must
from vtoken.testing.scores import Coming
from vtoken_spec.order import races

LAYERS, HEADS, HEAD_DIM = 2, 2, 2
_VALUES = LAYERS * 2 * HEADS * HEAD_DIM
_OFFSETS = np.arange(_VALUES, dtype=np.int32)
POISON = -7
_LOG_LENGTH = 400


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
        orders: what is to be done about relocation, first of all.
        fresh: blocks that are new to their request and hold nothing of it.
        taps: rows whose attention weights are wanted.
    """

    gone: list[str]
    finished: list[str]
    orders: StepOrders
    fresh: list[int]
    rows: list[Row]
    taps: Taps | None = None

    @property
    def changes(self) -> list[LayoutChange]:
        return self.orders.changes


class FakeWorker:
    """Executes steps in the order in which they were scheduled.

    Args:
        layout: the KV cache.
        level: check level of the worker's checks.
        device: see the module's docstring.
        lag: with a device, how many steps are executed before the host synchronises.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        level: int,
        device: SimulatedDevice | None = None,
        lag: int = 1,
    ) -> None:
        self.layout = layout
        self.checker = WorkerChecker(layout, level=level)
        self.device = device
        self.lag = lag
        self.rows: dict[str, list[int]] = {}
        stream: CopyStream = SynchronousCopyStream()
        self._run: Callable[..., None] = run_now
        if device is not None:
            stream, self._run = AdversarialCopyStream(device), partial(device.submit, COMPUTE)
        # Batches of two tokens, so that copies of one plan interleave with the steps.
        workspace = 2 * layout.token_bytes if device is not None else 1 << 20
        watch = self.checker if self.checker.watches_moves else None
        mover = Mover(layout, workspace_bytes=workspace)
        self.relocator = Relocator(mover, stream, watch=watch, run=self._run)
        self.translation = TranslationCache()
        self.gathered: dict[str, np.ndarray] = {}
        self._behind = 0
        self._coming: deque[Coming] = deque()

    # ------------------------------------------------------------------ one step

    def execute(self, step: Step) -> None:
        """As vLLM's runner: relocation, new blocks zeroed, inputs prepared and checked, then all
        rows are written and read."""
        for req_id in step.gone:
            self.rows.pop(req_id, None)
            self.translation.forget(req_id)
        for req_id in step.finished:
            self._run(partial(self.checker.forget, req_id), kind="attend")
        self.relocator.apply(step.orders)
        for change in step.changes:
            self.rows[change.req_id] = list(change.blocks)
        if step.fresh:
            self._run(partial(self._zero, step.fresh), kind="zero", writes=self._all(step.fresh))
        for row in step.rows:
            known = [] if row.is_new else self.rows[row.req_id]
            self.rows[row.req_id] = known + row.new_blocks
        self.gathered = {
            row.req_id: self.translation.take(row.req_id, row.layout, row.count).numpy()
            for row in step.rows
            if row.layout.holes
        }
        self._check_inputs(step)
        for row in step.rows:
            slots = _long(self._new_slots(row))
            write = partial(self.layout.write, slots, _bytes_of(row.written))
            self._run(write, kind="write", owner=row.req_id, writes=slots)
        coming = None if step.taps is None else Coming(step.taps, {})
        if coming is not None:
            self._coming.append(coming)
        for row in step.rows:
            slots = _long(self._slots_to_read(row))
            attend = partial(self._attend, row, slots, coming)
            self._run(attend, kind="attend", owner=row.req_id, reads=slots)
        self._behind += 1
        if self.device is not None:
            self.device.elapse()
            if self._behind >= self.lag:
                self.synchronize()

    def take_scores(self) -> list[TappedStep]:
        """Attention weights of the steps that have been computed, each given once."""
        found = []
        while self._coming and self._coming[0].whole:
            coming = self._coming.popleft()
            found.append(TappedStep(coming.taps.number, coming.rows))
        return found

    def synchronize(self) -> None:
        """The host waits for the compute stream; copies that nobody waited for may go on."""
        self._behind = 0
        if self.device is None:
            return
        self.device.synchronize(COMPUTE)
        if len(self.device.log) > _LOG_LENGTH:
            self.device.synchronize(COPY)
        if not self.device.queued(COPY):
            judge(races(self.device.log))
            self.device.forget()

    def drain(self) -> None:
        """The host waits for everything, and the streams are judged."""
        self.synchronize()
        if self.device is not None:
            self.device.synchronize(COPY)
            judge(races(self.device.log))
            self.device.forget()

    # ------------------------------------------------------------------ inside

    def _check_inputs(self, step: Step) -> None:
        dense = [row for row in step.rows if not row.layout.holes]
        if dense and self.checker.level:
            self.checker.check_lengths(
                [row.req_id for row in dense],
                np.array([row.start + row.count - row.layout.reclaimed for row in dense]),
                np.array([row.layout.num_live for row in dense]),
            )
        for row in step.rows:
            table = row.expected
            if table is None:
                continue
            end = row.start + row.count
            check = partial(
                self.checker.check_access,
                table,
                block_row=np.array(self.rows[row.req_id], dtype=np.int32),
                seq_len=end - row.layout.reclaimed,
                gathered=self.gathered.get(row.req_id),
                writes=self._new_slots(row),
                query_positions=np.arange(row.start, end),
            )
            known = table.slots[: row.start][table.live[: row.start]]
            self._run(check, kind="attend", owner=row.req_id, reads=known)

    def _zero(self, blocks: Sequence[int]) -> None:
        for cache in self.layout.caches:
            cache[:, blocks] = POISON

    def _attend(self, row: Row, slots: torch.Tensor, coming: Coming | None) -> None:
        found = numbers_of(self.layout.read(slots))
        must(sorted(found) == row.live, f"{row.req_id}: attention reads other bytes")
        if coming is not None:
            coming.read(row.req_id, found)

    def _new_slots(self, row: Row) -> np.ndarray:
        """Slots as told, which several tokens also derive from row, logical position and lag."""
        told = row.layout.new_slots[-row.count :].astype(np.int64)
        if row.count > 1:  # a single one may recycle a hole
            places = np.arange(row.start, row.start + row.count) - row.layout.reclaimed
            derived = self._slots(self.rows[row.req_id], places)
            must(np.array_equal(told, derived), f"{row.req_id}: told slots are not the row's")
        return told

    def _slots_to_read(self, row: Row) -> np.ndarray:
        """What attention is given: the dense view, or the slots to gather."""
        if row.req_id in self.gathered:
            return self.gathered[row.req_id]
        length = row.start + row.count - row.layout.reclaimed
        return self._slots(self.rows[row.req_id], np.arange(length))

    def _slots(self, row: list[int], places: np.ndarray) -> np.ndarray:
        size = self.layout.block_size
        return np.array(row, dtype=np.int64)[places // size] * size + places % size

    def _all(self, blocks: Iterable[int]) -> list[int]:
        size = self.layout.block_size
        return [block * size + offset for block in blocks for offset in range(size)]


def _long(slots: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64))


def _bytes_of(numbers: list[int]) -> torch.Tensor:
    """K and V of tokens whose payloads have these numbers; no two values are equal."""
    values = np.array(numbers, dtype=np.int32)[:, None] * np.int32(_VALUES) + _OFFSETS
    return torch.from_numpy(values).reshape(len(numbers), LAYERS, 2, HEADS, HEAD_DIM)


def numbers_of(payload: torch.Tensor) -> list[int]:
    """The payloads' numbers; a payload that is nobody's gives -1."""
    # Small arrays: numpy's calls are several times cheaper than torch's.
    flat = payload.numpy().reshape(len(payload), _VALUES)
    number = flat[:, 0] // _VALUES
    whole = (flat == number[:, None] * _VALUES + _OFFSETS).all(axis=1)
    found: list[int] = np.where(whole, number, -1).tolist()
    return found
