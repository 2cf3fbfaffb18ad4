"""Every view of every backend is in use or off with a reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vtoken.errors import UnsupportedConfiguration

pytestmark = pytest.mark.engine  # imports vLLM


def test_each_backend_says_why_a_view_is_off() -> None:
    from vtoken.vllm.views import CAPABILITIES, View

    for name, able in CAPABILITIES.items():
        on = {View.DENSE, able.with_holes} - {None}
        assert on | able.why_not.keys() == set(View), name
        assert not on & able.why_not.keys()
        assert all(able.why_not.values())


def test_a_backend_without_a_score_tap_says_why() -> None:
    from vtoken.vllm.views import CAPABILITIES, capability_of

    with_tap = {"CPU_ATTN", "TRITON_ATTN"}
    assert {name for name, able in CAPABILITIES.items() if not able.why_no_scores} == with_tap
    others = [able for name, able in CAPABILITIES.items() if name not in with_tap]
    for able in (*others, capability_of("SOMETHING_NEW")):
        assert "--attention-backend TRITON_ATTN, or choose a policy" in able.why_no_scores


def test_the_table_names_backends_that_vllm_has() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vtoken.vllm.views import CAPABILITIES

    assert set(CAPABILITIES) <= set(AttentionBackendEnum.__members__)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "SOMETHING_NEW"])
def test_holes_without_a_view_are_refused_with_the_reason_and_the_way_out(backend: str) -> None:
    from vtoken.vllm.views import View, view_of

    assert view_of(backend, holes=False) is View.DENSE
    with pytest.raises(UnsupportedConfiguration, match=f"{backend} has no view.*--reclaim eager"):
        view_of(backend, holes=True)


def test_holes_are_read_through_the_view_of_their_backend() -> None:
    from vtoken.vllm.views import View, view_of

    assert view_of("CPU_ATTN", holes=True) is View.GATHER
    assert view_of("TRITON_ATTN", holes=True) is View.PAGE_1


@pytest.mark.parametrize("cached", [True, False])
def test_a_layer_on_another_backend_than_the_named_one_is_refused_where_holes_come_up(
    cached: bool,
) -> None:
    """As with a backend for each kind of layer."""
    from vtoken.vllm.runner_attention import VTokenRunnerAttention

    runner = VTokenRunnerAttention()
    runner.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=cached),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="TRITON_ATTN")),
        additional_config={"vtoken": {"policy": "random", "budget": 64}},
    )
    layers = {
        name: SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda name=name: name))
        for name in ("TRITON_ATTN", "FLASH_ATTN")
    }
    runner._meet_layers({"a": layers["TRITON_ATTN"]})
    if cached:
        with pytest.raises(UnsupportedConfiguration, match="FLASH_ATTN has no view for rows"):
            runner._meet_layers(layers)
    else:
        runner._meet_layers(layers)
