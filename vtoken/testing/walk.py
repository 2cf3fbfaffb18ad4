"""The seeded walk: what can happen to an engine between two steps, drawn at random."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from vtoken.core import ReclaimMode
from vtoken.testing.choosing import Choosers
from vtoken.testing.harness import FakeEngine
from vtoken.testing.script import EngineSpec

SIZES = (1, 2, 4, 16)
MOST_REQUESTS = 6


def pool_blocks(block_size: int, *, ample: bool) -> int:
    return 440 // block_size + 8 if ample else 24 // block_size + 5


def longest(block_size: int) -> int:
    """Tokens at which a request ends; one such request fits the smallest pool."""
    return 18 + 2 * block_size


@dataclass(frozen=True)
class Swarm:
    """Which operations an episode has at all: some faults need one to be absent for long.

    Attributes:
        evict, bulk, grow, finish, preempt, share: whether tokens are evicted, many at once,
            several tokens computed at once, requests ended early, pushed out, of one family.
        policies: whether real policies say which tokens go, and not chance alone.
    """

    evict: bool = True
    bulk: bool = True
    grow: bool = True
    finish: bool = True
    preempt: bool = True
    share: bool = True
    policies: bool = False

    @classmethod
    def drawn(cls, rng: random.Random) -> Swarm:
        return cls(*(rng.random() < 0.8 for _ in range(6)), policies=rng.random() < 0.4)


EVERYTHING = Swarm()


def drawn_engine(
    rng: random.Random,
    *,
    mode: ReclaimMode | str,
    block_size: int,
    ample: bool,
    level: int = 3,
    recorded: bool = False,
) -> FakeEngine:
    """An engine whose layout, and in the background mode whose parameters, adversary and lag, are
    drawn."""
    num_blocks = pool_blocks(block_size, ample=ample)
    made = EngineSpec.drawn(
        rng, mode=mode, block_size=block_size, num_blocks=num_blocks, level=level
    )
    return made.build(recorded=recorded)


def act(
    engine: FakeEngine,
    rng: random.Random,
    *,
    names: Counter[str],
    swarm: Swarm = EVERYTHING,
    choosers: Choosers | None = None,
) -> None:
    """One round of what can happen to an engine between two steps.

    Args:
        choosers: who says which tokens go; without, chance does.
    """
    size = engine.block_size
    if len(engine.running) + len(engine.waiting) < MOST_REQUESTS and rng.random() < 0.4:
        names["add"] += 1
        most = min(3 * size + 2, 36)
        prompt_len = rng.choice([rng.randint(1, most), most])
        family = rng.randint(0, 1)
        engine.add(
            f"r{names['add']}",
            prompt_len=prompt_len,
            family=family if swarm.share else names["add"],
        )
    for request in list(engine.running):
        chance = rng.random()
        if choosers is not None and chance < 0.5:
            if victims := choosers.victims(request):
                names["evict"] += 1
                engine.evict(request.req_id, victims)
        elif chance < 0.5:
            free_to_go = engine.evictable(request.req_id) if swarm.evict else []
            if free_to_go:
                names["evict"] += 1
                # All over, or in the first blocks, which are often shared.
                among = free_to_go[: rng.choice([len(free_to_go), len(free_to_go), 2 * size])]
                most = len(among) if swarm.bulk else 1
                count = rng.choice([1, 1, most, max(1, most * 3 // 4), max(1, most // 2)])
                engine.evict(request.req_id, rng.sample(among, count))
        elif chance < 0.6 and swarm.grow:
            names["grow"] += 1
            engine.grow(request.req_id, rng.randint(1, 2 * size + 1))
        elif (chance < 0.63 and swarm.finish) or request.computed > longest(size):
            names["finish"] += 1
            engine.finish(request.req_id)
        elif chance < 0.66 and swarm.preempt:
            names["preempt"] += 1
            engine.preempt(request.req_id)
