"""A run on the simulated device of which nobody knows yet whether its bytes come out right.

Nothing is synchronised before the end, so copies and steps pile up, and the adversary has the whole
run to choose from. `FAULTS` leave one dependency out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from unittest import mock

import numpy as np

from vtoken.core import BackgroundParams
from vtoken.errors import InvariantViolation
from vtoken.kv.streams import Copy, CopyEvent
from vtoken.testing.device import (
    COMPUTE,
    COPY,
    STRATEGIES,
    AdversarialCopyStream,
    SimulatedDevice,
    Strategy,
)
from vtoken.testing.harness import ByteFault, FakeEngine, Step
from vtoken_spec.order import Op, races

ORDERS: tuple[tuple[Strategy, int], ...] = (
    ("copies last", 0),
    ("copies first", 0),
    *(("random", seed) for seed in range(4)),
)
"""Every strategy of the adversary, with seeds for the one that draws."""


class Scene:
    """An engine in the background mode, in blocks of 4 tokens, and what became of its bytes.

    Args:
        strategy, seed: the adversary.
        num_blocks: usable blocks, the null block not counted.
        level: of the checks; at 0 only the harness looks, at what attention reads.
        params: of the background mode.
    """

    def __init__(
        self,
        strategy: Strategy = "copies last",
        seed: int = 0,
        *,
        num_blocks: int,
        level: int = 3,
        **params: object,
    ) -> None:
        self.device = SimulatedDevice(strategy, seed=seed)
        self.engine = FakeEngine(
            mode="background",
            block_size=4,
            num_blocks=num_blocks + 1,
            level=level,
            background=BackgroundParams(**params),  # type: ignore[arg-type]
            device=self.device,
            lag=1 << 30,
        )
        self.right = True

    def step(self, *, skip: Sequence[str] = (), cap: int = 1 << 20) -> Step:
        """Schedule a step and give it to the device."""
        made = self.engine.schedule(skip=skip, cap=cap)
        self.run(made)
        return made

    def run(self, step: Step) -> None:
        self._watched(partial(self.engine.execute, step))

    def settle(self) -> None:
        """The host waits for all there is; the order that this stands for is not in the log."""
        for stream in (COMPUTE, COPY):
            while self.device.queued(stream):
                self._watched(partial(self.device.synchronize, stream))

    def end(self) -> tuple[bool, set[str]]:
        """Run everything: whether all bytes were right, those that lie there at the end included,
        and the laws that the order breaks."""
        self.settle()
        for request in self.engine.running:
            live = np.flatnonzero(self.engine.table(request.req_id).live).tolist()
            want = {token: request.payloads[token] for token in live}
            self.right &= self.engine.seen(request.req_id) == want
        return self.right, {breach.law for breach in races(self.device.log)}

    def leaves_nothing(self) -> bool:
        """Whether every block is free, each once, when all requests have ended."""
        for request in [*self.engine.running]:
            self.engine.finish(request.req_id)
        self.engine.waiting.clear()
        self.step()
        self.settle()
        pool = self.engine.pool
        return sorted(pool.free) == list(range(1, pool.num_blocks))

    def ops(self, slots: set[int]) -> list[Op]:
        """The operations that touch one of the slots, in the order in which they were given."""
        return [op for op in self.device.log if slots & {*op.reads, *op.writes}]

    def _watched(self, run: Callable[[], None]) -> None:
        try:
            run()
        except (ByteFault, InvariantViolation):
            self.right = False


# Faults -----------------------------------------------------------------------------------------


def launch_does_not_wait() -> AbstractContextManager[object]:
    """The copy stream does not wait for what the compute stream was given before."""
    return mock.patch.object(AdversarialCopyStream, "_follow_compute", return_value=None)


def nothing_waits() -> AbstractContextManager[object]:
    """The compute stream does not wait for the copies."""
    return mock.patch.object(AdversarialCopyStream, "wait", return_value=None)


def event_before_the_last_piece() -> AbstractContextManager[object]:
    """What is waited for is complete before the last piece of a plan is copied."""
    real = AdversarialCopyStream.launch

    def launch(self: AdversarialCopyStream, copies: Sequence[Copy]) -> CopyEvent:
        event = real(self, copies[:-1])
        real(self, copies[-1:])
        return event

    return mock.patch.object(AdversarialCopyStream, "launch", launch)


def caught(
    scene: Callable[..., Scene],
    fault: Callable[[], AbstractContextManager[object]],
    **kwargs: object,
) -> dict[Strategy, tuple[bool, set[str]]]:
    """What becomes of the scene with the fault in it and the checks off, per strategy."""
    found = {}
    for strategy in STRATEGIES:
        with fault():
            found[strategy] = scene(strategy, level=0, **kwargs).end()
    return found
