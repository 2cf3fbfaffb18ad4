"""What a fuzzing campaign did and found, whatever its target."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vtoken.testing.script import Call, EngineSpec
from vtoken.trace.format import Header, Record


@dataclass
class Finding:
    """One violation: what broke, and how to have it again.

    Attributes:
        law: the law, or "bytes" or "pool" where the harness itself saw it, "rejection" where a
            wrong call was accepted, "crash" for any other error.
        seed, episode: the campaign with this seed, begun at this episode, finds it again.
        header, records: its trace up to the event, if the target has one.
        made, script: the engine and what was asked of it (target core).
        history: the shortest list of events that shows it, in words (target model).
    """

    law: str
    message: str
    seed: int
    episode: int
    header: Header | None = None
    records: list[Record] = field(default_factory=list)
    made: EngineSpec | None = None
    script: list[Call] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


@dataclass
class FuzzReport:
    """Running totals of a campaign.

    Attributes:
        target: model, core or engine.
        steps: engine steps; for the model, events tried.
        events: events the spec's model accepted, in lock step where there is an implementation.
        coverage: the same by kind.
        rejections: wrong calls or events that were refused, by reason.
        shrinks: runs made to find a smaller failure.
        seconds, cpu_seconds: since `begin`, of the clock and of the processor: on a machine that is
            shared the second says what one core can do.
    """

    target: str
    seed: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    episodes: int = 0
    steps: int = 0
    events: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    shrinks: int = 0
    findings: list[Finding] = field(default_factory=list)
    _started: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        self._started = time.monotonic(), time.process_time()

    def tick(self) -> float:
        """Take the time; seconds since `begin`."""
        self.seconds = time.monotonic() - self._started[0]
        self.cpu_seconds = time.process_time() - self._started[1]
        return self.seconds

    @property
    def events_per_second(self) -> float:
        return self.events / self.seconds if self.seconds else 0.0

    @property
    def events_per_cpu_second(self) -> float:
        return self.events / self.cpu_seconds if self.cpu_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "episodes": self.episodes,
            "steps": self.steps,
            "events": self.events,
            "events_per_second": round(self.events_per_second, 1),
            "events_per_cpu_second": round(self.events_per_cpu_second, 1),
            "coverage": dict(sorted(self.coverage.items())),
            "rejections": dict(sorted(self.rejections.items())),
            "shrinks": self.shrinks,
            "violations": len(self.findings),
            "findings": [
                {"law": f.law, "message": f.message, "seed": f.seed, "episode": f.episode}
                for f in self.findings
            ],
        }
