"""Policies that make work for reclamation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vtoken.policies import Policy, PolicyParams, PolicyView


class Burst(Policy):
    """Evicts a random three quarters of all tokens whenever a request has twice its budget."""

    name = "burst"

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._rng = np.random.default_rng([params.seed, stream])

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        candidates = np.flatnonzero(view.live[:-1])
        if view.num_live < 2 * (view.num_live - view.excess):
            return np.empty(0, dtype=np.int32)
        count = 3 * len(candidates) // 4
        return np.sort(self._rng.choice(candidates, count, replace=False)).astype(np.int32)


class BurstFirst(Burst):
    """The same, in the request admitted first and nowhere else."""

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        return super().victims(view) if self.stream == 0 else np.empty(0, dtype=np.int32)
