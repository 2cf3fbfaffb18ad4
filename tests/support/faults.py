"""A seeded fault in an implementation, and what names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, init=False)
class Fault:
    """What has it, and the law or check that names it; several where threads decide which."""

    make: Callable[..., Any]
    laws: tuple[str, ...]

    def __init__(self, make: Callable[..., Any], *laws: str) -> None:
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "laws", laws)

    def __str__(self) -> str:
        return self.make.__name__
