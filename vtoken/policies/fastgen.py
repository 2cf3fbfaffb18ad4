"""FastGen, projected: heads are profiled on the prompt, and vote on what a common table keeps.

Source: Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (2023).

What is lost by the projection. The method gives each head a cache of its own; a token table has
one answer for all heads and layers. So a head that needs few tokens saves nothing of its own, and
a head that needs all of them does not get them under a budget. Its class of punctuation is left
out, since a policy sees no token values, and its special tokens are the first `sinks` ones. A
head's frequent tokens are those of all heads together, because weights per head are there for
prompts only. The budget is vToken's, not the outcome of the profile.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vtoken.policies.base import Policy, PolicyParams, PolicyView
from vtoken.policies.scores import ScoreNeed, StepScores, TokenArray, lowest

#: share of the tokens that the classes of frequent and of local tokens keep, as in the paper
FREQUENT = LOCAL = 0.3


class FastGen(Policy):
    """Evicts the tokens that the fewest heads ask for, and of those the least attended ones.

    Each head takes the first class, of (special), (special, frequent), (special, frequent, local),
    (all), that retains a share `recovery` of its attention in the prompt:
    sum over i in the class of a_h(i) / sum over i of a_h(i) >= recovery.

    With n_f and n_l the numbers of heads whose class has frequent and local tokens, a token i is
    asked for by n_f [i frequent] + n_l [i local] heads, and by all if it is special; a head that
    asks for all makes no difference. Frequent are the FREQUENT * kept tokens with the largest
    A(i), as of H2O, local the LOCAL * kept newest. Ties go by A(i), then to the older token.
    Until a prompt has been profiled, A(i) alone decides.
    """

    name = "fastgen"
    needs: ClassVar[ScoreNeed] = ScoreNeed.HEADS

    def __init__(self, params: PolicyParams, *, stream: int) -> None:
        super().__init__(params, stream=stream)
        self._sums = TokenArray(np.float64)
        self.frequent_heads = 0
        self.local_heads = 0

    def observe(self, scores: StepScores) -> None:
        sums = self._sums.align(scores.token_ids)
        sums += scores.values
        if scores.per_head is not None:
            # The last chunk of a prompt sees all of it, so the latest profile counts.
            self._profile(scores.token_ids, scores.per_head)

    def _profile(self, token_ids: npt.NDArray[np.int32], per_head: npt.NDArray[np.float32]) -> None:
        count = len(token_ids)
        special = token_ids < self.params.sinks
        heavy = int(FREQUENT * count)
        late = np.zeros(count, dtype=np.bool_)
        late[np.argsort(token_ids)[count - int(LOCAL * count) :]] = True
        needed = self.params.recovery * per_head.sum(axis=1)
        # Per head the others' weights, with the frequent ones in front.
        others = np.where(special, np.float32(-1), per_head)
        order = np.argpartition(-others, min(heavy, count - 1), axis=1)[:, :heavy]
        frequent = np.zeros(per_head.shape, dtype=np.bool_)
        np.put_along_axis(frequent, order, True, axis=1)
        frequent |= special
        small = per_head[:, special].sum(axis=1) >= needed
        medium = (per_head * frequent).sum(axis=1) >= needed
        large = (per_head * (frequent | late)).sum(axis=1) >= needed
        self.frequent_heads = int((~small & (medium | large)).sum())
        self.local_heads = int((~small & ~medium & large).sum())

    def victims(self, view: PolicyView) -> npt.NDArray[np.int32]:
        sums = self._sums.dense(view.num_tokens)
        live = np.flatnonzero(view.live)
        asking = np.zeros(view.num_tokens, dtype=np.int32)
        least = lowest(sums, live, len(live) - int(FREQUENT * view.kept))
        frequent = view.live.copy()
        frequent[least] = False
        asking[frequent] = self.frequent_heads
        asking[live[len(live) - int(LOCAL * view.kept) :]] += self.local_heads
        first = max(view.first, self.params.sinks)
        candidates = np.flatnonzero(view.live[first : view.end]) + first
        chosen = np.empty(0, dtype=np.int32)
        both = (self.frequent_heads, self.local_heads)
        for level in sorted({0, *both, sum(both)}):
            group = candidates[asking[candidates] == level]
            chosen = np.concatenate([chosen, lowest(sums, group, view.excess - len(chosen))])
            if len(chosen) == view.excess:
                break
        return chosen

    @classmethod
    def min_budget(cls, params: PolicyParams) -> int:
        return params.sinks + 1
