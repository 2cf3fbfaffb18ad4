"""A walk on the reference model alone: allowed and forbidden events from the spec's alphabet, each
held to its expectation and to every law. Hypothesis drives it in the tests, seeds drive it here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

import vtoken_spec as spec
from vtoken_spec import Reason, State
from vtoken_spec.alphabet import ALLOWED, Bounds
from vtoken_spec.explore import progress_faults, state_faults, transition_faults
from vtoken_spec.forbidden import forbidden

T = TypeVar("T")
BOUNDS = Bounds(requests=("a", "b", "c"))


class ModelFault(AssertionError):
    """The model broke a law, or judged an event otherwise than the alphabet."""


class Chooser(Protocol):
    """Where choices come from."""

    def one(self, items: Sequence[T]) -> T: ...

    def number(self, low: int, high: int) -> int: ...


class SeededChooser:
    """Choices from a seed."""

    def __init__(self, seed: object) -> None:
        self._random = random.Random(str(seed))

    def one(self, items: Sequence[T]) -> T:
        return self._random.choice(items)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class ModelWalk:
    """One history of the model.

    A walk lacks some of the restructuring kinds (a swarm): with all of them, holes would be closed
    before a plan could find many.

    Args:
        choose: where choices come from; also draws the pool.

    Attributes:
        state: after the events so far.
        history: those that were accepted.
    """

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        num_blocks = choose.number(4, 7)
        headroom = range(1, 1 + choose.number(0, 1))
        size = choose.number(2, 4)
        self.state = State.initial(num_blocks=num_blocks, block_size=size, headroom=headroom)
        self.history: list[spec.Event] = []
        optional = ("recycles", "single_moves", "plans", "releases", "endings", "cachings")
        dropped = {kind for kind in optional if choose.number(0, 1)}
        self.kinds = [kind for name, kind in ALLOWED.items() if name not in dropped]
        self.kinds += [ALLOWED[name] for name in ("preparations", "preparations", "hits", "hits")]

    def draw(self) -> tuple[spec.Event, Reason | None]:
        """An event and the expected reason of its rejection (None: it is allowed). One time in
        four a forbidden one; otherwise a kind first, then an event of that kind."""
        choose = self._choose
        wrong: dict[Reason, list[spec.Event]] = {}
        if choose.number(0, 3) == 0:
            for event, reason in forbidden(self.state, BOUNDS):
                wrong.setdefault(reason, []).append(event)
        if wrong:
            reason = choose.one(sorted(wrong, key=lambda reason: reason.name))
            return choose.one(wrong[reason]), reason
        first = choose.number(0, len(self.kinds) - 1)
        for kind in self.kinds[first:] + self.kinds[:first] + list(ALLOWED.values()):
            if events := list(kind(self.state, BOUNDS)):
                return choose.one(events), None
        raise ModelFault(f"nothing is allowed in {self.state}")

    def apply(self, event: spec.Event, expected: Reason | None) -> None:
        """Take the event and hold the outcome to the expectation and to the laws.

        Raises:
            ModelFault
        """
        before = self.state
        fingerprint = hash(before)
        after = spec.step(before, event)
        if hash(before) != fingerprint or spec.step(before, event) != after:
            raise ModelFault(f"step is not a function of its arguments: {event}")
        if expected is not None:
            if not isinstance(after, spec.Rejected):
                raise ModelFault(f"accepted, not rejected as {expected.name}: {event}")
            if after.reason is not expected:
                raise ModelFault(f"{event}: rejected as {after.detail}, not as {expected.name}")
            return
        if isinstance(after, spec.Rejected):
            raise ModelFault(f"{event}: rejected, {after.detail}")
        faults = [*transition_faults(before, event, after), *state_faults(after)]
        faults += progress_faults(after, BOUNDS, spec.step)
        if faults:
            raise ModelFault(f"{event}: {faults[0]}")
        self.state = after
        self.history.append(event)
