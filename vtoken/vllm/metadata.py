"""What the scheduler tells the workers in each step, beside vLLM's own SchedulerOutput, and back.

It rides as an attribute of the `SchedulerOutput` object: that survives vLLM's executors
(in-process by reference, multiprocess by pickling), and every tensor-parallel rank gets the
same copy. Everything in it is a snapshot, because with async scheduling the tables move on while
a step is in flight. What the first rank has to say rides back on the `ModelRunnerOutput`.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

from vtoken.core.arrays import TableSnapshot
from vtoken.core.layout import StepLayout, StepOrders
from vtoken.errors import InvariantViolation
from vtoken.policies.taps import TappedStep, Taps

_ATTRIBUTE = "vtoken_step"
_NEWS = "vtoken_news"


@dataclass
class StepMetadata:
    """One step's layout news.

    Attributes:
        orders: what is to be done about relocation, before anything else in the step.
        number: which one it is of those that were attached, from 1: none may be lost or come twice.
        layouts: per scheduled request that differs from vLLM's own layout.
        expected: tables, the step's tokens included, of the scheduled requests whose accesses
            the worker shall check (L6, L7).
        taps: rows whose attention weights are wanted, or None.
    """

    orders: StepOrders = field(default_factory=StepOrders)
    number: int = 0
    layouts: dict[str, StepLayout] = field(default_factory=dict)
    expected: dict[str, TableSnapshot] = field(default_factory=dict)
    taps: Taps | None = None

    @property
    def empty(self) -> bool:
        return self.orders.empty and not (self.layouts or self.expected or self.taps)


def attach(output: SchedulerOutput, step: StepMetadata) -> None:
    setattr(output, _ATTRIBUTE, step)


class Sequence:
    """Counts attached metadata, on both sides."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        self.number += 1
        return self.number

    def expect(self, step: StepMetadata) -> None:
        """Raises InvariantViolation (I4) unless `step` is the next one."""
        if step.number != self.next():
            raise InvariantViolation(
                law="I4",
                message="a step's layout news was lost or came twice",
                before=self.number,
                after=step.number,
            )


@dataclass
class StepNews:
    """The way back.

    Attributes:
        failed: plans in flight of which a copy has failed on this rank.
        scores: of this step, or of earlier ones that could not be told; in order.
    """

    failed: list[int] = field(default_factory=list)
    scores: list[TappedStep] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.failed or self.scores)


class _Telling(AsyncModelRunnerOutput):
    """An output that is still to come, and the news that go with it."""

    def __init__(self, coming: AsyncModelRunnerOutput, news: StepNews) -> None:
        self._coming = coming
        self._news = news

    def get_output(self) -> ModelRunnerOutput:
        told = tell(self._coming.get_output(), self._news)
        assert isinstance(told, ModelRunnerOutput)
        return told


def tell(
    output: ModelRunnerOutput | AsyncModelRunnerOutput, news: StepNews
) -> ModelRunnerOutput | AsyncModelRunnerOutput:
    """`output` with news; use what is returned, since vLLM shares its empty output."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _Telling(output, news)
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        output = copy(output)
    setattr(output, _NEWS, news)
    return output


def news_of(output: ModelRunnerOutput) -> StepNews:
    found: StepNews | None = getattr(output, _NEWS, None)
    return found or StepNews()


def failed_flights(output: ModelRunnerOutput) -> list[int]:
    return news_of(output).failed


def metadata_of(output: SchedulerOutput) -> StepMetadata | None:
    """The step's metadata, or None for steps that vLLM made without a scheduler (dummy runs)."""
    found: StepMetadata | None = getattr(output, _ATTRIBUTE, None)
    return found
