"""A step's batch as vToken sees it, whichever of vLLM's model runners prepared it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vtoken.core.arrays import IntArray


class Batch(ABC):
    """A step's batch as attention is about to be given it; lengths are corrected in place.

    Attributes:
        req_ids: row -> request.
        starts: first query token of each row, and the end of the last one; int32 `[rows + 1]`.
        lengths: of the rows as the host knows them, int32 `[rows]`.
        slots: of the step's tokens, int64 `[tokens]`, on the device.
        positions: of the step's tokens, int64 `[tokens]`, on the device.
    """

    req_ids: Sequence[str]
    starts: IntArray
    lengths: IntArray
    slots: torch.Tensor
    positions: torch.Tensor

    @abstractmethod
    def shorten(self, lag: IntArray) -> None:
        """Take `lag`, int32 `[rows]`, off the device's and the host's lengths."""

    @abstractmethod
    def device_lengths(self) -> IntArray:
        """The device's lengths as they are now, int32 `[rows]`."""

    @abstractmethod
    def blocks(self, row: int, count: int | None = None) -> IntArray:
        """The first `count` block ids of a row, or as many as its table has room for."""

    def chunk(self, row: int) -> slice:
        """The row's query tokens."""
        return slice(int(self.starts[row]), int(self.starts[row + 1]))


@dataclass
class PreparedStep:
    """What a step's attention metadata is completed with.

    Attributes:
        batch: the batch that was corrected.
        rows: live slots of its rows with holes, int64 `[k]` each.
    """

    batch: Any
    rows: Mapping[str, torch.Tensor]
