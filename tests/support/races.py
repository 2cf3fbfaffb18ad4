"""Histories in which relocations race the compute stream's own writes and reads, on real bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from support.lanes import Lanes
from vtoken.kv import KVLayout, Mover, TokenRowLayout, stack_layers
from vtoken.kv.streams import Copy, CopyEvent

LAYERS, BLOCKS, SIZE, HEADS, DIM = 2, 4, 4, 2, 8
SLOTS = BLOCKS * SIZE


@dataclass(frozen=True)
class Write:
    """The compute stream writes new K and V into `slots`; `busy` keeps it busy before."""

    slots: tuple[int, ...]
    busy: bool = False


@dataclass(frozen=True)
class Attend:
    """The compute stream reads `slots`."""

    slots: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """Tokens move from slot to slot; `busy` keeps the copy stream busy before."""

    pairs: tuple[tuple[int, int], ...]
    busy: bool = False


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for a launch that it has not waited for, the n-th of them."""

    which: int


Step = Write | Attend | Launch | Wait


@dataclass
class Played:
    """What became of a history.

    Attributes:
        wrong: reads that found something else than what was written last, in words.
        launches: with at least one move.
        beside: writes and reads that the compute stream was given while a launch was under way.
    """

    wrong: list[str] = field(default_factory=list)
    launches: int = 0
    beside: int = 0


def play(steps: Sequence[Step], lanes: Lanes) -> Played:
    """Run a history to its end, then read every slot.

    What the laws forbid is left out, slot by slot: until a launch has been waited for, the compute
    stream neither writes what it reads or writes nor reads what it writes (L7, I3), and no other
    launch writes what it reads or touches what it writes.
    """
    return _Run(lanes).play(steps)


def fresh_layout(device: torch.device) -> KVLayout:
    cache = torch.zeros(LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM, device=device)
    return TokenRowLayout(stack_layers(list(cache)))


class _Run:
    """Every write gets a number of its own, so that a slot's bytes say which write they are of.

    All tensors are made before anything is issued. On a device a transfer from the host would wait
    for what is queued, and hide a missing dependency; and a copy that a faulty stream starts too
    soon has to find wrong bytes, not wrong slots.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._layout = fresh_layout(lanes.device)
        self._mover = Mover(self._layout)
        self._expected = [0] * SLOTS
        self._numbers = 0
        self._issue: list[Callable[[], None]] = []
        # Launches that have not been waited for, by number, and what they move.
        self._flights: dict[int, list[tuple[int, int]]] = {}
        self._events: dict[int, CopyEvent] = {}
        self._reads: list[tuple[list[int], list[int], list[torch.Tensor]]] = []
        self._played = Played()

    def play(self, steps: Sequence[Step]) -> Played:
        for step in steps:
            if isinstance(step, Write):
                self._write(step)
            elif isinstance(step, Attend):
                self._attend(step.slots)
            elif isinstance(step, Launch):
                self._launch(step)
            elif self._flights:
                self._wait(list(self._flights)[step.which % len(self._flights)])
        for number in list(self._flights):
            self._wait(number)
        self._attend(range(SLOTS))
        self._compile()
        self._lanes.settle()
        for issue in self._issue:
            issue()
        self._lanes.settle()
        for slots, expected, found in self._reads:
            self._compare(slots, expected, found[0])
        return self._played

    def _compile(self) -> None:
        """What is compiled at its first use takes longer than any stream is kept busy."""
        first, second = self._place([0]), self._place([1])
        self._mover.move(first, second)
        self._layout.write(first, self._layout.read(second))

    def _place(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, device=self._lanes.device)

    def _sources(self) -> set[int]:
        return {source for pairs in self._flights.values() for source, _ in pairs}

    def _targets(self) -> set[int]:
        return {target for pairs in self._flights.values() for _, target in pairs}

    def _write(self, step: Write) -> None:
        taken = self._sources() | self._targets()
        slots = [slot for slot in dict.fromkeys(step.slots) if slot not in taken]
        if not slots:
            return
        self._numbers += 1
        where = self._place(slots)
        shape = (len(slots), LAYERS, 2, HEADS, DIM)
        values = torch.full(shape, float(self._numbers), device=self._lanes.device)

        def write() -> None:
            if step.busy:
                self._lanes.linger()
            self._layout.write(where, values)

        self._played.beside += bool(self._flights)
        self._issue.append(lambda: self._lanes.compute(write, kind="write", writes=slots))
        for slot in slots:
            self._expected[slot] = self._numbers

    def _attend(self, wanted: Iterable[int]) -> None:
        taken = self._targets()
        slots = [slot for slot in dict.fromkeys(wanted) if slot not in taken]
        if not slots:
            return
        where, found = self._place(slots), list[torch.Tensor]()

        def read() -> None:
            found.append(self._layout.read(where))

        self._played.beside += bool(self._flights)
        self._reads.append((slots, [self._expected[slot] for slot in slots], found))
        self._issue.append(lambda: self._lanes.compute(read, kind="attend", reads=slots))

    def _launch(self, step: Launch) -> None:
        reading, writing = self._sources(), self._targets()
        pairs: list[tuple[int, int]] = []
        for source, target in step.pairs:
            own = {slot for pair in pairs for slot in pair}
            if {source, target} & (own | writing) or target in reading or source == target:
                continue
            pairs.append((source, target))
        if not pairs:
            return
        sources, targets = (self._place([pair[side] for pair in pairs]) for side in (0, 1))
        copies = self._mover.copies(sources, targets, owner="a")
        if step.busy:
            copies = [self._late(copy) for copy in copies]
        number = self._played.launches
        self._flights[number] = pairs
        self._played.launches += 1

        def launch() -> None:
            self._events[number] = self._lanes.stream.launch(copies)

        self._issue.append(launch)
        for source, target in pairs:
            self._expected[target] = self._expected[source]

    def _late(self, copy: Copy) -> Copy:
        def run() -> None:
            self._lanes.linger()
            copy.run()

        return Copy(run, copy.sources, copy.targets, copy.owner)

    def _wait(self, number: int) -> None:
        del self._flights[number]
        self._issue.append(lambda: self._lanes.stream.wait(self._events[number]))

    def _compare(self, slots: list[int], expected: list[int], found: torch.Tensor) -> None:
        for row, (slot, number) in enumerate(zip(slots, expected, strict=True)):
            seen = sorted(set(found[row].flatten().tolist()))
            if seen != [number]:
                values = ", ".join(f"{value:g}" for value in seen[:4])
                self._played.wrong.append(f"slot {slot} holds {values} in place of {number}")
