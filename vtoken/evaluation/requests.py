"""What tasks ask of an engine, and what they get back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, order=True)
class Cell:
    """One row of an evaluation: a policy with a budget.

    Attributes:
        policy: its name; "none" for the full cache.
        budget_ratio: its budget as a share of the request's length, in (0, 1].
    """

    policy: str
    budget_ratio: float

    @property
    def evicts(self) -> bool:
        return self.policy != "none"


#: nothing is evicted: what every other row is held against
FULL = Cell("none", 1.0)


@dataclass(frozen=True)
class Request:
    """One prompt, decoded greedily for `max_tokens` tokens whatever they are.

    Attributes:
        cell: what is evicted from it.
        sample: its number among the task's samples.
        prompt: token ids, computed in one step, before anything is evicted.
        forced: tokens that the output has to consist of, `max_tokens` of them; their
            log-probabilities are wanted. Empty: the model decides.
        shares: whether it may take the prompt's blocks from the prefix cache.
    """

    cell: Cell
    sample: int
    prompt: tuple[int, ...]
    max_tokens: int
    forced: tuple[int, ...] = ()
    shares: bool = False


@dataclass
class Answer:
    """What came of one request.

    Attributes:
        token_ids: the output.
        text: the output as text, without special tokens.
        logprobs: natural log-probability of each forced token as the model saw it, unforced.
        error: why the request ended early; None if it did not.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None


def may_share(prompt: Sequence[int], share_unit: int) -> bool:
    """Whether a prompt's blocks may come from the prefix cache without a figure changing for it.

    Policies that look at attention are shown the last queries of what is computed of a prompt. When
    the rest is cached, that is the last block; of a prompt whose length is a multiple of the block
    it is a whole one.

    Args:
        share_unit: tokens of a block, if policies are shown no more queries than that; else 0.
    """
    return share_unit > 0 and len(prompt) % share_unit == 0


class Engine(Protocol):
    """Answers requests. A fake one serves the unit tests."""

    @property
    def share_unit(self) -> int:
        """See `may_share`."""

    @property
    def opening(self) -> list[int]:
        """Special tokens that this model expects in front of every text; often none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special ones."""

    def serve(
        self, requests: Sequence[Request], *, reclaim: str, on_tokens: Callable[[int], None]
    ) -> tuple[list[Answer], Mapping[str, Any]]:
        """Answers in the order of the requests, and counts of what the engine did for them.

        `on_tokens` is called with the number of tokens that were newly produced.
        """
