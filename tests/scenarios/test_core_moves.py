"""How often tokens are copied, on the core with real bytes and no engine; exact counts.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from vtoken.testing.harness import FakeEngine


@dataclass
class Moves:
    """What the plans of a run did.

    Attributes:
        plans: per plan, tokens moved, blocks freed and holes there were.
        times: how often each token was moved.
    """

    plans: list[tuple[int, int, int]] = field(default_factory=list)
    times: Counter[int] = field(default_factory=Counter)
    evicted: int = 0

    @property
    def total(self) -> int:
        return sum(self.times.values())


def decode(
    block_size: int, *, deaths: int, births: int, every: int = 1, steps: int = 150, seed: int = 0
) -> Moves:
    """400 tokens; each step computes `births` more, and of all, random ones die `deaths` at a
    time `every` so many steps."""
    made = FakeEngine(
        mode="eager", block_size=block_size, num_blocks=1200 // block_size + 2, level=1
    )
    made.add("a", prompt_len=400)
    made.step()
    rng, found = np.random.default_rng(seed), Moves()
    for number in range(steps):
        if births > 1:
            made.grow("a", births - 1)
        if number % every == 0:
            made.evict("a", rng.choice(made.evictable("a"), deaths, replace=False))
            found.evicted += deaths
        holes = made.table("a").num_holes + (deaths if number % every == 0 else 0)
        step = made.schedule()
        for change in step.changes:
            found.plans.append((len(change.token_ids), len(change.dropped), holes))
            found.times.update(change.token_ids.tolist())
        made.execute(step)
    made.verify()
    return found


# S21 --------------------------------------------------------------------------------------------
# `eager` closes holes for a dense view, which is part of the eviction and exempt from the gate
# that a plan frees a block (I4); so a token may be moved again although no block came back. What
# bounds the copies there is the number of deaths. With deferred reclamation the rule itself holds:
# no token is moved twice within k steps unless a block is freed each time.


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_s21_at_a_fixed_budget_nothing_is_ever_moved(block_size: int, seed: int) -> None:
    """Given a budget that is reached; when one token dies at random and one is computed per step;
    then the new one takes the old one's slot, and no token is moved at all."""
    assert decode(block_size, deaths=1, births=1, seed=seed).total == 0


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    ("deaths", "births", "every"),
    [(2, 1, 1), (3, 1, 1), (3, 3, 1), (5, 5, 1), (4, 2, 1), (8, 1, 8), (40, 1, 20)],
)
def test_s21_every_copy_is_paid_for_by_a_death(
    block_size: int, deaths: int, births: int, every: int
) -> None:
    """Given random deaths, one or many at a time, between steps of one or many tokens; when holes
    are closed; then a plan moves at most as many tokens as there are holes, one that frees no
    block moves less than a block, and all plans together at most as many as have died."""
    found = decode(block_size, deaths=deaths, births=births, every=every)
    assert found.plans
    for moved, freed, holes in found.plans:
        assert moved <= holes
        assert moved < (freed + 1) * block_size
    assert found.total <= found.evicted
