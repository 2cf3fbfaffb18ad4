"""The fuzzing campaign on the core: the real tables, planner, reclaimer, mover and checkers.

Each episode is a seeded walk on `FakeEngine` at check level 3, in a mode, block size, pool and
swarm of operations drawn from its seed; between steps, operations that must be rejected are
tried as well. An episode is named by campaign seed and number, which is all a failure needs to
come back; its events are kept as a trace besides.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.errors import InvariantViolation, Rejected
from vtoken.testing.harness import ByteFault, FakeEngine
from vtoken.testing.pool import PoolFault
from vtoken.testing.walk import SIZES, Swarm, act, drawn_engine
from vtoken.trace.format import Header, Record

EPISODE_STEPS = 60


@dataclass
class Finding:
    """One violation: what broke, and how to have it again.

    Attributes:
        law: the law, or "bytes" or "pool" where the harness itself saw it, "rejection" where a
            wrong call was accepted, "crash" for any other error.
        seed, episode: `Campaign(seed=..., first_episode=...)` runs the episode again.
        header, records: its trace, up to the event.
    """

    law: str
    message: str
    seed: int
    episode: int
    header: Header
    records: list[Record]


@dataclass
class FuzzReport:
    """What a campaign did.

    Attributes:
        events: events the spec's model accepted in lock step.
        coverage: the same by kind.
        rejections: wrong calls that were refused, by reason.
    """

    target: str
    seed: int
    seconds: float = 0.0
    episodes: int = 0
    steps: int = 0
    events: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def events_per_second(self) -> float:
        return self.events / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "episodes": self.episodes,
            "steps": self.steps,
            "events": self.events,
            "events_per_second": round(self.events_per_second, 1),
            "coverage": dict(sorted(self.coverage.items())),
            "rejections": dict(sorted(self.rejections.items())),
            "violations": len(self.findings),
            "findings": [
                {"law": f.law, "message": f.message, "seed": f.seed, "episode": f.episode}
                for f in self.findings
            ],
        }


def fuzz_core(
    *,
    seconds: float,
    seed: int,
    first_episode: int = 0,
    on_step: Callable[[FuzzReport], None] | None = None,
) -> FuzzReport:
    """Run episodes until time is up or one finds a violation."""
    report = FuzzReport("core", seed)
    start = time.monotonic()
    while time.monotonic() - start < seconds and not report.findings:
        episode = first_episode + report.episodes
        _episode(report, random.Random(f"{seed}/{episode}"), episode, start, on_step)
        report.episodes += 1
        report.seconds = time.monotonic() - start
    return report


def _episode(
    report: FuzzReport,
    rng: random.Random,
    episode: int,
    start: float,
    on_step: Callable[[FuzzReport], None] | None,
) -> None:
    mode = rng.choice(["eager", "eager", "background", "background", "background", "off"])
    # In blocks of one slot nothing is ever relocated; in small ones most.
    size = rng.choice([2, 2, 4, 4, 16] if mode == "background" else SIZES)
    engine = drawn_engine(
        rng,
        mode=mode,
        block_size=size,
        ample=rng.random() < 0.4,
        recorded=True,
    )
    swarm, names = Swarm.drawn(rng), Counter[str]()
    wrong = ""
    try:
        for _ in range(EPISODE_STEPS):
            act(engine, rng, names=names, swarm=swarm)
            wrong = _try_wrong_calls(engine, rng, report.rejections)
            if wrong:
                break
            skip = [r.req_id for r in engine.running if rng.random() < 0.15]
            engine.step(skip=skip, cap=rng.choice([1, size, size + 1, 99]))
            if engine.executor.lag == 1 or rng.random() < 0.3:
                engine.verify()
            report.steps += 1
            report.seconds = time.monotonic() - start
            if on_step is not None:
                on_step(report)
        engine.verify()
        engine.executor.drain()
    except InvariantViolation as violation:
        found = violation.law, violation.message
    except PoolFault as fault:
        found = "pool", str(fault)
    except ByteFault as fault:
        found = "bytes", str(fault)
    except Exception as error:
        found = "crash", f"{type(error).__name__}: {error}"
    else:
        found = ("rejection", wrong) if wrong else ("", "")
    shadow = engine.checker.shadow
    assert shadow is not None
    report.events += shadow.events
    report.coverage.update(shadow.kinds)
    if found[0]:
        header = Header(size, engine.pool.num_blocks, {"seed": report.seed, "episode": episode})
        report.findings.append(
            Finding(found[0], found[1], report.seed, episode, header, engine.records)
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
