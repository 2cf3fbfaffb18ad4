"""What policies are told of attention, and arrays that follow the live tokens from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt


class ScoreNeed(StrEnum):
    """Which attention weights a policy asks for.

    TOKENS: one number per token, summed over heads and layers. HEADS: those, and the weights of
    each head while the prompt is computed.
    """

    NONE = "none"
    TOKENS = "tokens"
    HEADS = "heads"


@dataclass(frozen=True)
class StepScores:
    """Attention weights that one step's queries of one request gave to its tokens.

    Attributes:
        token_ids: the tokens attended to, int32 `[k]`.
        values: softmax(q k^T / sqrt(d)) per token, summed over the observed queries, all query
            heads and the tapped layers; float32 `[k]`. Their sum is `queries * heads`.
        queries: observed queries.
        heads: query heads times tapped layers, over all ranks.
        prompt: the observed queries belong to the prompt.
        per_head: the same per head, float32 `[heads, k]`; for `ScoreNeed.HEADS`, prompts only.
    """

    token_ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    queries: int
    heads: int
    prompt: bool
    per_head: npt.NDArray[np.float32] | None = None


class TokenArray:
    """One number per token of the last observation, carried over from one to the next.

    Lies in the order of the observed ids, so that a step in which nothing was evicted costs no
    scatter. A token that an observation leaves out is dead and forgotten; a new one starts at 0.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._count = 0
        self._values: npt.NDArray[Any] = np.zeros(64, dtype=dtype)
        self._ids: npt.NDArray[np.int32] = np.zeros(64, dtype=np.int32)

    @property
    def values(self) -> npt.NDArray[Any]:
        """Of the tokens of the last `align`, in its order; to be changed in place."""
        return self._values[: self._count]

    def align(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """Make `values` those of `token_ids` (distinct); returns them."""
        old, count = self._count, len(token_ids)
        same = count >= old and bool((token_ids[:old] == self._ids[:old]).all())
        dense = None if same else self.dense(int(token_ids.max()) + 1 if count else 0)
        if count > len(self._values):
            grown = np.zeros(count + count // 4, dtype=self._values.dtype)
            grown[:old] = self.values
            known = np.zeros(len(grown), dtype=np.int32)
            known[:old] = self._ids[:old]
            self._values, self._ids = grown, known
        if dense is None:
            self._values[old:count] = 0
            self._ids[old:count] = token_ids[old:]
        else:
            self._values[:count] = dense[token_ids]
            self._ids[:count] = token_ids
        self._count = count
        return self.values

    def dense(self, num_tokens: int) -> npt.NDArray[Any]:
        """By token id, 0 where there is none, `[num_tokens]` (a copy)."""
        found = np.zeros(num_tokens, dtype=self._values.dtype)
        ids, values = self._ids[: self._count], self.values
        if len(ids) and int(ids.max()) >= num_tokens:
            inside = ids < num_tokens
            ids, values = ids[inside], values[inside]
        found[ids] = values
        return found


def lowest(
    scores: npt.NDArray[Any], candidates: npt.NDArray[np.intp], count: int
) -> npt.NDArray[np.int32]:
    """The `count` candidates with the lowest scores, the lower id first among equals; int32.

    Args:
        scores: by token id, `[num_tokens]`.
        candidates: ids, ascending.
    """
    if count >= len(candidates):
        return candidates.astype(np.int32)
    of = scores[candidates]
    if count == 1:
        return np.array([candidates[of.argmin()]], dtype=np.int32)
    last = np.partition(of, count - 1)[count - 1]
    below = candidates[of < last]
    equal = candidates[of == last][: count - len(below)]
    chosen: npt.NDArray[np.int32] = np.concatenate([below, equal]).astype(np.int32)
    return chosen
