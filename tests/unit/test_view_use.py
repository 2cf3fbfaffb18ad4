"""L6 of the view for holes: used by every layer of a step, or replayed from what used it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from vtoken.errors import InvariantViolation

pytest.importorskip("vllm")
LAYERS = 3


@dataclass
class Given:
    uses: int


def use(*, steps: list[int], dummies: list[int], replayed: bool = True) -> None:
    """Judge steps after dummy batches; numbers are the layers that used the view."""
    from vtoken.vllm.pages import ViewUse

    judge = ViewUse(LAYERS)
    for uses in dummies:
        judge.of_dummy([Given(uses)])
    for uses in steps:
        judge.of_step([Given(uses)], replayed=replayed)
        judge.check()


@pytest.mark.parametrize(
    ("steps", "dummies"),
    [
        ([], []),
        ([3, 3], []),
        ([0], [3]),
        ([0, 3, 0], [3, 3]),
        ([0], [3, 0]),  # a dummy batch that was itself a replay
        ([0], [6, 3]),  # Model Runner V2 runs the batch of a piecewise graph twice
    ],
)
def test_a_view_that_every_layer_used(steps: list[int], dummies: list[int]) -> None:
    use(steps=steps, dummies=dummies)


@pytest.mark.parametrize(
    ("steps", "dummies"),
    [
        ([0], []),  # nothing was captured that could have been replayed
        ([0], [0]),
        ([2], []),
        ([2], [3]),  # neither replayed nor run in all layers
        ([0], [2]),
        ([0], [3, 2]),  # one of the captured sizes misses a layer
        ([0], [2, 3]),
        ([4], [3]),
        ([6], [3]),  # a step runs once
    ],
)
def test_a_view_that_some_layer_did_not_use(steps: list[int], dummies: list[int]) -> None:
    with pytest.raises(InvariantViolation) as caught:
        use(steps=steps, dummies=dummies)
    assert caught.value.law == "L6"


def test_a_step_that_is_not_replayed_has_to_use_its_view_itself() -> None:
    use(steps=[3], dummies=[3], replayed=False)
    with pytest.raises(InvariantViolation):
        use(steps=[0], dummies=[3], replayed=False)


def test_two_groups_of_layers_count_together_and_a_step_without_a_view_is_not_judged() -> None:
    from vtoken.vllm.pages import ViewUse

    judge = ViewUse(LAYERS)
    judge.check()
    judge.of_step([Given(1), Given(2)], replayed=False)
    judge.check()
    judge.check()
