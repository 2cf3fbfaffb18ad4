"""Which rows of a step are looked at for attention weights, and what comes of it: rows and slots on
one side, ids on the other, and nothing in between but the order of the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class ScoreSettings(Protocol):
    """How closely attention is looked at; see `ScoreOptions`."""

    @property
    def score_mode(self) -> str: ...
    @property
    def score_layers(self) -> int: ...
    @property
    def score_every(self) -> int: ...
    @property
    def score_window(self) -> int: ...


@dataclass(frozen=True)
class ScoreOptions:
    """The four options alone.

    Attributes:
        score_mode: "exact", all layers in every step, or "sampled".
        score_layers: sampled: the last of every so many layers.
        score_every: sampled: decode steps whose length is a multiple of this.
        score_window: how many of a prompt chunk's last queries are observed.
    """

    score_mode: str = "exact"
    score_layers: int = 5
    score_every: int = 8
    score_window: int = 32


@dataclass(frozen=True)
class RowTap:
    """Scores that are wanted of one row in a step.

    Attributes:
        queries: how many of the row's last query tokens are observed, at least one.
        per_head: whether values by head are wanted as well.
        stride: 1 for all layers, n for the last of every n.
    """

    queries: int
    per_head: bool = False
    stride: int = 1


@dataclass
class Taps:
    """The rows of a step whose scores are wanted.

    Attributes:
        number: which one it is of those that were told, from 1.
        rows: by request.
    """

    number: int
    rows: dict[str, RowTap]


@dataclass
class RowScores:
    """Softmax weights of one row in one step, in the row's attention order, over all ranks.

    Attributes:
        values: summed over observed queries, query heads and tapped layers, float32 `[k]`.
        heads: query heads of all ranks times tapped layers.
        per_head: the same by layer and query head, float32 `[layers * heads, k]`, or None.
    """

    values: npt.NDArray[np.float32]
    heads: int
    per_head: npt.NDArray[np.float32] | None = None


@dataclass
class TappedStep:
    """What a step's taps gave.

    Attributes:
        number: of the `Taps`.
    """

    number: int
    rows: dict[str, RowScores]
