"""ROUGE-L of a continuation with eviction against the one with the full cache.

vToken's continuation and the naive one (the same eviction without reclamation) are each held
against full retention, and against each other. The published evaluation of token-level
virtualization reports the difference of the first two, pair by pair; here it is meant to be zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from rapidfuzz.distance import LCSseq

from vtoken.evaluation.requests import Answer, Cell, Request

PROMPT = 128
"""Tokens of the prompt, special ones at its beginning included."""
NEW_TOKENS = 64

#: a pair counts as close when its two figures differ by no more than this
CLOSE = 0.01


def rouge_l(candidate: str, reference: str) -> float:
    """ROUGE-L F1, in [0, 1]: 2PR / (P + R) of the longest common subsequence of words.

    P and R are its length over the candidate's and the reference's (Lin, "ROUGE: A Package for
    Automatic Evaluation of Summaries", 2004, with equal weights). Words are runs of letters and
    digits, lower case, not stemmed. Two texts without words are the same text.
    """
    ours, theirs = _words(candidate), _words(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    common = LCSseq.similarity(ours, theirs)
    return float(2 * common / (len(ours) + len(theirs)))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


@dataclass(frozen=True)
class Pair:
    """One prompt continued by vToken and naively, with the same policy and budget.

    Attributes:
        vtoken: ROUGE-L F1 of vToken's continuation against full retention.
        naive: the same of the naive one.
        between: of vToken's against the naive one.
        identical: whether the two consist of the same tokens.
    """

    vtoken: float
    naive: float
    between: float
    identical: bool


@dataclass(frozen=True)
class Similarity:
    """The figure of one row, means over its pairs."""

    vtoken: float
    naive: float
    between: float
    samples: int


@dataclass(frozen=True)
class Agreement:
    """All pairs of all rows: how far vToken is from naive.

    Attributes:
        mean_difference: mean of `Pair.vtoken - Pair.naive`.
        close: pairs in which the two differ by at most `CLOSE`.
        identical: pairs of the same tokens.
    """

    pairs: int
    mean_difference: float
    close: int
    identical: int


def excerpt_size(opening: Sequence[int]) -> int:
    """Tokens of the text that one sample takes."""
    return PROMPT - len(opening)


def requests_for(
    texts: Sequence[Sequence[int]], cells: Sequence[Cell], *, opening: Sequence[int]
) -> list[Request]:
    """Nothing is shared: reclamation would have to leave blocks of others alone."""
    return [
        Request(cell, index, (*opening, *text), NEW_TOKENS)
        for index, text in enumerate(texts)
        for cell in cells
    ]


def pair_of(vtoken: Answer, naive: Answer, full: Answer) -> Pair | None:
    """None if one of them ended early."""
    if any(answer.error is not None for answer in (vtoken, naive, full)):
        return None
    return Pair(
        vtoken=rouge_l(vtoken.text, full.text),
        naive=rouge_l(naive.text, full.text),
        between=rouge_l(vtoken.text, naive.text),
        identical=vtoken.token_ids == naive.token_ids,
    )


def figure(pairs: Sequence[Pair]) -> Similarity:
    """Of one row's pairs."""
    return Similarity(
        vtoken=_mean([pair.vtoken for pair in pairs]),
        naive=_mean([pair.naive for pair in pairs]),
        between=_mean([pair.between for pair in pairs]),
        samples=len(pairs),
    )


def agreement(pairs: Sequence[Pair]) -> Agreement:
    """Of all rows' pairs."""
    differences = [pair.vtoken - pair.naive for pair in pairs]
    return Agreement(
        pairs=len(pairs),
        mean_difference=_mean(differences),
        # A difference of exactly the bound is close, whichever way binary fractions round it.
        close=sum(abs(difference) <= CLOSE + 1e-12 for difference in differences),
        identical=sum(pair.identical for pair in pairs),
    )


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values) if values else float("nan")
