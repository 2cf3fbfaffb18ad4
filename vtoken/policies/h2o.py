"""H2O: the tokens that have drawn most attention so far stay, and the newest.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models" (2023). The paper ranks tokens per head; a table has one answer for all heads, so the
weights are summed over heads and layers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vtoken.policies.base import Policy, PolicyParams, PolicyView, outside_recent
from vtoken.policies.scores import ScoreNeed, StepScores, TokenArray, lowest


class H2O(Policy):
    """Evicts the lowest A(i) outside the recent tokens.

    A(i) = sum over all observed queries q, heads h and layers l of a_lhq(i), the attention weight
    of token i. Of the tokens that stay, floor(recent_share * kept) are the newest; ties go to the
    older token. A token that was not observed yet has A = 0.
    """

    name = "h2o"
    needs: ClassVar[ScoreNeed] = ScoreNeed.TOKENS

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._sums = TokenArray(np.float64)

    def observe(self, scores: StepScores) -> None:
        sums = self._sums.align(scores.token_ids)
        sums += scores.values

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        recent = int(self.params.recent_share * view.kept)
        candidates = outside_recent(view, recent)
        return lowest(self._sums.dense(view.num_tokens), candidates, view.excess)
