"""From a breach of a law to the error that stops the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice

from vtoken.errors import InvariantViolation
from vtoken_spec import Breach, StateView, i2_unique_mapping, l5_accounting

_REPORTED = 5


def judge(breaches: Iterable[Breach]) -> None:
    """Raise for the first breach, with the next few in the report; return if there is none.

    Raises:
        InvariantViolation
    """
    found = list(islice(breaches, _REPORTED))
    if not found:
        return
    first = found[0]
    message = first.message
    if len(found) > 1:
        message += "\nalso:\n" + "\n".join(f"  {breach.message}" for breach in found[1:])
    raise InvariantViolation(
        law=first.law,
        message=message,
        req_id=first.req_id,
        token_id=first.token_id,
        slot=first.slot,
        before=first.before,
        after=first.after,
    )


def first_breach(state: StateView) -> Breach | None:
    """The first breach of the state laws I2 and L5, None if they hold."""
    return next(chain(i2_unique_mapping(state), l5_accounting(state)), None)


def screened(*, law: str, holds: bool, breaches: Iterable[Breach], what: str) -> None:
    """A fast form said whether the law holds; if not, the spec's predicate writes the report.

    Raises:
        InvariantViolation: also when the predicate finds nothing where the fast form did: then
            the two forms differ, which is a fault of the checks.
    """
    if holds:
        return
    judge(breaches)
    raise InvariantViolation(
        law=law,
        message=f"{what}: the fast check failed but the law's predicate finds no breach; "
        "the two forms differ",
    )


class LawCounts:
    """How many times each law was evaluated."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, law: str, times: int = 1) -> None:
        self._counts[law] += times

    def as_dict(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))
