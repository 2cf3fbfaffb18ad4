"""What the worker is told of a step: structural changes, how rows lie, copies to start and to wait
for. Everything is a snapshot: the tables move on while a step is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vtoken.core.arrays import IntArray
from vtoken.core.request_table import RequestTable

NO_FLIGHT = -1


@dataclass(frozen=True)
class LayoutChange:
    """One request's structural change in one step, as the worker needs it.

    Attributes:
        token_ids, sources, targets: the moves, in slots; int32 `[n]` each.
        blocks: the whole block list after the change and before this step's new blocks.
        dropped: blocks the request gave back.
        trimmed: whether the physical end was also cut back to the last live token.
        flight: number of the plan that this commits, whose copies were started earlier, or
            `NO_FLIGHT`: the moves are to be copied now.
    """

    req_id: str
    token_ids: IntArray
    sources: IntArray
    targets: IntArray
    blocks: list[int]
    dropped: list[int]
    trimmed: bool
    flight: int = NO_FLIGHT

    @property
    def only_released(self) -> bool:
        """Whole blocks went back; nothing moved and the physical end was not cut."""
        return len(self.token_ids) == 0 and len(self.dropped) > 0 and not self.trimmed


@dataclass
class StepLayout:
    """How one scheduled request's tokens lie in a step.

    Attributes:
        reclaimed: logical length minus physical length, after the step's tokens.
        holes: whether holes are left before the physical end: a view that skips them, else dense.
        live_slots: with holes, the slots of all live tokens in logical order where the worker
            does not have them, else None; int32.
        gone: with holes, and otherwise, the slots that are no longer live since it was told; int32.
        num_live: how many slots attention has to read, the step's tokens included.
        new_slots: where the step's tokens are written, in logical order; int32. Those that a
            new request adopts from the prefix cache come first and are not written.
    """

    reclaimed: int
    num_live: int
    new_slots: IntArray
    holes: bool = False
    live_slots: IntArray | None = None
    gone: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def reads(self, table: RequestTable) -> IntArray:
        """The slots that attention is given in the step, a chunk's own last; int32."""
        if self.holes:
            return table.live_slots()
        return table.slots_at(np.arange(table.physical_len, dtype=np.int32))


@dataclass(frozen=True)
class CopyOrder:
    """Copies of a plan that goes into flight.

    Attributes:
        flight: number of the plan.
        token_ids, sources, targets: the moves, in slots; int32 `[n]` each.
    """

    flight: int
    req_id: str
    token_ids: IntArray
    sources: IntArray
    targets: IntArray


@dataclass
class StepOrders:
    """What the worker does about relocation, in this order, before anything else of the step.

    Attributes:
        launches: copies to give to the copy stream.
        waits: numbers of the plans whose copies the compute stream waits for: those committed
            in this step, and those aborted since the step before.
        changes: structural changes, also of requests that are not scheduled.
    """

    launches: list[CopyOrder] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    changes: list[LayoutChange] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.launches or self.waits or self.changes)
