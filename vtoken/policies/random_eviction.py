"""Random eviction, seeded: the worst case for a paged cache, since live tokens scatter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vtoken.policies.base import Policy, PolicyParams, PolicyView


class RandomEviction(Policy):
    """Evicts uniformly at random among the tokens that may go.

    The draw depends on the seed, the request's place in the order of first evictions, and the
    history of eviction calls, not on the reclamation mode.
    """

    name = "random"

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._rng = np.random.default_rng([params.seed, stream])

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        candidates = np.flatnonzero(view.live[view.first : view.end]) + view.first
        if view.excess == 1:  # the decode step; a single draw is ten times cheaper
            chosen = candidates[self._rng.integers(len(candidates)) :][:1]
        else:
            chosen = self._rng.choice(candidates, size=view.excess, replace=False)
        return chosen.astype(np.int32)
