"""Random histories for the conformance suite of a copy stream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

_STEPS = 12
_SLOTS = 12
NO_NAME = -1


@dataclass(frozen=True, slots=True)
class Launch:
    """`pairs` are copied, source to target. The copy at index `fails` raises, and the one at index
    `slow` takes a while, if there are such."""

    name: int
    pairs: tuple[tuple[int, int], ...] = ()
    fails: int | None = None
    slow: int | None = None

    def __str__(self) -> str:
        copies = [f"slot {source} to {target}" for source, target in self.pairs]
        if self.slow is not None:
            copies[self.slow] += " (slowly)"
        if self.fails is not None:
            copies[self.fails] += " (fails)"
        return f"event{self.name} = stream.launch([{', '.join(copies)}])"


@dataclass(frozen=True, slots=True)
class Compute:
    """The compute stream reads or writes a slot; left out where a launch that has not been waited
    for forbids it."""

    kind: Literal["attend", "write"]
    slot: int
    name: int = NO_NAME

    def __str__(self) -> str:
        return (
            f"the compute stream {'reads' if self.kind == 'attend' else 'writes'} slot {self.slot}"
        )


@dataclass(frozen=True, slots=True)
class Wait:
    name: int

    def __str__(self) -> str:
        return f"stream.wait(event{self.name})"


@dataclass(frozen=True, slots=True)
class Poll:
    name: int

    def __str__(self) -> str:
        return f"stream.done(event{self.name})"


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits until the compute stream has done all that it was given."""

    name: int = NO_NAME

    def __str__(self) -> str:
        return "the host waits for the compute stream"


Step = Launch | Compute | Wait | Poll | Synchronize


def drawn_steps(rng: random.Random) -> list[Step]:
    """A history; it starts with a launch and may leave launches that nobody waits for."""
    steps: list[Step] = [_launch(rng, 0)]
    launches = 1
    while len(steps) < _STEPS:
        chance, known = rng.random(), rng.randrange(launches)
        if chance < 0.3:
            steps.append(_launch(rng, launches))
            launches += 1
        elif chance < 0.65:
            kind: Literal["attend", "write"] = rng.choice(("attend", "write"))
            steps.append(Compute(kind, rng.randrange(_SLOTS)))
        elif chance < 0.85:
            steps.append(Wait(known))
        elif chance < 0.95:
            steps.append(Poll(known))
        else:
            steps.append(Synchronize())
    return steps


def _launch(rng: random.Random, name: int) -> Launch:
    count = rng.choice([0, 1, 1, 2, 3])
    slots = rng.sample(range(_SLOTS), 2 * count)
    pairs = tuple(zip(slots[:count], slots[count:], strict=True))
    fails = rng.randrange(count) if count and rng.random() < 0.2 else None
    slow = rng.randrange(count) if count and rng.random() < 0.3 else None
    return Launch(name, pairs, fails, slow)


def simpler(step: Step) -> Iterator[Step]:
    """Launches that do less."""
    if not isinstance(step, Launch):
        return
    if step.slow is not None:
        yield replace(step, slow=None)
    if step.fails is not None:
        yield replace(step, fails=None)
    for index in range(len(step.pairs)):
        if index not in (step.fails, step.slow):
            pairs = step.pairs[:index] + step.pairs[index + 1 :]
            fails, slow = _without(index, step.fails), _without(index, step.slow)
            yield replace(step, pairs=pairs, fails=fails, slow=slow)


def _without(removed: int, index: int | None) -> int | None:
    return None if index is None else index - (removed < index)
