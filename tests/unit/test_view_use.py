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


def use(*, steps: list[int], dummies: list[int]) -> None:
    """Judge steps after dummy batches; numbers are the layers that used the view."""
    from vtoken.vllm.pages import ViewUse

    judge = ViewUse(LAYERS)
    for uses in dummies:
        judge.of_dummy([Given(uses)])
    for uses in steps:
        judge.of_step([Given(uses)])
        judge.check()


@pytest.mark.parametrize(
    ("steps", "dummies"),
    [
        ([], []),
        ([3, 3], []),
        ([0], [3]),
        ([0, 3, 0], [3, 3]),
        ([0], [3, 0]),  # a dummy batch that was itself a replay
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
        ([4], [3]),
    ],
)
def test_a_view_that_some_layer_did_not_use(steps: list[int], dummies: list[int]) -> None:
    with pytest.raises(InvariantViolation) as caught:
        use(steps=steps, dummies=dummies)
    assert caught.value.law == "L6"


def test_two_groups_of_layers_count_together_and_a_step_without_a_view_is_not_judged() -> None:
    from vtoken.vllm.pages import ViewUse

    judge = ViewUse(LAYERS)
    judge.check()
    judge.of_step([Given(1), Given(2)])
    judge.check()
    judge.check()
