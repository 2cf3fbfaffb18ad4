"""What the conformance suites have in common: the error, the report, and the search for a short
counterexample.

A suite runs seeded histories on an implementation and judges it after every step. It needs neither
pytest nor Hypothesis. The suites are `check_token_table`, `check_mover` and `check_copy_stream`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from vtoken.trace.shrink import minimal
from vtoken_spec import LAWS, Breach

__all__ = ["CHECKS", "ConformanceError", "ConformanceReport", "Failure", "said", "shortest"]

T = TypeVar("T")

CHECKS = MappingProxyType(
    {
        # any suite
        "error": "nothing but the contract's own errors is raised",
        # the token table
        "acceptance": "a right call is accepted",
        "rejection": "a wrong call is refused, with the contract's error",
        "unchanged": "a refused call changes nothing",
        "atomicity": "moves are applied all or none",
        "bulk": "a bulk eviction is the same as one by one",
        "model": "the table is what the reference model says",
        # the mover
        "sources": "a move leaves its sources as they were",
        "untouched": "a move writes its targets and nothing else",
        "splitting": "a small workspace gives the same bytes as a large one",
        "workspace": "no more is in flight than the workspace holds",
        "arguments": "the caller's slots are not written",
        "pieces": "pieces for a copy stream are the move, each token once",
        # the copy stream
        "order": "copies run behind all that was given before their launch, and in order",
        "once": "a copy runs once",
        "failure": "a failure is kept in its own event, and reported by a wait",
        "close": "closing finishes what is queued, and ends the stream",
        "done": "an event is done when its launch is over, and asking does not block",
        "foreign event": "an event of another kind of stream is refused",
        "hang": "every call returns",
    }
)
"""Checks that are no laws, in words; a failure names one of these or a law of `vtoken_spec`."""


class ConformanceError(AssertionError):
    """An implementation does not keep the contract that its suite holds it to.

    When: a `check_...` call found a history that breaks a law or a check. Whose fault: the
    implementation's. What to do: read the history, which is the shortest one found, and run it.

    Attributes:
        law: id of the law ("I2"), or a name of `CHECKS`.
        message: what was expected and what was found.
        history: the history, one line each, ending in the step that shows the fault.
        again: the call that finds it again.
    """

    def __init__(self, law: str, message: str, history: tuple[str, ...], again: str) -> None:
        super().__init__(law, message, history, again)
        self.law = law
        self.message = message
        self.history = history
        self.again = again

    def __str__(self) -> str:
        named = f"law {self.law}, {LAWS[self.law].title}" if self.law in LAWS else self.law
        title = CHECKS.get(self.law)
        lines = [f"{named}{f' ({title})' if title else ''}: {self.message}"]
        lines += ["the shortest history found:", *(f"    {line}" for line in self.history)]
        return "\n".join([*lines, f"again: {self.again}"])


@dataclass
class ConformanceReport:
    """What a suite did before it found nothing.

    Attributes:
        subject: which suite it was.
        histories: how many it ran.
        operations: how often it did what.
        rejections: wrong calls that were refused as they have to be, by reason.
    """

    subject: str
    histories: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        done = ", ".join(f"{name} {count}" for name, count in sorted(self.operations.items()))
        text = f"{self.subject}: {self.histories} histories ({done})"
        if self.rejections:
            kinds = len(self.rejections)
            text += f"; {self.rejections.total()} wrong calls of {kinds} kinds refused"
        return text


@dataclass(frozen=True, slots=True)
class Failure:
    """What one run of a history showed, at step `at` of it (counted from 0)."""

    law: str
    message: str
    at: int = 0


def said(breach: Breach) -> str:
    """The message of a breach without the law's name, which a failure has already."""
    return breach.message.removeprefix(f"{breach.law} {LAWS[breach.law].title}: ")


def shortest(
    items: Sequence[T],
    fails: Callable[[Sequence[T]], bool],
    *,
    simpler: Callable[[T], Iterable[T]] = lambda item: (),
    most_runs: int = 1000,
) -> list[T]:
    """A short history for which `fails` still holds, as it does for `items`.

    Items are left out, and single ones replaced by simpler ones, until neither helps.

    Args:
        fails: runs a history afresh.
        simpler: what may stand for an item, the simplest first; never the item itself, and nothing
            that leads back to it.
        most_runs: how often `fails` may be asked.
    """
    left = most_runs

    def holds(candidate: Sequence[T]) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(candidate)

    current, changed = list(items), True
    while changed and left > 0:
        current, changed = minimal(current, holds, most_runs=left), False
        for index in reversed(range(len(current))):
            options = iter(simpler(current[index]))
            while left > 0 and (option := next(options, None)) is not None:
                candidate = [*current[:index], option, *current[index + 1 :]]
                if holds(candidate):
                    current, changed = candidate, True
                    options = iter(simpler(option))
    return [] if len(current) == 1 and holds([]) else current
