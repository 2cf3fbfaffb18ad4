"""The fuzzing campaign on the reference model: walks of allowed and forbidden events, each held to
its expectation and to every law (`model_walk.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import vtoken_spec as spec
from vtoken.testing.model_walk import ModelFault, ModelWalk, SeededChooser
from vtoken.testing.report import Finding, FuzzReport
from vtoken.trace.shrink import minimal
from vtoken_spec import Reason

EPISODE_EVENTS = 80

Tried = tuple[spec.Event, Reason | None]
"""An event and the reason for which it must be rejected, None if it must be accepted."""


def fuzz_model(
    *,
    seconds: float,
    seed: int,
    first_episode: int = 0,
    on_step: Callable[[FuzzReport], None] | None = None,
) -> FuzzReport:
    """Run walks until time is up or one breaks a law."""
    report = FuzzReport("model", seed)
    report.begin()
    while report.tick() < seconds and not report.findings:
        episode = first_episode + report.episodes
        walk, tried = ModelWalk(SeededChooser(f"{seed}/{episode}")), list[Tried]()
        for _ in range(EPISODE_EVENTS):
            event, expected = walk.draw()
            tried.append((event, expected))
            report.steps += 1
            try:
                walk.apply(event, expected)
            except ModelFault as fault:
                history = _smallest(report, seed, episode, tried, on_step)
                report.findings.append(Finding("model", str(fault), seed, episode, history=history))
                break
            if expected is None:
                report.events += 1
                report.coverage[type(event).__name__] += 1
            else:
                report.rejections[expected.name] += 1
        report.episodes += 1
        report.tick()
        if on_step is not None:
            on_step(report)
    return report


def _smallest(
    report: FuzzReport,
    seed: int,
    episode: int,
    tried: Sequence[Tried],
    on_step: Callable[[FuzzReport], None] | None,
) -> list[str]:
    """The fewest events before the last one after which it still fails, in words."""
    *before, last = tried

    def fails(events: Sequence[Tried]) -> bool:
        walk = ModelWalk(SeededChooser(f"{seed}/{episode}"))
        for event, expected in events:
            with suppress(ModelFault):  # it was allowed after events that are left out now
                walk.apply(event, expected)
        try:
            walk.apply(*last)
        except ModelFault:
            return True
        return False

    def progress(_: int, runs: int) -> None:
        report.shrinks = runs
        if on_step is not None:
            on_step(report)

    accepted = [item for item in before if item[1] is None]
    kept = minimal(accepted, fails, on_progress=progress) if fails(accepted) else list(before)
    return [str(event) for event, _ in (*kept, last)]
