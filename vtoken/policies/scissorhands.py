"""Scissorhands: tokens that have been important lately will be so again; the others go.

Source: Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV
Cache Compression at Test Time" (2023). The paper counts per head, over a window of some hundred
queries; here weights are averaged over heads and layers first, and the window is one of up to 32
observations, which fits one number per token.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vtoken.policies.base import Policy, PolicyParams, PolicyView, outside_recent
from vtoken.policies.scores import ScoreNeed, StepScores, TokenArray, lowest


class Scissorhands(Policy):
    """Evicts the tokens with the most unimportant observations U(i) outside the recent ones.

    U(i) = number of the last `window` observations in which the mean weight of token i, over
    queries, heads and layers, was below 1 / k, k tokens having been attended to. Of the tokens
    that stay, floor(recent_share * kept) are the newest; ties go to the older token.
    """

    name = "scissorhands"
    needs: ClassVar[ScoreNeed] = ScoreNeed.TOKENS

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        #: bit n: unimportant in the observation before the last n
        self._history = TokenArray(np.uint32)
        self._mask = np.uint32(2**params.window - 1)

    def observe(self, scores: StepScores) -> None:
        history = self._history.align(scores.token_ids)
        average = scores.queries * scores.heads / max(1, len(history))
        history <<= np.uint32(1)
        history |= scores.values < np.float32(average)

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        recent = int(self.params.recent_share * view.kept)
        candidates = outside_recent(view, recent)
        history = self._history.dense(view.num_tokens) & self._mask
        important = 32 - np.bitwise_count(history)
        return lowest(important, candidates, view.excess)
