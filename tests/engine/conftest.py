"""Engines shared by all engine tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engines import ATTENTION, Engine, engine_on

collect_ignore = [] if ATTENTION == "triton" else ["test_page_view.py"]


@pytest.fixture(scope="session")
def stock() -> Engine:
    """Plain vLLM on the tiny model."""
    return engine_on("tiny stock")


@pytest.fixture(scope="session")
def shared_tiny() -> Engine:
    return engine_on("tiny")


@pytest.fixture
def tiny(shared_tiny: Engine) -> Iterator[Engine]:
    """The tiny model with vToken; a test must leave the pool as free as it found it."""
    free = shared_tiny.free
    yield shared_tiny
    assert not shared_tiny.scheduler.requests
    assert shared_tiny.free == free


@pytest.fixture(scope="session")
def smollm2() -> Engine:
    """The embedded model with vToken; a pool of 63 blocks of 32 tokens."""
    return engine_on("smollm2")
