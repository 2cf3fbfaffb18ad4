"""The order of what two streams did, judged from when each operation began and ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from support.lanes import Lanes
from vtoken.kv import KVLayout, Mover
from vtoken.kv.streams import Copy


@dataclass(frozen=True)
class Interval:
    """An operation on slots, and when it ran.

    Attributes:
        name: in messages.
        reads, writes: the slots.
        start, end: milliseconds from any common moment.
    """

    name: str
    reads: frozenset[int]
    writes: frozenset[int]
    start: float
    end: float

    def conflicts(self, other: Interval) -> bool:
        """Whether it matters which of the two comes first."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


def violations(issued: Sequence[Interval], *, tolerance: float = 0.0) -> list[str]:
    """Of operations in the order in which they were issued: each that began before an earlier one
    with which it conflicts had ended, in words. An attention step that reads a relocated token
    before its copy is complete is one, and so is a copy that reads what is not written yet.

    Args:
        tolerance: milliseconds that the clock may err by.
    """
    found = []
    for index, later in enumerate(issued):
        for earlier in issued[:index]:
            early = earlier.end - later.start
            if early > tolerance and earlier.conflicts(later):
                found.append(f"{later.name} began {early:.3f} ms before {earlier.name} had ended")
    return found


def overlap(one: Interval, other: Interval) -> float:
    """Milliseconds in which both ran."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


@dataclass(frozen=True)
class Place:
    """Slots, and the same on the device."""

    slots: tuple[int, ...]
    tensor: torch.Tensor


class Timeline:
    """Gives operations to two streams and notes when each of them ran.

    Places are made first: on a device a transfer from the host waits for what is queued, which
    would put an order where none is asked for.

    Args:
        layout: the cache.
    """

    def __init__(self, lanes: Lanes, layout: KVLayout) -> None:
        self.lanes = lanes
        self.layout = layout
        self.found: dict[str, torch.Tensor] = {}
        self._noted: list[tuple[str, frozenset[int], frozenset[int], list[Any]]] = []

    def place(self, *slots: int) -> Place:
        return Place(slots, torch.tensor(slots, device=self.lanes.device))

    def write(self, name: str, where: Place, value: float) -> None:
        """The compute stream is busy, then writes `value` into all K and V of the slots."""
        layout = self.layout
        shape = (len(where.slots), layout.num_layers, 2, layout.num_heads, layout.head_dim)
        values = torch.full(shape, value, device=self.lanes.device)
        action = self.timed(
            name, (), where.slots, lambda: layout.write(where.tensor, values), before=1
        )
        self.lanes.compute(action, kind="write", owner="a", writes=where.slots)

    def attend(self, name: str, where: Place) -> None:
        """The compute stream is busy, then reads the slots; `found[name]` is what was there."""

        def read() -> None:
            self.found[name] = self.layout.read(where.tensor)

        action = self.timed(name, where.slots, (), read, after=1)
        self.lanes.compute(action, kind="attend", owner="a", reads=where.slots)

    def timed(
        self,
        name: str,
        reads: Iterable[int],
        writes: Iterable[int],
        action: Callable[[], None],
        *,
        before: int = 0,
        after: int = 0,
    ) -> Callable[[], None]:
        """`action` as an operation of the timeline, whose stream is busy before and after it."""
        stamps: list[Any] = []
        self._noted.append((name, frozenset(reads), frozenset(writes), stamps))

        def run() -> None:
            stamps.append(self.lanes.stamp())
            for _ in range(before):
                self.lanes.linger()
            action()
            for _ in range(after):
                self.lanes.linger()
            stamps.append(self.lanes.stamp())

        return run

    def mover(self) -> Mover:
        """One whose copies are operations, "copy 1" and so on.

        A copy reads at once, as it would find what is not written yet, and goes on for longer than
        the attention beside it, which is over when what follows it begins too soon.
        """
        timeline = self

        class Noting(Mover):
            number = 0

            def copies(
                self, sources: torch.Tensor, targets: torch.Tensor, *, owner: str
            ) -> list[Copy]:
                return [self._noted(c) for c in super().copies(sources, targets, owner=owner)]

            def _noted(self, copy: Copy) -> Copy:
                self.number += 1
                slots = copy.sources.tolist(), copy.targets.tolist()
                run = timeline.timed(f"copy {self.number}", *slots, copy.run, after=4)
                return Copy(run, copy.sources, copy.targets, copy.owner)

        return Noting(self.layout)

    def intervals(self) -> list[Interval]:
        """Everything, in the order in which it was issued. Waits for both streams."""
        self.lanes.settle()
        return [
            Interval(name, reads, writes, *(self.lanes.milliseconds(stamp) for stamp in stamps))
            for name, reads, writes, stamps in self._noted
        ]
