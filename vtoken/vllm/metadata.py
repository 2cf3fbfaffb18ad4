"""What the scheduler tells the workers in each step, beside vLLM's own SchedulerOutput.

It rides as an attribute of the `SchedulerOutput` object: that survives vLLM's executors
(in-process by reference, multiprocess by pickling), and every tensor-parallel rank gets the
same copy. Everything in it is a snapshot, because with async scheduling the tables move on while
a step is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput

from vtoken.core.arrays import TableSnapshot
from vtoken.core.observer import LayoutChange
from vtoken.core.reclaimer import StepLayout

_ATTRIBUTE = "vtoken_step"


@dataclass
class StepMetadata:
    """One step's layout news.

    Attributes:
        changes: structural changes, to be applied before anything else in the step; also of
            requests that are not scheduled in it.
        layouts: per scheduled request that differs from vLLM's own layout.
        expected: tables, the step's tokens included, of the scheduled requests whose accesses
            the worker shall check (L6, L7).
    """

    changes: list[LayoutChange] = field(default_factory=list)
    layouts: dict[str, StepLayout] = field(default_factory=dict)
    expected: dict[str, TableSnapshot] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.changes or self.layouts or self.expected)


def attach(output: SchedulerOutput, step: StepMetadata) -> None:
    setattr(output, _ATTRIBUTE, step)


def metadata_of(output: SchedulerOutput) -> StepMetadata | None:
    """The step's metadata, or None for steps that vLLM made without a scheduler (dummy runs)."""
    found: StepMetadata | None = getattr(output, _ATTRIBUTE, None)
    return found
