"""What a policy sees and what it answers. A policy never sees blocks, slots or memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.errors import Rejected


@dataclass
class PolicyView:
    """One request before one step.

    Attributes:
        num_tokens: logical length: ids 0 .. num_tokens - 1 are computed or in flight.
        live: liveness per id, bool `[num_tokens]`; read only.
        num_live: live tokens.
        excess: how many tokens have to go so that the step's next token fits the budget; the
            newest token does not count as evictable. Always positive when a policy is asked.
    """

    num_tokens: int
    live: npt.NDArray[np.bool_]
    num_live: int
    excess: int


class Policy(ABC):
    """One request's eviction policy: which tokens go when the budget is exceeded.

    An instance serves one request from admission to finish or preemption, so it may keep state.
    """

    #: name on the command line and in configuration
    name: str

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        """Serve one request.

        Args:
            params: the options that all policies share.
            stream: the request's place in the order of first evictions, from 0; the same again
                after a preemption. For policies that draw.
        """
        self.params = params
        self.stream = stream

    @abstractmethod
    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        """Ids to evict: distinct, live, `view.excess` of them, never the newest; int32 `[n]`."""

    @classmethod
    def min_budget(cls, params: PolicyParams) -> int:
        """Smallest budget (tokens) with which the policy makes sense."""
        return 1


@dataclass(frozen=True)
class PolicyParams:
    """Options of all built-in policies.

    Attributes:
        sinks: first tokens that are never evicted (StreamingLLM's attention sinks).
        seed: seed of policies that draw.
    """

    sinks: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise Rejected(f"sinks must be 0 or more, not {self.sinks}")
        if self.seed < 0:
            raise Rejected(f"seed must be 0 or more, not {self.seed}")


def oldest_live(view: PolicyView, start: int, count: int) -> npt.NDArray[np.int32]:
    """Up to `count` lowest live ids at or above `start`, never the newest token; int32."""
    newest = view.num_tokens - 1
    stop = start + count
    if stop <= newest and view.live[start:stop].all():
        return np.arange(start, stop, dtype=np.int32)
    found = np.flatnonzero(view.live[start:newest])[:count] + start
    return found.astype(np.int32)
