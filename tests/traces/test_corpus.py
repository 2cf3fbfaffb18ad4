"""Kept traces and scripts go on meaning what they meant: README.md says what each one is."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from traces.make_corpus import FAULTS

from support.mutation import applied
from vtoken.testing.script import read_script, run_script
from vtoken.trace import read_trace, replay
from vtoken.trace.explain import explain

FOLDER = Path(__file__).parent
ROW = re.compile(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|")


@cache
def rows() -> dict[str, tuple[str, str]]:
    """File -> (note, what it gives)."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    return {m[1]: (m[2].strip(), m[3].strip()) for m in ROW.finditer(text)}


TRACES = sorted(file.name for file in FOLDER.glob("*.ndjson"))
SCRIPTS = sorted(file.name for file in FOLDER.glob("*.script.json"))


def test_the_table_has_exactly_the_files() -> None:
    assert sorted(rows()) == sorted(TRACES + SCRIPTS)
    assert len(TRACES) >= 8
    assert len(SCRIPTS) >= 8


@pytest.mark.parametrize("name", TRACES)
def test_a_kept_trace_is_judged_as_before(name: str) -> None:
    result = replay(FOLDER / name)
    expected = rows()[name][1]
    if expected == "accepted":
        assert result.divergence is None, result.divergence
        return
    assert result.divergence is not None
    assert expected == f"{result.divergence.law} at line {result.divergence.line}"
    header, records = read_trace(FOLDER / name)
    chain = explain(header, [record for _, record in records])
    assert chain[-1].strip().startswith(f"law {result.divergence.law}:")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_kept_script_passes_and_fails_with_its_fault(name: str) -> None:
    made, calls = read_script(FOLDER / name)
    note, expected = rows()[name]
    assert run_script(made.build(), calls) is None
    (fault,) = (fault for fault in FAULTS if fault.name == note)
    with applied(fault):
        found = run_script(made.build(), calls)
    assert found is not None
    assert found[0] == expected
