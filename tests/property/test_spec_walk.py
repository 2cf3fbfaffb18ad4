"""Whatever allowed events come, in whatever order, the model's states obey the laws; and every
event that is not allowed is rejected for the right reason.

`vtoken.testing.model_walk` makes both kinds of events from the current state, with an expectation
that does not come from the model. Hypothesis drives it, to search and shrink; seeds drive it too,
to show that every event kind and every reason is reached. Scope: blocks of 2-4 slots, at most 6
blocks, 3 requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vtoken_spec as spec
from support import broken_steps
from vtoken.testing.model_walk import ModelFault, ModelWalk, SeededChooser
from vtoken_spec import Reason

T = TypeVar("T")


class DrawnChooser:
    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def one(self, items: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(items))

    def number(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_laws_hold_after_every_allowed_event(data: st.DataObject) -> None:
    """Claim: no short history of allowed events breaks a law, and no forbidden event passes."""
    walk = ModelWalk(DrawnChooser(data))
    for _ in range(data.draw(st.integers(1, 40))):
        walk.apply(*walk.draw())


def walk_all(seeds: range) -> tuple[Counter[type], Counter[Reason]]:
    accepted: Counter[type] = Counter()
    reasons: Counter[Reason] = Counter()
    for seed in seeds:
        walk = ModelWalk(SeededChooser(seed))
        for _ in range(80):
            event, expected = walk.draw()
            walk.apply(event, expected)
            if expected is None:
                accepted[type(event)] += 1
            else:
                reasons[expected] += 1
    return accepted, reasons


def test_seeded_walks_reach_every_event_kind_and_reason() -> None:
    """Claim: the generator leaves no event kind and no rejection reason out, so the property
    above is about all of them."""
    accepted, reasons = walk_all(range(150))
    assert set(accepted) == set(get_args(spec.Event))
    assert set(reasons) == set(Reason)


@pytest.mark.parametrize("broken", broken_steps.ALL, ids=lambda step: step.__name__)
def test_a_fault_in_the_step_function_is_found(
    broken: broken_steps.BrokenStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: each broken step function is caught by the same walks."""
    monkeypatch.setattr(spec, "step", lambda state, event: broken(state, event))
    with pytest.raises(ModelFault):
        walk_all(range(400))
