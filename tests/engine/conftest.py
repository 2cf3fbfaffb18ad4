"""Engines shared by all engine tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engines import Engine
from vtoken.models import ensure_smollm2, ensure_tiny_llama

POOL_BLOCKS = 24


@pytest.fixture(scope="session")
def stock() -> Engine:
    """Plain vLLM on the tiny model, made before vToken registers anything."""
    return Engine(ensure_tiny_llama(), blocks=POOL_BLOCKS, stock=True)


@pytest.fixture(scope="session")
def shared_tiny(stock: Engine) -> Engine:
    del stock  # only for the order of construction
    return Engine(ensure_tiny_llama(), blocks=POOL_BLOCKS)


@pytest.fixture
def tiny(shared_tiny: Engine) -> Iterator[Engine]:
    """The tiny model with vToken; a pool of 23 blocks of 32 tokens, steps of at most 96 tokens.

    A test must leave the pool as free as it found it.
    """
    free = shared_tiny.free
    yield shared_tiny
    assert not shared_tiny.scheduler.requests
    assert shared_tiny.free == free


@pytest.fixture(scope="session")
def smollm2(shared_tiny: Engine) -> Engine:
    """The embedded model with vToken; a pool of 63 blocks of 32 tokens."""
    del shared_tiny  # only for the order of construction
    return Engine(ensure_smollm2(), blocks=64, chunk=256, max_model_len=1024)
