"""Where there is no score tap, whoever asks for attention weights is told so: at the start, at the
front end, and by the scheduler."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedConfiguration
from vtoken.policies import ScoreNeed

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

WHY = "there is no telescope; buy one"


def vllm_config(
    *, stages: int = 1, dtype: str = "auto", policy: str = "h2o", backend: str | None = None
) -> Any:
    named = None if backend is None else SimpleNamespace(name=backend)
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=named),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        cache_config=SimpleNamespace(cache_dtype=dtype),
        additional_config={"vtoken": {"policy": policy, "budget": 64}},
    )


@pytest.mark.parametrize(
    ("changes", "cpu", "reason"),
    [
        ({}, True, ""),
        ({"dtype": "bfloat16"}, True, ""),
        ({"stages": 2}, True, "each pipeline stage would have a part of them; set --pipeline-par"),
        ({"dtype": "fp8_e4m3"}, True, "does not read quantised keys (KV cache dtype fp8_e4m3)"),
        ({}, False, "vLLM's CPU and Triton attention only; start with --attention-backend"),
        ({"backend": "FLASH_ATTN"}, False, "vLLM's CPU and Triton attention only; start with"),
        ({"backend": "TRITON_ATTN"}, False, ""),
        ({"backend": "TRITON_ATTN", "dtype": "fp8"}, False, "does not read quantised keys"),
    ],
)
def test_a_configuration_without_a_tap_is_refused_for_policies_that_need_it_and_no_others(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], cpu: bool, reason: str
) -> None:
    from vtoken.vllm import guards, holes, score_support

    monkeypatch.setattr(holes, "on_cpu", lambda: cpu)
    config = vllm_config(**changes)
    assert reason in score_support.why_no_scores(config)
    told = list(guards._score_refusals(config, VTokenConfig(policy="h2o", budget=64)))
    assert len(told) == bool(reason)
    for line in told:
        assert line.startswith("policy h2o asks for attention weights: ")
        assert reason in line
        assert "\n" not in line
        assert ";" in line, "with the way out"
    plain = VTokenConfig(policy="streaming-llm", budget=64)
    assert list(guards._score_refusals(config, plain)) == []


def layer(*, heads: int = 4, **more: Any) -> Any:
    return SimpleNamespace(impl=SimpleNamespace(num_heads=heads, sinks=None, **more))


def test_layers_whose_weights_are_no_plain_softmax_are_named() -> None:
    from vtoken.vllm.score_support import why_no_scores_in

    plain = {"a": layer(), "b": layer(logits_soft_cap=30.0)}
    assert why_no_scores_in(plain) == "", "soft caps are part of what the tap computes"
    sinks = {**plain, "c": SimpleNamespace(impl=SimpleNamespace(num_heads=4, sinks=object()))}
    assert why_no_scores_in(sinks).startswith("layer c has attention sinks, a share of the softmax")
    for backend, why in (("TRITON_ATTN", ""), ("FLASH_ATTN", "the score tap exists for")):
        other = layer()
        other.attn_backend = SimpleNamespace(get_name=lambda backend=backend: backend)
        assert why_no_scores_in({**plain, "c": other}).startswith(why)
        assert bool(why_no_scores_in({**plain, "c": other})) == bool(why)
    uneven = why_no_scores_in({**plain, "c": layer(heads=6)})
    assert uneven.startswith("layers differ in their number of query heads (4 in a, 6 in c); ")


def test_the_scheduler_learns_of_layers_through_the_spec() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vtoken.vllm.kv_manager import VTokenAttentionSpec

    plain = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    specs = [VTokenAttentionSpec.of(plain, why_no_scores=WHY) for _ in range(3)]
    merged = VTokenAttentionSpec.merge(specs)
    assert type(merged) is VTokenAttentionSpec
    assert merged.why_no_scores == WHY
    assert merged.page_size_bytes == plain.page_size_bytes
    assert VTokenAttentionSpec.of(plain).why_no_scores == ""


ASKING: list[dict[str, Any]] = [
    {"vtoken_policy": "h2o"},
    {"vtoken_policy": "fastgen", "vtoken_budget": 32},
]
OTHERS: list[dict[str, Any] | None] = [
    *(None, {}, {"vtoken_policy": "none"}, {"vtoken_policy": "random"}, {"vtoken_budget": 30}),
]


@pytest.fixture
def without_tap(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vtoken.vllm import score_support

    monkeypatch.setenv(score_support.NO_SCORES, "")
    return score_support


@pytest.mark.parametrize("known", [True, False], ids=["settings known", "vLLM's own flags"])
def test_the_front_end_answers_a_request_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, without_tap: Any, known: bool
) -> None:
    """What becomes HTTP 400 there."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vtoken.vllm.request_guard import RequestGuard
    from vtoken.vllm.request_options import SETTINGS

    settings = VTokenConfig(policy="streaming-llm", budget=64).as_dict()
    monkeypatch.setenv(SETTINGS, json.dumps(settings) if known else "")
    for asked in (*ASKING, *OTHERS):
        RequestGuard.validate_params(SamplingParams(extra_args=asked))
    without_tap.announce_no_scores(WHY)
    for asked in ASKING:
        with pytest.raises(VLLMValidationError) as caught:
            RequestGuard.validate_params(SamplingParams(extra_args=asked))
        text = f"policy {asked['vtoken_policy']} asks for attention weights: {WHY}"
        assert str(caught.value).startswith(f"this request's vtoken options: {text}")
    for asked in OTHERS:
        RequestGuard.validate_params(SamplingParams(extra_args=asked))


def test_the_scheduler_ends_a_request_that_the_front_end_let_pass() -> None:
    from vtoken.vllm.policy_host import PolicyHost

    asked = {"mine": ASKING[0], "other": OTHERS[3]}
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=own))
        for name, own in asked.items()
    }
    host = PolicyHost(
        VTokenConfig(policy="streaming-llm", budget=64),
        requests=requests,  # type: ignore[arg-type]
        why_no_scores=WHY,
    )
    assert host.needs("mine") is host.needs("other") is ScoreNeed.NONE
    stopped = host.take_stops()
    assert list(stopped) == ["mine"]
    assert f"policy h2o asks for attention weights: {WHY}" in str(stopped["mine"])


def test_a_scheduler_without_a_tap_takes_no_policy_that_needs_one() -> None:
    from vtoken.vllm.scheduler import VTokenSchedulerMixin

    scheduler = object.__new__(VTokenSchedulerMixin)
    scheduler.requests, scheduler._why_no_scores = {}, WHY
    with pytest.raises(UnsupportedConfiguration, match=WHY):
        scheduler.vtoken_configure(VTokenConfig(policy="scissorhands", budget=64))
