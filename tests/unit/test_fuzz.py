"""`vtoken fuzz`: finds nothing in what is right, and finds, keeps and shrinks what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutants.catalogue import WALKED
from typer.testing import CliRunner

import vtoken_spec as spec
from support.broken_steps import forgetful_recycle
from support.mutation import applied
from vtoken.cli import app
from vtoken.errors import Rejected
from vtoken.testing.fuzz import fuzz_core
from vtoken.testing.script import read_script
from vtoken.trace import replay

FAULT = next(fault for fault in WALKED if fault.name == "recycled hole keeps its dead token")
BYTES = next(fault for fault in WALKED if fault.name == "mover drops the last token of a plan")
PLACED = next(fault for fault in WALKED if fault.name == "stale version in the plan")


def command(tmp_path: Path, *more: str) -> tuple[int, str]:
    trace = tmp_path / "f.ndjson"
    result = CliRunner().invoke(app, ["fuzz", "--trace", str(trace), *more])
    return result.exit_code, result.output


def test_a_campaign_counts_what_it_did(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, output = command(tmp_path, "--seconds", "2", "--seed", "3", "--json", str(file))
    assert code == 0, output
    assert "nothing found" in output
    result = json.loads(file.read_text())
    assert result["violations"] == 0
    assert result["events"] > 50
    assert result["events_per_second"] > 0
    assert set(result["coverage"]) >= {"Append", "Attend", "Evict", "Finish", "Copy", "Commit"}
    assert sum(result["rejections"].values()) > 0


def test_an_episode_comes_back_by_seed_and_number() -> None:
    once, twice = (fuzz_core(seconds=0.01, seed=5, first_episode=7) for _ in range(2))
    assert once.episodes == twice.episodes == 1
    assert (once.events, once.coverage) == (twice.events, twice.coverage)


@pytest.mark.parametrize("fault", [FAULT, PLACED], ids=lambda fault: fault.name)
def test_a_seeded_fault_ends_the_campaign_with_a_trace(tmp_path: Path, fault: object) -> None:
    with applied(fault):  # type: ignore[arg-type]
        code, output = command(tmp_path, "--seconds", "60")
    assert code == 1, output
    assert "again: vtoken fuzz --target core --seed 0 --episode" in output
    # Replayed without the fault: the trace holds what the implementation did, wrong or not.
    assert (tmp_path / "f.ndjson").is_file()
    replay(tmp_path / "f.ndjson")


def test_a_fault_in_bytes_ends_with_a_script_that_shows_it_again(tmp_path: Path) -> None:
    """Claim: where the spec accepts the trace, because only bytes are wrong, the finding is a few
    calls; they fail with the fault and pass without it."""
    with applied(BYTES):
        code, output = command(tmp_path, "--seconds", "60")
        assert code == 1, output
        file = tmp_path / "f.script.json"
        values = json.loads(file.read_text())
        assert 0 < len(values["script"]) < 12, values["script"]
        code, output = command(tmp_path, "--script", str(file))
        assert code == 1
        assert f"law {values['law']}" in output
    assert command(tmp_path, "--script", str(file)) == (
        0,
        f"nothing found in the {len(values['script'])} calls of {file}\n",
    )


ENGINE = {
    "mode": "eager", "block_size": 4, "num_blocks": 9, "transposed": False, "level": 3,
    "background": None, "strategy": None, "device_seed": 0, "lag": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "script"),
    [
        ({}, [["zap"]]),
        ({}, [["evict", "a"]]),
        ({}, [["add", "a", "x", 0]]),
        ({}, [["step"]]),
        ({}, [["evict", "a", [1, "2"]]]),
        ({}, 3),
        ({"mode": "zap"}, []),
        ({"strategy": "zap"}, []),
        ({"level": "3"}, []),
        ({"num_blocks": 10**12}, []),
        ({"background": {"threshold": 7}}, []),
        ({"surplus": 1}, []),
    ],
)
def test_what_is_not_a_script_is_told_in_one_line(
    tmp_path: Path, engine: dict[str, object], script: object
) -> None:
    file = tmp_path / "s.json"
    file.write_text(
        json.dumps({"vtoken_script": 1, "engine": {**ENGINE, **engine}, "script": script})
    )
    with pytest.raises(Rejected) as caught:
        read_script(file)
    assert "\n" not in str(caught.value)
    file.write_text(json.dumps({"vtoken_script": 1, "engine": ENGINE, "script": [["verify"]]}))
    assert read_script(file)[1] == [["verify"]]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"vtoken_script": 9}', "[" * 200_000])
def test_what_is_not_json_of_a_script_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(text)
    with pytest.raises(Rejected, match="script"):
        read_script(file)


def test_the_model_is_a_target(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, output = command(tmp_path, "--target", "model", "--seconds", "6", "--json", str(file))
    assert code == 0, output
    result = json.loads(file.read_text())
    assert set(result["coverage"]) >= {"Prepare", "Copy", "Wait", "Commit", "Abort", "Attend"}
    assert set(result["rejections"]) >= {"IN_FLIGHT", "NOT_WAITED", "LAST_TOKEN"}


def test_a_fault_in_the_model_comes_with_the_shortest_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "step", forgetful_recycle)
    code, output = command(tmp_path, "--target", "model", "--seconds", "60")
    assert code == 1, output
    history = [line for line in output.splitlines() if line.endswith(")") and "(req_id=" in line]
    assert history[-1].startswith("Recycle(")
    assert len(history) <= 5, output


@pytest.mark.parametrize("wrong", [["--target", "moon"], ["--seconds", "0"], ["--seed", "-1"]])
def test_wrong_use_is_told_apart_from_a_violation(tmp_path: Path, wrong: list[str]) -> None:
    assert command(tmp_path, *wrong)[0] == 2
