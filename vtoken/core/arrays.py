"""Array types and helpers that the token table is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

NO_SLOT = -1
"""The slot of a reclaimed token."""

FREE = -1
"""Owner of a position that holds no token: never written, or its token was reclaimed."""

_GROWTH = 64


def grown(array: npt.NDArray[np.generic], need: int, fill: int) -> npt.NDArray[np.generic]:
    """`array` with room for `need` entries and an eighth more, new entries set to `fill`."""
    size = need + max(_GROWTH, need >> 3)
    bigger = np.full(size, fill, dtype=array.dtype)
    bigger[: len(array)] = array
    return bigger


@dataclass(frozen=True)
class TableSnapshot:
    """A `vtoken_spec.view.RequestView` that does not change when the table does.

    Attributes are those of `RequestTable`.
    """

    req_id: str
    logical_len: int
    physical_len: int
    blocks: IntArray
    slots: IntArray
    live: BoolArray
    life: int = 0
