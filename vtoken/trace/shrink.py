"""Delta debugging of a diverging trace: a smaller one that breaks the same law.

After Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002): remove
chunks of records, halving the chunk size, as long as the same law still fails. Counts recorded
after events (`post`) are left out of the shrunk trace, because they describe the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from vtoken.errors import Rejected
from vtoken.trace.format import Header, Record
from vtoken.trace.replay import replay_records

T = TypeVar("T")


def law_of(header: Header, records: Sequence[Record]) -> str | None:
    """The law that a replay of these records breaks first, None if it is accepted."""
    numbered = enumerate(records, start=1)
    divergence = replay_records(header, numbered).divergence
    return None if divergence is None else divergence.law


def shrink(
    header: Header,
    records: Sequence[Record],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Record]:
    """The smallest trace found that breaks the same law.

    Args:
        on_progress: called with (records left, replays so far).

    Raises:
        Rejected: the trace is accepted, so there is nothing to shrink.
    """
    wanted = law_of(header, records)
    if wanted is None:
        raise Rejected("the spec accepts this trace; there is nothing to shrink")
    bare = [replace(record, post={}) for record in records]
    # A divergence in the counts alone needs them; it is then shrunk with them.
    current = bare if law_of(header, bare) == wanted else list(records)
    return minimal(current, lambda left: law_of(header, left) == wanted, on_progress=on_progress)


def minimal(
    items: Sequence[T],
    fails: Callable[[Sequence[T]], bool],
    *,
    on_progress: Callable[[int, int], None] | None = None,
    most_runs: int | None = None,
) -> list[T]:
    """Delta debugging: a part of `items` in order that still fails, and of which no single item
    can be left out (unless `most_runs` ended the search).

    Args:
        fails: whether a non-empty part fails; true for `items`.
        on_progress: called with (items left, runs so far).
        most_runs: how often `fails` may be asked.
    """
    current = list(items)
    runs, chunk = 0, max(1, len(current) // 2)
    while True:
        smaller, index = False, 0
        while index < len(current):
            if runs == most_runs:
                return current
            candidate = current[:index] + current[index + chunk :]
            runs += 1
            if candidate and fails(candidate):
                current, smaller = candidate, True
            else:
                index += chunk
            if on_progress is not None:
                on_progress(len(current), runs)
        if chunk == 1 and not smaller:
            return current
        chunk = max(1, chunk // 2) if not smaller or chunk > 1 else 1
