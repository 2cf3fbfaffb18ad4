"""Sliding window: only the newest tokens stay.

Source: the window attention baseline of Xiao et al. (2023); equal to StreamingLLM without sinks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vtoken.policies.base import Policy, PolicyParams, PolicyView, oldest_live


class SlidingWindow(Policy):
    """Evicts the oldest live tokens."""

    name = "sliding-window"

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._next = 0  # ids below are known to be dead

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        ids = oldest_live(view, self._next, view.excess)
        if len(ids):
            self._next = int(ids[-1]) + 1
        return ids
