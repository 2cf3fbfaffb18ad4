"""The fuzzing campaign on the core: the real tables, planner, reclaimer, mover and checkers.

Each episode is a seeded walk on `FakeEngine` at check level 3, in a mode, block size, pool and
swarm of operations drawn from its seed; victims are drawn, or named by real policies with drawn
options and made-up attention weights; in the background mode copies run on a simulated device at
the worst moment. Between steps, operations that must be rejected are tried as well. An episode is
named by campaign seed and number, which is all a failure needs to come back; its trace and its
script are kept besides.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from vtoken.errors import Rejected
from vtoken.testing.choosing import Choosers
from vtoken.testing.harness import FakeEngine
from vtoken.testing.report import Finding, FuzzReport
from vtoken.testing.script import EngineSpec, ScriptedEngine, what_broke
from vtoken.testing.walk import SIZES, Swarm, act, pool_blocks
from vtoken.trace.format import Header

__all__ = ["Finding", "FuzzReport", "fuzz_core"]

EPISODE_STEPS = 60


def fuzz_core(
    *,
    seconds: float,
    seed: int,
    first_episode: int = 0,
    on_step: Callable[[FuzzReport], None] | None = None,
) -> FuzzReport:
    """Run episodes until time is up or one finds a violation."""
    report = FuzzReport("core", seed)
    report.begin()
    while report.tick() < seconds and not report.findings:
        episode = first_episode + report.episodes
        _episode(report, random.Random(f"{seed}/{episode}"), episode, on_step)
        report.episodes += 1
        report.tick()
    return report


def _episode(
    report: FuzzReport,
    rng: random.Random,
    episode: int,
    on_step: Callable[[FuzzReport], None] | None,
) -> None:
    mode = rng.choice(["eager", "eager", "background", "background", "background", "off"])
    # In blocks of one slot nothing is ever relocated; in small ones most.
    size = rng.choice([2, 2, 4, 4, 16] if mode == "background" else SIZES)
    num_blocks = pool_blocks(size, ample=rng.random() < 0.4)
    made = EngineSpec.drawn(rng, mode=mode, block_size=size, num_blocks=num_blocks)
    engine = made.build(ScriptedEngine, recorded=True)
    assert isinstance(engine, ScriptedEngine)
    swarm, names, wrong = Swarm.drawn(rng), Counter[str](), list[str]()
    choosers = Choosers(engine, rng) if swarm.policies else None

    def run() -> None:
        for _ in range(EPISODE_STEPS):
            act(engine, rng, names=names, swarm=swarm, choosers=choosers)
            if fault := _try_wrong_calls(engine, rng, report.rejections):
                wrong.append(fault)
                return
            skip = [r.req_id for r in engine.running if rng.random() < 0.15]
            engine.step(skip=skip, cap=rng.choice([1, size, size + 1, 99]))
            if engine.executor.lag == 1 or rng.random() < 0.3:
                engine.verify()
            report.steps += 1
            report.tick()
            if on_step is not None:
                on_step(report)
        engine.verify()
        engine.executor.drain()

    found = what_broke(run) or (("rejection", wrong[0]) if wrong else None)
    shadow = engine.checker.shadow
    assert shadow is not None
    report.events += shadow.events
    report.coverage.update(shadow.kinds)
    if found is not None:
        header = Header(size, num_blocks, {"seed": report.seed, "episode": episode})
        report.findings.append(
            Finding(*found, report.seed, episode, header, engine.records, made, engine.script)
        )


def _try_wrong_calls(engine: FakeEngine, rng: random.Random, seen: Counter[str]) -> str:
    """Operations that must be refused and change nothing; the first that is not, in words."""
    tables = engine.reclaimer.tables
    names = [r.req_id for r in engine.running if r.req_id in tables]
    if not names or rng.random() < 0.5:
        return ""
    table = tables[rng.choice(names)]
    newest, dead = table.logical_len - 1, np.flatnonzero(~table.live).tolist()
    other = [*table.blocks.tolist()[:-1], engine.pool.num_blocks + 3]
    calls: list[tuple[str, Callable[[], object]]] = [
        ("evict an unknown token", lambda: tables.evict_token(table.req_id, newest + 1)),
        ("evict a negative id", lambda: tables.evict_token(table.req_id, -1)),
        ("evict the newest token", lambda: tables.evict_token(table.req_id, newest)),
        ("evict of an unknown request", lambda: tables.evict_token("nobody", 0)),
        (
            "sync to a shorter length",
            lambda: tables.sync_new_tokens(table.req_id, table.blocks.tolist(), newest),
        ),
        (
            "sync of another block list",
            lambda: tables.sync_new_tokens(table.req_id, other, newest + 2),
        ),
        (
            "move to a block not owned",
            lambda: tables.apply_moves(table.req_id, [(newest, (engine.pool.num_blocks + 3, 0))]),
        ),
    ]
    if dead:
        token = rng.choice(dead)
        calls.append(("evict a dead token", lambda: tables.evict_token(table.req_id, token)))
    what, call = rng.choice(calls)
    before = table.snapshot()
    try:
        call()
    except Rejected:
        after = table.snapshot()
        same = all(
            np.array_equal(getattr(before, name), getattr(after, name))
            for name in ("logical_len", "physical_len", "blocks", "slots", "live")
        )
        if not same:
            return f"{what}: refused, but the table of {table.req_id} changed"
        seen[what] += 1
        return ""
    return f"{what}: accepted for {table.req_id}"
