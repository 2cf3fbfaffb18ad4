"""How seeded faults are hunted: episodes by seed, until something is caught.

| hunt | what happens in an episode | who looks |
| --- | --- | --- |
| walk | the seeded walk of `test_core_against_model.py`, in the fault's modes, several block sizes, pools that run out and pools that do not, and in the background mode at the worst moment | every check, at level 3, and the harness on the bytes |
| pairs | the same walk in two modes at once | L9 alone, and the harness |
| sharing | the same walk | L8 alone, over the bytes of blocks that stay in the prefix cache |
| copy-out | requests that share a prefix, of which each keeps a few tokens: headroom is drawn in most episodes, and plans are aborted | every check, at level 3, and the harness |
| crowd | requests that all have something to gain in every step, and a budget for one of them | every check, at level 3 |
| choosing | the same walk, in which real policies with drawn options name the victims | the harness on weights and victims; what H2O has added up, token by token |
| pages | the page-1 view of two steps over made-up caches and rows | every row, read through the view |
| view uses | some dummy batches and a step, with the layers that used their view | a plain definition of who may pass |
| tap | one step's attention over made-up keys, in two ranks, some rows sampled, q used at once or copied | a softmax of the keys, written down plainly |
"""  # noqa: E501

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

import vtoken_spec as spec
from support.attention import tapped_step
from support.mutation import Mutant
from support.paged_view import paged_view, view_uses
from vtoken.checks.judge import judge
from vtoken.core import BackgroundParams
from vtoken.errors import InvariantViolation, Rejected
from vtoken.policies import StepScores
from vtoken.policies.h2o import H2O
from vtoken.testing.choosing import Choosers
from vtoken.testing.device import STRATEGIES, SimulatedDevice
from vtoken.testing.faults import must
from vtoken.testing.harness import FakeEngine
from vtoken.testing.pool import Key, PoolFault
from vtoken.testing.walk import act, drawn_engine
from vtoken.testing.worker import numbers_of

SECONDS = 60.0
STEPS = 40
_SIZES = (4, 2, 16, 1)

Episode = Callable[[int], None]


def hunt(fault: Mutant, *, how: str = "", seconds: float = SECONDS) -> tuple[str, float]:
    """Run episodes until something is caught: (what caught it, seconds); ("nothing", s) if nothing
    is. `how` is another hunt than the fault's own."""
    start = time.monotonic()
    episode = HUNTS[how or fault.hunt]
    caught = "nothing"
    for seed in range(10_000):
        caught = _outcome(partial(episode, seed, fault.modes))
        if caught != "nothing" or time.monotonic() - start > seconds:
            break
    return caught, time.monotonic() - start


def _outcome(run: Callable[[], None]) -> str:
    try:
        run()
    except InvariantViolation as violation:
        return violation.law
    except PoolFault:
        return "pool"
    except AssertionError:
        return "bytes"
    except Rejected:
        return "contract"
    except Exception:
        return "crash"
    return "nothing"


def walk(seed: int, modes: tuple[str, ...]) -> None:
    rng, size = random.Random(seed), _SIZES[seed % 4]
    engine = drawn_engine(
        rng, mode=modes[seed // 2 % len(modes)], block_size=size, ample=seed % 3 == 0
    )
    names: Counter[str] = Counter()
    for _ in range(STEPS):
        act(engine, rng, names=names)
        skip = [request.req_id for request in engine.running if rng.random() < 0.15]
        engine.step(skip=skip, cap=rng.choice([1, size, size + 1, 99]))
        if engine.executor.lag == 1 or rng.random() < 0.3:
            engine.verify()
    engine.verify()
    engine.executor.drain()


def pairs(seed: int, modes: tuple[str, ...]) -> None:
    size = _SIZES[seed % 3]
    rngs = [random.Random(seed) for _ in range(2)]
    engines = [
        drawn_engine(random.Random(seed), mode=mode, block_size=size, ample=True, level=0)
        for mode in ("off", modes[seed % len(modes)])
    ]
    counts: list[Counter[str]] = [Counter(), Counter()]
    for _ in range(STEPS):
        for engine, rng, names in zip(engines, rngs, counts, strict=True):
            act(engine, rng, names=names)
            engine.step()
            engine.executor.synchronize()
        judge(spec.l9_neutrality(engines[0].visible(), engines[1].visible()))


def sharing(seed: int, modes: tuple[str, ...]) -> None:
    rng, size = random.Random(seed), _SIZES[seed % 3]
    mode = modes[seed // 3 % len(modes)]
    engine = drawn_engine(rng, mode=mode, block_size=size, ample=seed % 2 == 0, level=0)
    names: Counter[str] = Counter()
    for _ in range(STEPS):
        before, keys = reachable(engine)
        act(engine, rng, names=names)
        engine.step()
        after, later = reachable(engine)
        # What was allotted anew and cached again in the same step is another content.
        kept = {slot: old for slot, old in before.items() if keys[slot] == later.get(slot)}
        judge(spec.l8_sharing(kept, {slot: after[slot] for slot in kept}))


def reachable(engine: FakeEngine) -> tuple[dict[int, int], dict[int, Key]]:
    """Slot -> payload, and slot -> key, of the blocks that the prefix cache can hit."""
    engine.executor.synchronize()
    keys = {
        block * engine.block_size + offset: key
        for block in range(engine.pool.num_blocks)
        if (key := engine.pool.key(block)) is not None
        for offset in range(engine.block_size)
    }
    payloads = numbers_of(engine.layout.read(torch.tensor(list(keys)))) if keys else []
    return dict(zip(keys, payloads, strict=True)), keys


def copy_out(seed: int, modes: tuple[str, ...]) -> None:
    rng, size = random.Random(seed), (2, 4)[seed % 2]
    params = BackgroundParams(
        threshold=0.05,
        headroom=rng.choice([1, 2]),
        commit_delay=rng.choice([0, 1, 3]),
        copy_out=True,
    )
    engine = FakeEngine(
        mode="background",
        block_size=size,
        num_blocks=60 if seed % 3 else 18,
        background=params,
        device=SimulatedDevice(rng.choice(STRATEGIES), seed=seed),
        lag=rng.choice([1, 3]),
    )
    thinned: set[str] = set()
    for number in range(24):
        if len(engine.running) + len(engine.waiting) < 4:
            engine.add(f"r{number}", prompt_len=4 * size + 1)
        for request in list(engine.running):
            name, table = request.req_id, engine.table(request.req_id)
            if name not in thinned and rng.random() < 0.7:
                thinned.add(name)  # one token of each whole block stays
                engine.evict(name, [t for t in engine.evictable(name) if t % size and t < 4 * size])
            elif rng.random() < 0.15:
                getattr(engine, rng.choice(["finish", "preempt"]))(name)
                thinned.discard(name)
            elif table.logical_len > 8 * size:
                engine.finish(name)
        for flight in engine.reclaimer.flights:
            if rng.random() < 0.1:
                engine.reclaimer.abort_flight(flight.number)
        engine.step()
        if engine.executor.lag == 1:
            engine.verify()
    engine.verify()
    engine.executor.drain()


def crowd(seed: int, modes: tuple[str, ...]) -> None:
    size, rng = 4, random.Random(seed)
    params = BackgroundParams(threshold=0.05, commit_delay=seed % 2, copy_budget=size)
    engine = FakeEngine(mode="background", block_size=size, num_blocks=600, background=params)
    for name in "abcd":
        engine.add(name, prompt_len=size + 1, family=ord(name))
    engine.step()
    for name in "abcd":  # what is computed after an eviction is not cached: it can be moved (L10)
        engine.evict(name, range(size))
        engine.grow(name, 100)
    engine.step()
    for number in range(20):
        first = size * (1 + 4 * number)
        for name in "abcd":
            engine.evict(name, [first + size * i + rng.randrange(size) for i in range(4)])
            engine.grow(name, 4 * size)
        engine.step()
    engine.verify()


def choosing(seed: int, modes: tuple[str, ...]) -> None:
    rng, size = random.Random(seed), _SIZES[seed % 4]
    mode = modes[seed // 2 % len(modes)]
    engine = drawn_engine(rng, mode=mode, block_size=size, ample=seed % 3 == 0, level=0)
    choosers, names = Choosers(engine, rng), Counter[str]()
    told = engine.scores.listener
    assert told is not None
    totals: dict[tuple[str, int], Counter[int]] = {}

    def hear(req_id: str, scores: StepScores) -> None:
        told(req_id, scores)
        policy, mine = choosers.policy_of(req_id), (req_id, engine.table(req_id).life)
        seen = totals.setdefault(mine, Counter())
        for token, weight in zip(scores.token_ids.tolist(), scores.values.tolist(), strict=True):
            seen[token] += weight  # type: ignore[assignment]
        if isinstance(policy, H2O):
            ids = scores.token_ids.tolist()
            sums = policy._sums.dense(max(ids) + 1)
            right = [float(sums[token]) for token in ids] == [seen[token] for token in ids]
            must(right, f"{req_id}: H2O has added up other weights than those of its tokens")

    engine.scores.listener = hear
    for _ in range(STEPS):
        act(engine, rng, names=names, choosers=choosers)
        skip = [request.req_id for request in engine.running if rng.random() < 0.15]
        engine.step(skip=skip, cap=rng.choice([1, size, size + 1, 99]))
    engine.verify()


def tap(seed: int, modes: tuple[str, ...]) -> None:
    tapped_step(seed)


def pages(seed: int, modes: tuple[str, ...]) -> None:
    paged_view(seed)


def uses_of_view(seed: int, modes: tuple[str, ...]) -> None:
    view_uses(seed)


HUNTS: Mapping[str, Callable[[int, tuple[str, ...]], None]] = MappingProxyType(
    {
        "walk": walk,
        "pairs": pairs,
        "sharing": sharing,
        "copy-out": copy_out,
        "crowd": crowd,
        "choosing": choosing,
        "tap": tap,
        "pages": pages,
        "view uses": uses_of_view,
    }
)
