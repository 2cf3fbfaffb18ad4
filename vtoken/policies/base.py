"""What a policy sees and what it answers. A policy never sees blocks, slots or memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vtoken.errors import Rejected
from vtoken.policies.scores import ScoreNeed, StepScores


@dataclass(frozen=True)
class PolicyView:
    """One request before one step.

    Attributes:
        num_tokens: logical length: ids 0 .. num_tokens - 1 are computed or in flight.
        live: liveness per id, bool `[num_tokens]`; read only.
        num_live: live tokens.
        excess: how many tokens have to go so that the step's next token fits the budget, or as
            many as may go if protection allows fewer. Always positive when a policy is asked.
        first: ids below are protected.
        stop: ids from here on are protected, or the newest token, which always stays; None for
            the newest alone.
    """

    num_tokens: int
    live: npt.NDArray[np.bool_]
    num_live: int
    excess: int
    first: int = 0
    stop: int | None = None

    @property
    def end(self) -> int:
        """Ids from here on may not go; `stop` with its default filled in."""
        return self.num_tokens - 1 if self.stop is None else self.stop

    @property
    def kept(self) -> int:
        """Live tokens that stay when `excess` tokens go."""
        return self.num_live - self.excess

    @cached_property
    def evictable(self) -> npt.NDArray[np.bool_]:
        """Which ids may go: live, not the newest, not protected; bool `[num_tokens]`."""
        mask = np.zeros(self.num_tokens, dtype=np.bool_)
        mask[self.first : self.end] = self.live[self.first : self.end]
        return mask


class Policy(ABC):
    """One request's eviction policy: which tokens go when the budget is exceeded.

    An instance serves one request from its first scores or its first eviction to finish or
    preemption, so it may keep state. `__init__` takes `(params, *, stream)`.
    """

    #: name on the command line and in configuration
    name: str
    #: which attention weights `observe` wants
    needs: ClassVar[ScoreNeed] = ScoreNeed.NONE

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        """Serve one request.

        Args:
            params: the options that all policies share.
            stream: the request's place in the order in which policies were made, from 0; the
                same again after a preemption. For policies that draw.
        """
        self.params = params
        self.stream = stream

    @abstractmethod
    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        """Ids to evict: distinct and `view.evictable`; int32 `[n]`.

        Normally `view.excess` of them. Fewer keep the request above its budget, more are allowed.
        """

    def observe(self, scores: StepScores) -> None:  # noqa: B027
        """Take notice of attention weights; called before `victims` of a later step.

        With asynchronous scheduling they come a step or two late, so that ids may be dead by
        then, and not every step has to be observed.
        """

    @classmethod
    def min_budget(cls, params: PolicyParams) -> int:
        """Smallest budget (tokens) with which the policy makes sense."""
        return 1


@dataclass(frozen=True)
class PolicyParams:
    """Options of all built-in policies.

    Attributes:
        sinks: first tokens that are never evicted (StreamingLLM's attention sinks, FastGen's
            special tokens).
        seed: seed of policies that draw.
        recent_share: share of the kept tokens, in [0, 1), that H2O and Scissorhands reserve for
            the newest ones.
        window: observations that Scissorhands looks back over, 1 to 32.
        recovery: share of a head's attention, in (0, 1], that FastGen's choice has to retain.
    """

    sinks: int = 4
    seed: int = 0
    recent_share: float = 0.5
    window: int = 32
    recovery: float = 0.95

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise Rejected(f"sinks must be 0 or more, not {self.sinks}")
        if self.seed < 0:
            raise Rejected(f"seed must be 0 or more, not {self.seed}")
        if not 0 <= self.recent_share < 1:
            raise Rejected(f"recent_share must be in [0, 1), not {self.recent_share}")
        if not 1 <= self.window <= 32:
            raise Rejected(f"window must be 1 to 32, not {self.window}")
        if not 0 < self.recovery <= 1:
            raise Rejected(f"recovery must be in (0, 1], not {self.recovery}")


def oldest_live(view: PolicyView, start: int, count: int) -> npt.NDArray[np.int32]:
    """Up to `count` lowest ids at or above `start` that may go; int32."""
    end = view.end
    start = max(start, view.first)
    stop = start + count
    if stop <= end and view.live[start:stop].all():
        return np.arange(start, stop, dtype=np.int32)
    found = np.flatnonzero(view.live[start:end])[:count] + start
    return found.astype(np.int32)


def outside_recent(view: PolicyView, recent: int) -> npt.NDArray[np.intp]:
    """Ids that may go and are not among the `recent` newest live tokens, ascending.

    If they are fewer than `view.excess`, the oldest recent ones that may go are taken along.
    """
    candidates = np.flatnonzero(view.live[view.first : view.end]) + view.first
    # The newest live tokens that may not go count among the recent ones, from the end on.
    beyond = int(np.count_nonzero(view.live[view.end :]))
    guarded = max(0, recent - beyond)
    count = max(len(candidates) - guarded, min(view.excess, len(candidates)))
    return candidates[:count]
