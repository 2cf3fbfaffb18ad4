"""What the scheduler tells the workers in each step, beside vLLM's own SchedulerOutput.

It rides as an attribute of the `SchedulerOutput` object: that survives vLLM's executors
(in-process by reference, multiprocess by pickling), and every tensor-parallel rank gets the
same copy. Everything in it is a snapshot, because with async scheduling the tables move on while
a step is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vtoken.core.arrays import TableSnapshot
from vtoken.core.layout import StepLayout, StepOrders
from vtoken.errors import InvariantViolation

_ATTRIBUTE = "vtoken_step"
_FAILED = "vtoken_failed"


@dataclass
class StepMetadata:
    """One step's layout news.

    Attributes:
        orders: what is to be done about relocation, before anything else in the step.
        number: which one it is of those that were attached, from 1: none may be lost or come twice.
        layouts: per scheduled request that differs from vLLM's own layout.
        expected: tables, the step's tokens included, of the scheduled requests whose accesses
            the worker shall check (L6, L7).
    """

    orders: StepOrders = field(default_factory=StepOrders)
    number: int = 0
    layouts: dict[str, StepLayout] = field(default_factory=dict)
    expected: dict[str, TableSnapshot] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return self.orders.empty and not (self.layouts or self.expected)


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


def tell_failed(output: ModelRunnerOutput, flights: list[int]) -> None:
    """The way back: plans in flight of which a copy has failed on this rank."""
    setattr(output, _FAILED, flights)


def failed_flights(output: ModelRunnerOutput) -> list[int]:
    found: list[int] = getattr(output, _FAILED, [])
    return found


def metadata_of(output: SchedulerOutput) -> StepMetadata | None:
    """The step's metadata, or None for steps that vLLM made without a scheduler (dummy runs)."""
    found: StepMetadata | None = getattr(output, _ATTRIBUTE, None)
    return found
