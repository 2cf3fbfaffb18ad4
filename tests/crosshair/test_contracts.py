"""Symbolic execution settles each contract as the committed expectations say.

`confirmed`: every path was explored, so the contract holds for all arguments within its
preconditions. `refute-only`: no counterexample was found before the limit. `refuted`: a negative
control, for which a counterexample must be found. A contract that is lost, new, or settled
differently fails. Limits: CPU seconds for each condition, and a wall limit for each file.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import vtoken_spec as spec

HERE = Path(__file__).parent
CONDITION_CPU_S = 30
FILE_WALL_S = 400
LINE = re.compile(r"^.*?:(\d+): (\w+): (.*)$")
VERDICTS = {"Confirmed over all paths.": "confirmed", "Not confirmed.": "refute-only"}


def verdicts(name: str) -> dict[str, str]:
    """The verdict on each function of the file: the worst of those on its conditions."""
    path = HERE / name
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    command = [sys.executable, "-m", "crosshair", "check", "--report_all"]
    command += ["--analysis_kind", "PEP316", "--per_condition_timeout", str(CONDITION_CPU_S)]
    result = subprocess.run(
        [*command, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE)))},
        capture_output=True,
        text=True,
        timeout=FILE_WALL_S,
        check=False,
    )
    assert result.returncode in (0, 1), result.stderr
    found: dict[str, set[str]] = {}
    for line in result.stdout.splitlines():
        match = LINE.match(line)
        assert match, f"not a verdict: {line}"
        number, level, message = int(match[1]), match[2], match[3]
        name = next(f.name for f in functions if f.lineno <= number <= (f.end_lineno or 0))
        settled = VERDICTS.get(message, message) if level == "info" else "refuted"
        found.setdefault(name, set()).add(settled)
    order = ("refuted", "refute-only", "confirmed")
    return {
        name: next((verdict for verdict in order if verdict in settled), f"unclear: {settled}")
        for name, settled in found.items()
    }


@pytest.mark.parametrize("name", ["contracts.py", "flying.py", "broken.py"])
def test_every_contract_is_settled_as_expected(name: str) -> None:
    expected = json.loads((HERE / "expectations.json").read_text(encoding="utf-8"))[name]
    assert verdicts(name) == expected


def test_every_contract_is_expected_to_hold_and_every_control_to_be_refuted() -> None:
    expected = json.loads((HERE / "expectations.json").read_text(encoding="utf-8"))
    for name in ("contracts.py", "flying.py"):
        assert set(expected[name].values()) <= {"confirmed", "refute-only"}
    assert set(expected["broken.py"].values()) == {"refuted"}


def test_every_event_has_a_contract() -> None:
    called = "".join((HERE / name).read_text("utf-8") for name in ("contracts.py", "flying.py"))
    for event in get_args(spec.Event):
        assert f"spec.{event.__name__}(" in called, event
