"""The worker's half of relocation: starts copies, waits for them, moves in step order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from vtoken.core.arrays import IntArray
from vtoken.core.layout import NO_FLIGHT, CopyOrder, LayoutChange, StepOrders
from vtoken.errors import InvariantViolation
from vtoken.kv.mover import Mover
from vtoken.kv.streams import CopyEvent, CopyFailed, CopyStream
from vtoken.kv.translation import on_device


class RelocationWatch(Protocol):
    """Who compares bytes before and after (I1)."""

    def before_moves(self, changes: Sequence[LayoutChange]) -> None: ...

    def after_moves(self, changes: Sequence[LayoutChange]) -> None: ...

    def launching(self, order: CopyOrder) -> None: ...

    def landed(self, change: LayoutChange) -> None: ...

    def dropped_flight(self, flight: int) -> None: ...


_NO_SLOTS: IntArray = np.empty(0, dtype=np.int32)

Run = Callable[..., None]
"""`run(action, kind=..., owner=..., reads=..., writes=...)` gives the compute stream an action."""


def run_now(action: Callable[[], None], **_: Any) -> None:
    """Where the compute stream is the calling thread."""
    action()


class Relocator:
    """Executes a step's orders, before anything else of the step.

    Launches come first: they read and write slots that nothing in flight touches, behind all
    that the compute stream was given. Then the compute stream waits for what is committed or
    aborted, so that whatever follows in it comes after those copies: the switch of the layout, the
    zeroing and the writes of whoever got one of the blocks.

    Args:
        mover: copies tokens.
        stream: runs copies beside the steps.
        watch: compares digests, or None.
        run: gives an action to the compute stream.
    """

    def __init__(
        self,
        mover: Mover,
        stream: CopyStream,
        *,
        watch: RelocationWatch | None = None,
        run: Run = run_now,
    ) -> None:
        self.mover = mover
        self._stream = stream
        self._watch = watch
        self._run = run
        self.failed_copies = 0
        self._events: dict[int, CopyEvent] = {}
        self._told: set[int] = set()

    def apply(self, orders: StepOrders) -> None:
        """Execute `orders`; afterwards the block lists may be switched to `orders.changes`.

        Raises:
            InvariantViolation: I1, or I3 for a plan that is waited for and was never launched.
        """
        landed = [change for change in orders.changes if change.flight != NO_FLIGHT]
        committed = {change.flight: change for change in landed}
        for order in orders.launches:
            self._launch(order)
        for number in orders.waits:
            self._wait(number, committed.get(number))
        self._move([change for change in orders.changes if change.flight == NO_FLIGHT])
        if self._watch is not None:
            for change in landed:
                self._look(self._watch.landed, change, change.targets, change.req_id)
            for number in orders.waits:
                if number not in committed:
                    self._look(self._watch.dropped_flight, number, _NO_SLOTS, None)

    def _launch(self, order: CopyOrder) -> None:
        if self._watch is not None:
            self._look(self._watch.launching, order, order.sources, order.req_id)
        copies = self.mover.copies(
            self._slots(order.sources), self._slots(order.targets), owner=order.req_id
        )
        self._events[order.flight] = self._stream.launch(copies)

    def take_failed(self) -> list[int]:
        """Plans in flight of which a copy is known to have failed, each once: the scheduler should
        abort them while they are not committed."""
        failed = [
            number
            for number, event in self._events.items()
            if event.error is not None and number not in self._told
        ]
        self._told.update(failed)
        return failed

    def _wait(self, number: int, change: LayoutChange | None) -> None:
        event = self._events.pop(number, None)
        if event is None:
            raise InvariantViolation(
                law="I3", message=f"plan {number} is waited for, but was never launched"
            )
        self._told.discard(number)
        try:
            self._stream.wait(event)
        except CopyFailed:
            self.failed_copies += 1
            if change is not None:
                # All ranks commit, whatever happened on one of them. Its sources are as they
                # were until now, so what the copy stream could not do is done in step order.
                self._copy(change.sources, change.targets)

    def _move(self, changes: Sequence[LayoutChange]) -> None:
        if not changes:
            return
        sources = np.concatenate([change.sources for change in changes])
        if len(sources) == 0:
            return
        targets = np.concatenate([change.targets for change in changes])
        if self._watch is not None:
            self._look(self._watch.before_moves, changes, sources, None)
        self._copy(sources, targets)
        if self._watch is not None:
            self._look(self._watch.after_moves, changes, targets, None)

    def _copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy in step order."""
        move_from, move_to = self._slots(sources), self._slots(targets)
        self._run(
            lambda: self.mover.move(move_from, move_to),
            kind="write",
            owner=None,
            reads=sources,
            writes=targets,
        )

    def _look(
        self, check: Callable[[Any], None], what: Any, reads: IntArray, owner: str | None
    ) -> None:
        self._run(lambda: check(what), kind="attend", owner=owner, reads=reads, writes=())

    def _slots(self, slots: IntArray) -> torch.Tensor:
        return on_device(slots, self.mover.layout.device)
