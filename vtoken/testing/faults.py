"""What the harness itself sees to be wrong."""

from __future__ import annotations


class ByteFault(AssertionError):
    """What the harness sees in the cache itself is not what was promised."""


def must(holds: bool, what: str) -> None:
    """Raise `ByteFault` unless it holds."""
    if not holds:
        raise ByteFault(what)
