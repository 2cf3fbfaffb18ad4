"""StreamingLLM: attention sinks plus a sliding window.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023): the
first few tokens attract attention mass whatever they say, so they stay, and so do the newest.
Positions stay logical here; the paper re-assigns them inside its cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vtoken.policies.base import Policy, PolicyParams, PolicyView, oldest_live


class StreamingLLM(Policy):
    """Evicts the oldest live tokens after the first `sinks`."""

    name = "streaming-llm"

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._sinks = params.sinks
        self._next = params.sinks  # ids in [sinks, next) are known to be dead

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        ids = oldest_live(view, self._next, view.excess)
        if len(ids):
            self._next = int(ids[-1]) + 1
        return ids

    @classmethod
    def min_budget(cls, params: PolicyParams) -> int:
        return params.sinks + 1
