"""`vtoken fuzz --target engine`: short campaigns on vLLM find nothing in what is right, and find a
seeded fault. The long ones are in docs/results.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutants.catalogue import WALKED

from support.processes import vtoken, vtoken_with_fault
from vtoken.vllm import fuzz

pytestmark = pytest.mark.engine


def test_a_short_campaign_finds_nothing_and_counts_what_it_did(tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "finding.ndjson"
    done = vtoken(
        *("fuzz", "--target", "engine", "--seconds", "6", "--seed", "3"),
        *("--json", str(out), "--trace", str(trace)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing found" in done.stdout
    found = json.loads(out.read_text())
    assert (found["target"], found["violations"]) == ("engine", 0)
    assert found["episodes"] >= 1
    assert found["steps"] >= fuzz.EPISODE_STEPS
    assert found["events"] > 1000
    assert set(found["coverage"]) >= {"Append", "Attend", "Evict", "Finish"}
    assert not trace.exists()


def test_a_seeded_fault_is_found_kept_and_said(tmp_path: Path) -> None:
    """By the laws that are named for it, with the trace and how to have the episode again."""
    out, trace = tmp_path / "out.json", tmp_path / "finding.ndjson"
    fault = next(each for each in WALKED if each.name == "recycled hole keeps its dead token")
    done = vtoken_with_fault(
        *(fault.name, "fuzz", "--target", "engine", "--seconds", "120", "--seed", "3"),
        *("--json", str(out), "--trace", str(trace)),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert any(f"law {law}: " in said for law in fault.laws), said
    assert "again: vtoken fuzz --target engine --seed 3 --episode " in said
    assert json.loads(out.read_text())["violations"] == 1
    assert trace.is_file()
