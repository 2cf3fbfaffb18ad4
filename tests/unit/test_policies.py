"""Each policy's victims against a reference of a few lines, for 500 steps, with evictions by
others mixed in."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from vtoken.errors import Rejected
from vtoken.policies import (
    Policy,
    PolicyParams,
    PolicyView,
    find_policy,
    oldest_live,
    policy_names,
    registry,
)
from vtoken.policies.random_eviction import RandomEviction
from vtoken.policies.sliding_window import SlidingWindow
from vtoken.policies.streaming_llm import StreamingLLM

STEPS = 500
SINKS = 4


def streaming(live: list[int], excess: int) -> list[int]:
    return [token for token in live if token >= SINKS][:excess]


def window(live: list[int], excess: int) -> list[int]:
    return live[:excess]


def decode(
    policy: Policy, *, budget: int, seed: int, foreign: bool
) -> Iterator[tuple[list[int], PolicyView, list[int]]]:
    """A request from a prompt of 40 on: (evictable ids, view, victims) of each call."""
    rng = np.random.default_rng(seed)
    length = 40
    live = np.zeros(length + 20 * STEPS, dtype=np.bool_)
    live[:length] = True
    for _ in range(STEPS):
        if foreign and rng.random() < 0.2:
            candidates = np.flatnonzero(live[: length - 1])
            gone = rng.choice(candidates, size=min(len(candidates), 3), replace=False)
            live[gone] = False
        num_live = int(live[:length].sum())
        excess = min(num_live + 1 - budget, num_live - 1)
        if excess > 0:
            choice = np.flatnonzero(live[: length - 1]).tolist()
            view = PolicyView(length, live[:length], num_live, excess)
            victims = policy.victims(view)
            assert victims.dtype == np.int32
            yield choice, view, victims.tolist()
            live[victims] = False
        grown = 1 if rng.random() < 0.9 else int(rng.integers(2, 20))
        live[length : length + grown] = True
        length += grown


@pytest.mark.parametrize("foreign", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("budget", [5, 16, 33])
@pytest.mark.parametrize(
    ("policy", "reference"), [(StreamingLLM, streaming), (SlidingWindow, window)]
)
def test_victims_are_those_of_the_reference(
    policy: type[Policy],
    reference: Callable[[list[int], int], list[int]],
    budget: int,
    foreign: bool,
) -> None:
    """Claim: also when others evict from the same table, and when several tokens come at once."""
    made = policy(PolicyParams(sinks=SINKS), stream=0)  # type: ignore[call-arg]
    calls = 0
    for choice, view, victims in decode(made, budget=budget, seed=budget, foreign=foreign):
        assert victims == reference(choice, view.excess)
        calls += 1
    assert calls > 200


@pytest.mark.parametrize("sinks", [0, 1, 9])
def test_sinks_and_the_newest_token_never_go(sinks: int) -> None:
    made = StreamingLLM(PolicyParams(sinks=sinks), stream=0)
    for _, view, victims in decode(made, budget=sinks + 1, seed=1, foreign=False):
        assert all(sinks <= token < view.num_tokens - 1 for token in victims)
        assert view.live[:sinks].all()


@pytest.mark.parametrize("foreign", [False, True])
def test_random_victims_are_distinct_live_and_never_the_newest(foreign: bool) -> None:
    made = RandomEviction(PolicyParams(seed=3), stream=0)
    sizes = set()
    for choice, view, victims in decode(made, budget=16, seed=2, foreign=foreign):
        assert len(set(victims)) == len(victims) == view.excess
        assert set(victims) <= set(choice)
        sizes.add(min(view.excess, 2))
    assert sizes == {1, 2}


def trajectory(seed: int, stream: int) -> list[list[int]]:
    made = RandomEviction(PolicyParams(seed=seed), stream=stream)
    return [victims for _, _, victims in decode(made, budget=16, seed=0, foreign=False)]


def test_random_is_repeatable_by_seed_and_differs_by_seed_and_by_stream() -> None:
    assert trajectory(1, 0) == trajectory(1, 0)
    assert trajectory(1, 0) != trajectory(2, 0)
    assert trajectory(1, 0) != trajectory(1, 1)
    assert trajectory(1, 2) != trajectory(2, 1)


@pytest.mark.parametrize("excess", [1, 3])
def test_random_reaches_every_token_about_equally_often(excess: int) -> None:
    """Claim: over 4,000 draws each of 20 tokens comes within five standard deviations."""
    made = RandomEviction(PolicyParams(seed=5), stream=0)
    live = np.ones(21, dtype=np.bool_)
    counts = np.zeros(21)
    for _ in range(4000):
        counts[made.victims(PolicyView(21, live, 21, excess))] += 1
    expected = 4000 * excess / 20
    assert counts[20] == 0
    assert (np.abs(counts[:20] - expected) < 5 * np.sqrt(expected)).all()


def test_the_oldest_live_tokens_are_found_past_dead_ones() -> None:
    live = np.array([1, 0, 1, 0, 0, 1, 1, 1], dtype=np.bool_)
    view = PolicyView(8, live, 5, 2)
    assert oldest_live(view, 0, 2).tolist() == [0, 2]
    assert oldest_live(view, 5, 2).tolist() == [5, 6]
    assert oldest_live(view, 5, 3).tolist() == [5, 6]  # 7 is the newest
    assert oldest_live(view, 9, 1).tolist() == []


# Options and names ------------------------------------------------------------------------------


def test_only_streaming_llm_needs_room_for_its_sinks() -> None:
    params = PolicyParams(sinks=7)
    assert StreamingLLM.min_budget(params) == 8
    assert SlidingWindow.min_budget(params) == RandomEviction.min_budget(params) == 1


@pytest.mark.parametrize(("name", "values"), [("sinks", {"sinks": -1}), ("seed", {"seed": -2})])
def test_parameters_out_of_range_are_rejected_by_name(name: str, values: dict[str, int]) -> None:
    with pytest.raises(Rejected, match=rf"^{name} must be 0 or more, not -\d$"):
        PolicyParams(**values)


def test_built_in_policies_are_entry_points_too() -> None:
    """Whoever lists the group's entry points sees them beside those of other packages."""
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    listed = tomllib.loads(file.read_text())["project"]["entry-points"][registry.GROUP]
    assert listed == {
        policy.name: f"{policy.__module__}:{policy.__qualname__}" for policy in registry.BUILT_IN
    }


@pytest.mark.parametrize("name", [policy.name for policy in registry.BUILT_IN])
def test_built_in_policies_are_found_by_the_name_they_carry(name: str) -> None:
    assert find_policy(name).name == name
    assert name in policy_names()


def test_an_unknown_policy_is_rejected_with_the_names_that_exist() -> None:
    with pytest.raises(Rejected) as caught:
        find_policy("h3o")
    assert "\n" not in caught.value.reason
    for name in ("'h3o'", "streaming-llm", "sliding-window", "random"):
        assert name in caught.value.reason


class Keeper(Policy):
    """A policy of another package."""

    name = "keeper"

    def victims(self, view: PolicyView) -> np.ndarray:
        return oldest_live(view, 0, view.excess)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = [
        EntryPoint(name, value, registry.GROUP)
        for name, value in (
            ("keeper", f"{__name__}:Keeper"),
            ("absent", "no_such_package.policies:Keeper"),
            ("missing", "math:Keeper"),
            ("function", "math:sqrt"),
            ("random", "math:sqrt"),
        )
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    monkeypatch.setattr(EntryPoint, "load", _load)
    policy_names.cache_clear()
    yield
    policy_names.cache_clear()


_real_load = EntryPoint.load


def _load(entry: EntryPoint) -> object:
    # pytest imports this file under a name that an import statement does not find.
    return (
        Keeper if entry.value.endswith(":Keeper") and __name__ in entry.value else _real_load(entry)
    )


@pytest.mark.usefixtures("installed")
def test_policies_of_other_packages_are_found_by_their_entry_point() -> None:
    assert find_policy("keeper") is Keeper
    assert "keeper" in policy_names()
    # A built-in name cannot be taken over.
    assert find_policy("random") is RandomEviction
    assert policy_names().count("random") == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "'absent' does not load"),
        ("missing", "'missing' does not load"),
        ("function", "not a vtoken Policy subclass"),
    ],
)
def test_an_entry_point_that_is_no_policy_is_rejected_in_one_line(name: str, reason: str) -> None:
    with pytest.raises(Rejected, match=reason) as caught:
        find_policy(name)
    assert "\n" not in caught.value.reason
