"""How often tokens are copied, on the core with real bytes and no engine; exact counts.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from support.mutation import applied, mutant
from support.scene import ORDERS
from vtoken.core import BackgroundParams
from vtoken.core.layout import NO_FLIGHT
from vtoken.errors import InvariantViolation
from vtoken.testing.device import SimulatedDevice, Strategy
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
# bounds the copies there is the number of deaths.


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


# With plans in flight the rule itself holds: a plan is made only if it gives a block back, so that
# a token that is moved again and again has given a block back each time.


def decode_beside(
    block_size: int, *, deaths: int, births: int, seed: int, device: SimulatedDevice, level: int = 1
) -> tuple[Moves, int]:
    """As `decode`, in the background mode; and how many blocks the plans gave back in all."""
    params = BackgroundParams(
        threshold=0.05, commit_delay=seed % 3, moves_per_plan=2 * block_size, headroom=1
    )
    made = FakeEngine(
        mode="background",
        block_size=block_size,
        num_blocks=600 // block_size + 2,
        level=level,
        background=params,
        device=device,
        lag=3,
    )
    made.add("a", prompt_len=200)
    made.step()
    rng, found, given_back = np.random.default_rng(seed), Moves(), 0
    for _ in range(60):
        if births > 1:
            made.grow("a", births - 1)
        made.evict("a", rng.choice(made.evictable("a"), deaths, replace=False))
        found.evicted += deaths
        flying = {flight.number: flight.moves for flight in made.reclaimer.flights}
        step = made.schedule()
        flying |= {flight.number: flight.moves for flight in made.reclaimer.flights}
        for change in step.changes:
            if change.flight == NO_FLIGHT:
                assert change.only_released
                continue
            drawn = len(flying[change.flight].drawn) if change.flight in flying else 0
            gained = len(change.dropped) - drawn
            assert gained > 0, "tokens were moved and no block came back"
            given_back += gained
            found.plans.append((len(change.token_ids), gained, 0))
            found.times.update(change.token_ids.tolist())
        made.execute(step)
    made.verify()
    return found, given_back


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(("deaths", "births"), [(2, 1), (5, 5), (6, 4)])
@pytest.mark.parametrize(("strategy", "seed"), ORDERS[:3])
def test_s21_no_token_is_moved_again_unless_a_block_comes_back_each_time(
    strategy: Strategy, seed: int, deaths: int, births: int, block_size: int
) -> None:
    """Given random deaths in every step; when plans are in flight; then each gives back more blocks
    than it draws, so that no token is moved twice in any number of steps without a block for each
    time; and a block costs less than a block's tokens, since the emptiest are emptied."""
    device = SimulatedDevice(strategy, seed=seed)
    found, given_back = decode_beside(
        block_size, deaths=deaths, births=births, seed=seed, device=device
    )
    for moved, gained, _ in found.plans:
        assert moved < gained * block_size
    assert max(found.times.values(), default=0) <= len(found.plans) <= given_back
    assert found.total < found.evicted


def test_s21_the_control_that_plans_without_a_gain_is_caught() -> None:
    """Given a planner that does not count the headroom that it draws; then I4 forbids the first
    plan that gives nothing back, and tokens are moved in vain where nobody checks."""
    greedy = mutant(
        "plan without gain",
        "vtoken.core.evacuation:plan_evacuation",
        "counts + beside - drawn)",
        "counts + beside)",
        "I4",
    )
    numbers = {"deaths": 2, "births": 1, "seed": 1}
    with applied(greedy), pytest.raises(InvariantViolation, match="I4"):
        decode_beside(16, device=SimulatedDevice("copies last"), **numbers)
    with applied(greedy), pytest.raises(AssertionError, match="no block came back"):
        decode_beside(16, device=SimulatedDevice("copies last"), level=0, **numbers)
