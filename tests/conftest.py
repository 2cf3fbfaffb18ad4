"""Hypothesis profiles: `ci` (default) repeats the same examples every time; `deep` searches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=60,
    stateful_step_count=25,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "deep",
    deadline=None,
    max_examples=2000,
    stateful_step_count=60,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _leaves_what_engines_share() -> Iterator[None]:
    """An engine that is closed, or garbage, ends the process's distributed groups, and with them
    every other engine of the process. Told where it happens, not where the next engine fails."""
    before = _engines_can_run()
    yield
    assert _engines_can_run() or not before, (
        "this test closed an engine inside the process that all engine tests share; run it in one "
        "of its own (support/processes.py)"
    )


def _engines_can_run() -> bool:
    state = sys.modules.get("vllm.distributed.parallel_state")
    return state is not None and state.model_parallel_is_initialized()
