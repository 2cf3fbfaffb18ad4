"""Perplexity of a text under eviction, as a server would see it: token by token, in decode steps.

The first tokens of an excerpt are the prompt. Those after it are forced upon the model one by one,
and each decode step, which attends to what the policy has kept, tells how likely it found the one
that follows. The first forced token is predicted by the prompt's step, from the full context, and
is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vtoken.evaluation.requests import Answer, Cell, Request, may_share

CONTEXT = 256
"""Tokens of the prompt, special ones at its beginning included."""
SCORED, QUICK_SCORED = 128, 64
"""Tokens of each excerpt whose log-probability counts."""


@dataclass(frozen=True)
class Perplexity:
    """The figure of one row: `exp` of the mean negative log-probability, in nats, per token."""

    value: float
    tokens: int
    samples: int


def excerpt_size(opening: Sequence[int], scored: int) -> int:
    """Tokens of the text that one sample takes."""
    return CONTEXT - len(opening) + 1 + scored


def requests_for(
    texts: Sequence[Sequence[int]],
    cells: Sequence[Cell],
    *,
    opening: Sequence[int],
    share_unit: int,
) -> list[Request]:
    """All rows of one excerpt after each other; `share_unit` as in `may_share`."""
    requests = []
    for index, text in enumerate(texts):
        whole = (*opening, *text)
        prompt, forced = whole[:CONTEXT], whole[CONTEXT:]
        shares = may_share(prompt, share_unit)
        for cell in cells:
            requests.append(Request(cell, index, prompt, len(forced), forced, shares))
    return requests


def figure(asked: Sequence[tuple[Request, Answer]]) -> Perplexity:
    """Of one row's requests; those that ended early do not count."""
    ended = [answer.logprobs[1:] for _, answer in asked if answer.error is None]
    logprobs = [value for values in ended for value in values]
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else float("nan")
    return Perplexity(math.exp(-mean), len(logprobs), len(ended))
