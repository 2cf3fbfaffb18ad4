"""What a request may ask for itself, with the server's configuration known and unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import Rejected
from vtoken.policies.random_eviction import RandomEviction

pytest.importorskip("vllm")

SERVER = VTokenConfig(policy="streaming-llm", budget=64, sinks=8, seed=5)
PLACE = "vtoken.policies.random_eviction:RandomEviction"


@pytest.mark.parametrize(
    ("asked", "policy", "budget", "ratio"),
    [
        ({"vtoken_policy": "random"}, "random", 64, None),
        ({"vtoken_budget": 100}, "streaming-llm", 100, None),
        ({"vtoken_budget_ratio": 0.5}, "streaming-llm", None, 0.5),
        ({"vtoken_policy": "h2o", "vtoken_budget_ratio": 1}, "h2o", None, 1),
        ({"vtoken_policy": "none"}, "none", None, None),
        ({"vtoken_score_mode": "sampled", "vtoken_score_every": 3}, "streaming-llm", 64, None),
    ],
)
def test_a_request_replaces_what_it_names(
    asked: dict[str, Any], policy: str, budget: int | None, ratio: float | None
) -> None:
    mine = SERVER.for_request({**asked, "session_id": "other people's"})
    assert (mine.policy, mine.budget, mine.budget_ratio) == (policy, budget, ratio)
    assert (mine.sinks, mine.seed) == (8, 5)


def test_a_request_chooses_how_it_is_looked_at() -> None:
    sampling = VTokenConfig(policy="h2o", budget=64, score_mode="sampled", score_every=3)
    mine = sampling.for_request({"vtoken_score_window": 7})
    assert (mine.score_mode, mine.score_every, mine.score_window) == ("sampled", 3, 7)
    exact = sampling.for_request({"vtoken_score_mode": "exact"})
    assert (exact.score_mode, exact.score_every) == ("exact", 8), "sampling's options go with it"


def test_a_request_that_asks_nothing_is_served_by_the_very_same_settings() -> None:
    assert SERVER.for_request({}) is SERVER
    assert SERVER.for_request({"session_id": 7}) is SERVER


BAD: list[tuple[dict[str, Any], str]] = [
    ({"vtoken_polcy": "random"}, "unknown request option 'vtoken_polcy'; known: vtoken_policy"),
    ({"vtoken_policy": "h3o"}, "unknown policy 'h3o'; choose one of: streaming-llm"),
    ({"vtoken_policy": 7}, "policy must be a name, not 7"),
    ({"vtoken_budget": "64"}, "budget must be a whole number of tokens, not '64'"),
    ({"vtoken_budget": 0}, "budget must be positive, not 0"),
    ({"vtoken_budget_ratio": 1.5}, "budget_ratio must be in (0, 1], not 1.5"),
    ({"vtoken_budget": 9, "vtoken_budget_ratio": 0.5}, "budget is given both in tokens and as a"),
    (
        {"vtoken_policy": "none", "vtoken_budget": 9},
        "a budget needs a policy; name one with vtoken_policy",
    ),
    ({"vtoken_score_mode": "guessed"}, "unknown score_mode 'guessed'; choose one of: exact"),
    ({"vtoken_score_mode": 3}, "score_mode must be a name, not 3"),
    ({"vtoken_score_every": 4}, "not exact; give vtoken_score_mode sampled, or leave it out"),
    ({"vtoken_score_window": 0}, "score_window must be positive, not 0"),
    ({"vtoken_score_window": 2.5}, "score_window must be a whole number, not 2.5"),
]
ONLY_WITH_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"vtoken_budget": 8}, "budget 8 is too small for streaming-llm: at least 9 (sinks 8 + 1)"),
    ({"vtoken_policy": PLACE}, "names a module, which only a server with --request-policies any"),
]


@pytest.mark.parametrize(("asked", "reason"), BAD + ONLY_WITH_SETTINGS)
def test_a_bad_value_is_refused_in_one_line(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        SERVER.for_request(asked)
    assert reason in caught.value.reason
    assert "\n" not in caught.value.reason


def test_a_class_is_named_by_its_place_only_where_the_server_lets_requests_do_so() -> None:
    server = VTokenConfig(policy="streaming-llm", budget=64, request_policies="any")
    assert server.for_request({"vtoken_policy": PLACE}).policy_class is RandomEviction
    # The server's own policy is loaded already.
    own = VTokenConfig(policy=PLACE, budget=64)
    assert own.for_request({"vtoken_policy": PLACE}).policy_class is RandomEviction


def test_a_server_without_a_policy_takes_none_from_a_request() -> None:
    with pytest.raises(Rejected, match="only where the server has a policy; start it with"):
        VTokenConfig().for_request({"vtoken_policy": "random", "vtoken_budget": 9})


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("asked", "reason"), BAD)
def test_the_front_end_refuses_them_with_and_without_the_servers_settings(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], reason: str, known: bool
) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vtoken.vllm.request_guard import RequestGuard
    from vtoken.vllm.request_options import SETTINGS

    monkeypatch.setenv(SETTINGS, json.dumps(SERVER.as_dict()) if known else "")
    with pytest.raises(VLLMValidationError) as caught:
        RequestGuard.validate_params(SamplingParams(extra_args=asked))
    assert reason in str(caught.value)
    RequestGuard.validate_params(SamplingParams(extra_args={"vtoken_policy": "random"}))
    RequestGuard.validate_params(SamplingParams(extra_args={"other": 3}))
    RequestGuard.validate_params(SamplingParams())


def test_what_depends_on_the_servers_options_is_left_to_it_where_they_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vtoken.vllm.request_options import SETTINGS, announce, check_request

    monkeypatch.delenv(SETTINGS, raising=False)
    for asked, _ in ONLY_WITH_SETTINGS:
        check_request(asked)
    announce(SERVER)
    announce(SERVER)
    for asked, reason in ONLY_WITH_SETTINGS:
        with pytest.raises(Rejected) as caught:
            check_request(asked)
        assert reason in caught.value.reason
    announce(VTokenConfig(policy="random", budget=9))  # a second engine in the same process
    for asked, _ in ONLY_WITH_SETTINGS:
        check_request(asked)
