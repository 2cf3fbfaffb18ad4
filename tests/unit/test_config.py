"""Configuration: what is accepted means what it says, and each bad value gives one clear line."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.core import ReclaimMode
from vtoken.errors import Rejected
from vtoken.policies.streaming_llm import StreamingLLM

GOOD = {"policy": "streaming-llm", "budget": 64}


def test_the_default_evicts_nothing() -> None:
    config = VTokenConfig()
    assert config.policy_class is None
    assert config.mode is ReclaimMode.EAGER
    assert config.budget_for(1000) == 1000
    assert config.checks == 1


def test_values_are_found_where_they_were_put() -> None:
    config = VTokenConfig(
        policy="streaming-llm", budget=64, sinks=2, seed=9, reclaim="off", checks=3
    )
    assert config.policy_class is StreamingLLM
    assert (config.params.sinks, config.params.seed) == (2, 9)
    assert config.mode is ReclaimMode.OFF
    assert VTokenConfig.from_mapping(config.as_dict()) == config
    with pytest.raises(FrozenInstanceError):
        config.budget = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "num_tokens", "budget"),
    [
        ({"budget": 64}, 10, 64),
        ({"budget": 64}, 10_000, 64),
        ({"budget_ratio": 0.5}, 100, 50),
        ({"budget_ratio": 0.5}, 101, 51),
        ({"budget_ratio": 0.1}, 30, 5),  # at least the sinks and one token
        ({"budget_ratio": 0.1}, 300, 30),
        ({"budget_ratio": 0.1, "sinks": 0}, 31, 4),
        ({"budget_ratio": 0.07, "sinks": 0}, 100, 7),  # 7.000000000000001 in binary
        ({"budget_ratio": 1}, 77, 77),
        ({"budget_ratio": 1e-9, "sinks": 0}, 1_000_000, 1),
    ],
)
def test_a_budget_is_tokens_or_a_share_rounded_up(
    values: dict[str, Any], num_tokens: int, budget: int
) -> None:
    config = VTokenConfig(policy="streaming-llm", **values)
    assert config.budget_for(num_tokens) == budget


@pytest.mark.parametrize(
    ("values", "budget"),
    [
        ({"policy": "streaming-llm", "sinks": 4}, 5),
        ({"policy": "streaming-llm", "sinks": 0}, 1),
        ({"policy": "sliding-window"}, 1),
        ({"policy": "random", "sinks": 100}, 1),
    ],
)
def test_the_smallest_budget_is_accepted_and_one_less_is_not(
    values: dict[str, Any], budget: int
) -> None:
    assert VTokenConfig(**values, budget=budget).budget == budget
    with pytest.raises(Rejected, match="budget"):
        VTokenConfig(**values, budget=budget - 1)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"policy": "h3o", "budget": 8}, "unknown policy 'h3o'; choose one of"),
    "policy in capitals": ({"policy": "Random", "budget": 8}, "unknown policy 'Random'"),
    "no policy name": ({"policy": None}, "policy must be a name, not None"),
    "policy and no budget": ({"policy": "random"}, "policy random needs a budget; give --budget"),
    "budget and no policy": ({"budget": 8}, "a budget needs a policy"),
    "ratio and no policy": ({"budget_ratio": 0.5}, "a budget needs a policy"),
    "budget 0": (GOOD | {"budget": 0}, "budget must be positive, not 0"),
    "budget 0 of a window": (
        {"policy": "sliding-window", "budget": 0},
        "budget must be positive, not 0",
    ),
    "negative budget": (GOOD | {"budget": -5}, "budget must be positive, not -5"),
    "budget below sinks + 1": (
        GOOD | {"budget": 4},
        "budget 4 is too small for streaming-llm: at least 5 (sinks 4 + 1)",
    ),
    "both budgets": (
        GOOD | {"budget_ratio": 0.5},
        "budget is given both in tokens and as a ratio; give one of them",
    ),
    "ratio 0": (
        {"policy": "random", "budget_ratio": 0},
        "budget_ratio must be in (0, 1], not 0",
    ),
    "ratio above 1": (
        {"policy": "random", "budget_ratio": 1.5},
        "budget_ratio must be in (0, 1], not 1.5",
    ),
    "negative ratio": (
        {"policy": "random", "budget_ratio": -0.1},
        "budget_ratio must be in (0, 1]",
    ),
    "ratio not a number": (
        {"policy": "random", "budget_ratio": float("nan")},
        "budget_ratio must be in (0, 1], not nan",
    ),
    "infinite ratio": (
        {"policy": "random", "budget_ratio": float("inf")},
        "budget_ratio must be in (0, 1], not inf",
    ),
    "ratio as text": (
        {"policy": "random", "budget_ratio": "50%"},
        "budget_ratio must be a number, not '50%'",
    ),
    "ratio as yes": (
        {"policy": "random", "budget_ratio": True},
        "budget_ratio must be a number, not True",
    ),
    "budget as text": (
        GOOD | {"budget": "64"},
        "budget must be a whole number of tokens, not '64'",
    ),
    "budget as yes": (GOOD | {"budget": True}, "budget must be a whole number of tokens, not True"),
    "budget as a share": (GOOD | {"budget": 0.5}, "a share goes into budget_ratio"),
    "negative sinks": (GOOD | {"sinks": -1}, "sinks must be 0 or more, not -1"),
    "sinks as text": (GOOD | {"sinks": "4"}, "sinks must be a whole number, not '4'"),
    "sinks as yes": (GOOD | {"sinks": True}, "sinks must be a whole number, not True"),
    "negative seed": (GOOD | {"seed": -1}, "seed must be 0 or more, not -1"),
    "seed as a fraction": (GOOD | {"seed": 0.5}, "seed must be a whole number, not 0.5"),
    "checks out of range": (GOOD | {"checks": 4}, "checks must be 0, 1, 2 or 3, not 4"),
    "negative checks": (GOOD | {"checks": -1}, "checks must be 0, 1, 2 or 3, not -1"),
    "checks as yes": (GOOD | {"checks": True}, "checks must be a whole number, not True"),
    "unknown mode": (GOOD | {"reclaim": "lazy"}, "unknown reclaim mode 'lazy'; choose one of"),
    "mode as no": (GOOD | {"reclaim": False}, "reclaim must be a name, not False"),
    "unknown option": (
        GOOD | {"bugdet": 8},
        "unknown vtoken option 'bugdet'; known: policy, budget",
    ),
    "number as option": (GOOD | {3: 8}, "unknown vtoken option 3"),
}


@pytest.mark.parametrize(("values", "line"), BAD.values(), ids=BAD.keys())
def test_a_bad_value_gives_one_clear_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(Rejected) as caught:
        VTokenConfig.from_mapping(values)
    assert line in caught.value.reason
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize("values", [None, 5, "policy=random", ["policy"]])
def test_what_is_no_mapping_is_rejected(values: Any) -> None:
    with pytest.raises(Rejected, match="must be a mapping, not"):
        VTokenConfig.from_mapping(values)


def test_every_mode_is_named_in_the_rejection() -> None:
    with pytest.raises(Rejected) as caught:
        VTokenConfig(reclaim="x")
    assert all(mode.value in caught.value.reason for mode in ReclaimMode)
