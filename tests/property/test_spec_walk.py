"""Whatever allowed events come, in whatever order, the model's states obey the laws; and every
event that is not allowed is rejected for the right reason.

The generator of `vtoken_spec.alphabet` makes both kinds of events from the current state, with an
expectation that does not come from the model. Hypothesis drives it, to search and shrink; a seeded
walk drives it too, to show that every event kind and every reason is reached. Scope: blocks of 2-4
slots, at most 6 blocks, 3 requests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

import vtoken_spec as spec
from vtoken_spec import Reason, State
from vtoken_spec.alphabet import ALLOWED, Bounds, forbidden
from vtoken_spec.explore import state_faults, transition_faults

T = TypeVar("T")
Expected = Reason | None
"""None: the event must be accepted."""
BOUNDS = Bounds(requests=("a", "b", "c"))


class Chooser(Protocol):
    def one(self, items: Sequence[T]) -> T: ...
    def number(self, low: int, high: int) -> int: ...


class SeededChooser:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, items: Sequence[T]) -> T:
        return self._random.choice(items)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class DrawnChooser:
    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def one(self, items: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(items))

    def number(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))


def check(before: State, event: spec.Event, expected: Expected) -> State:
    """Apply `event` and hold the outcome to the expectation and to the laws."""
    fingerprint = hash(before)
    after = spec.step(before, event)
    assert hash(before) == fingerprint
    if expected is not None:
        assert isinstance(after, spec.Rejected), f"accepted: {event}"
        assert after.reason is expected, f"{event}: {after.detail}"
        return before
    assert isinstance(after, State), f"{event}: {after}"
    assert spec.step(before, event) == after
    assert [*transition_faults(before, event, after), *state_faults(after)] == []
    return after


def start(choose: Chooser) -> State:
    num_blocks = choose.number(4, 7)
    headroom = range(1, 1 + choose.number(0, 1))
    return State.initial(num_blocks=num_blocks, block_size=choose.number(2, 4), headroom=headroom)


def next_event(state: State, choose: Chooser) -> tuple[spec.Event, Expected]:
    """A forbidden event one time in four; otherwise a kind first, then an event of that kind."""
    wrong: dict[Reason, list[spec.Event]] = {}
    if choose.number(0, 3) == 0:
        for event, reason in forbidden(state, BOUNDS):
            wrong.setdefault(reason, []).append(event)
    if wrong:
        reason = choose.one(sorted(wrong, key=lambda reason: reason.name))
        return choose.one(wrong[reason]), reason
    first = choose.number(0, len(ALLOWED) - 1)
    kinds = list(ALLOWED.values())
    for kind in kinds[first:] + kinds[:first]:
        if events := list(kind(state, BOUNDS)):
            return choose.one(events), None
    raise AssertionError(f"nothing is allowed in {state}")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_laws_hold_after_every_allowed_event(data: st.DataObject) -> None:
    """Claim: no short history of allowed events breaks a law, and no forbidden event passes."""
    choose = DrawnChooser(data)
    state = start(choose)
    for _ in range(data.draw(st.integers(1, 40))):
        state = check(state, *next_event(state, choose))


def test_seeded_walks_reach_every_event_kind_and_reason() -> None:
    """Claim: the generator leaves no event kind and no rejection reason out, so the property
    above is about all of them."""
    accepted: Counter[type] = Counter()
    reasons: Counter[Reason] = Counter()
    for seed in range(150):
        choose = SeededChooser(seed)
        state = start(choose)
        for _ in range(50):
            event, expected = next_event(state, choose)
            state = check(state, event, expected)
            if expected is None:
                accepted[type(event)] += 1
            else:
                reasons[expected] += 1
    assert set(accepted) == set(spec.Event.__args__)
    assert set(reasons) == set(Reason)
