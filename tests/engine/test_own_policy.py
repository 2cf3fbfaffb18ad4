"""The example of docs/policies.md is a policy, under both of its names."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from support.engines import Engine
from vtoken.errors import Rejected
from vtoken.policies import find_policy, policy_names, registry

pytestmark = pytest.mark.engine

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example's text, importable as `alternate`."""
    (text,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "alternate.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "alternate", raising=False)
    return str(text)


def test_the_example_serves_exactly_and_is_short(example: str, shared_tiny: Engine) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 25
    engine = shared_tiny
    prompts = [np.random.default_rng(n).integers(3, 259, 60 + n).tolist() for n in range(3)]
    engine.configure(policy="alternate:Alternate", budget=32, slack=4, keep_first=2, checks=3)
    served = engine.serve(prompts, 40)
    assert [len(output) for output in served.outputs] == [40] * 3
    assert served.report["policy_failures"] == 0
    assert served.report["tokens"]["evicted"] > 3 * 60
    assert engine.compare(served).max_error <= 1e-5
    for life in served.lives:
        gone = np.concatenate([ids for _, ids in life.evictions])
        assert gone.min() >= 2


@pytest.mark.usefixtures("example")
def test_it_has_a_name_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("alternate", "alternate:Alternate", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    policy_names.cache_clear()
    try:
        assert find_policy("alternate") is find_policy("alternate:Alternate")
        assert "alternate" in policy_names()
    finally:
        policy_names.cache_clear()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no_such_package:X", "'no_such_package:X' does not load: No module named"),
        ("math:nothing", "does not load: module 'math' has no attribute 'nothing'"),
        ("math:sqrt", "is not a vtoken Policy subclass"),
        ("vtoken.policies:Policy", "does not define victims"),
        (":", "does not load"),
    ],
)
def test_a_place_without_a_policy_is_rejected_in_one_line(place: str, reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        find_policy(place)
    assert reason in caught.value.reason
    assert "\n" not in caught.value.reason
