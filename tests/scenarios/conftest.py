"""Scenarios on the real engine use the engine tests' shared engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engines import Engine, engine_on


@pytest.fixture(scope="session")
def shared_tiny() -> Engine:
    return engine_on("tiny")


@pytest.fixture(scope="session")
def shared_async() -> Engine:
    return engine_on("tiny async")


@pytest.fixture(params=["sync", "async"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The tiny model, with one and with two steps in flight; must be left drained and free."""
    name = {"sync": "shared_tiny", "async": "shared_async"}[request.param]
    found: Engine = request.getfixturevalue(name)
    free = found.free
    yield found
    assert not found.scheduler.requests
    assert len(found.scheduler.vtoken.tables) == 0
    assert found.free == free
