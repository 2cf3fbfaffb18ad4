"""`vtoken eval` around the engine: bad input in one line, files written, exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fake_eval_engine import FakeEngine
from vtoken import cli, eval_command
from vtoken.config import VTokenConfig
from vtoken.evaluation.evaluate import Evaluation, Tasks
from vtoken.evaluation.plan import Plan
from vtoken.evaluation.texts import Text

PNG = b"\x89PNG\r\n\x1a\n"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`vtoken eval` with these arguments, in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["vtoken", "eval", *arguments])
    monkeypatch.setattr(cli.atexit, "register", lambda function: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(**_: Any) -> None:
        raise AssertionError("the command went on past its input")

    monkeypatch.setattr(eval_command, "prepare_environment", reached)


ERRORS = {
    "unknown policy": (["--policy", "h4o"], "unknown policy 'h4o'; choose one of: streaming-llm"),
    "one unknown among others": (["--policy", "random,h4o"], "unknown policy 'h4o'"),
    "no policy": (["--policy", "none"], "no policy to evaluate; the full cache is in every table"),
    "budget in words": (
        ["--budgets", "half"],
        "budget 'half' is not a number; give shares of the length such as 0.5,0.25",
    ),
    "budget in tokens": (["--budgets", "0.5,128"], "budget 128 is not a share of the length"),
    "budget 0": (["--budget-ratio", "0"], "budget 0 is not a share of the length, in (0, 1]"),
    "budget nan": (["--budget-ratio", "nan"], "budget nan is not a share of the length"),
    "unknown task": (
        ["--tasks", "passkey,mmlu"],
        "unknown task 'mmlu'; choose from: passkey, perplexity, rouge",
    ),
    "no samples": (["--samples", "0"], "Invalid value for '--samples'"),
    "unknown mode": (["--reclaim", "lazy"], "unknown reclaim mode 'lazy'; choose one of: "),
    "checks": (["--checks", "4"], "checks must be 0, 1, 2 or 3, not 4"),
    "negative seed": (["--seed", "-1"], "seed must be 0 or more, not -1"),
    "missing text": (
        ["--text", "/no/such/text"],
        "cannot read the text /no/such/text: No such file or directory",
    ),
    "missing model": (["--model", "/no/such/model"], "there is no model folder /no/such/model"),
    "json into nowhere": (
        ["--json", "/no/such/folder/out.json"],
        "cannot write /no/such/folder/out.json: there is no folder /no/such/folder",
    ),
    "plot into nowhere": (["--plot", "/no/such/folder/out.png"], "cannot write /no/such/folder/"),
    "plot of another kind": (
        ["--plot", "out.svg"],
        "--plot writes a PNG file; give out.svg a name that ends in .png",
    ),
    "a prompt": (["something"], "Got unexpected extra argument"),
}


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(("arguments", "reason"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_input_is_refused_in_one_line_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith(f"vtoken: {reason}")
    assert seen.err.count("\n") == 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command on an engine without a model; what it was called with."""
    seen: dict[str, Any] = {"engine": FakeEngine()}

    def _run(
        checkpoint: str, settings: VTokenConfig, plan: Plan, text: Text, **more: Any
    ) -> tuple[Evaluation, dict[str, float]]:
        seen.update(checkpoint=checkpoint, settings=settings, plan=plan, text=text, **more)
        tasks = Tasks(plan, text, seen["engine"])
        found = tasks.run(seen["engine"], lambda task, tokens: None)
        return found, {"start_s": 1.0, "evaluate_s": 2.0}

    monkeypatch.setattr(eval_command, "_run", _run)
    monkeypatch.setattr(eval_command, "prepare_environment", lambda *, quiet: None)
    monkeypatch.setattr(eval_command, "_embedded_model", lambda: "embedded")
    return seen


SMALL = ["--samples", "2", "--length", "256"]


def test_the_result_is_written_as_json_and_drawn(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fake: dict[str, Any],
    tmp_path: Path,
) -> None:
    out, plot, text = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "mine.txt"
    text.write_text(" ".join(f"w{n}" for n in range(900)))
    files = ["--json", str(out), "--plot", str(plot), "--text", str(text)]
    assert run(monkeypatch, *SMALL, *files, "--policy", "random", "--policy", "h2o") == 0
    result = json.loads(out.read_text())
    assert result["model"] == "SmolLM2-135M-Instruct"
    assert result["text"]["source"] == str(text)
    assert result["text"]["tokens"] == 900
    assert (result["start_s"], result["evaluate_s"], result["quick"]) == (1.0, 2.0, False)
    assert set(result["versions"]) == {"vtoken", "vllm", "python"}
    assert [(row["policy"], row["budget_ratio"]) for row in result["rows"]] == [
        ("none", 1.0),
        ("random", 0.5),
        ("random", 0.25),
        ("h2o", 0.5),
        ("h2o", 0.25),
    ]
    assert plot.read_bytes().startswith(PNG)
    assert len(plot.read_bytes()) > 10_000
    table = capsys.readouterr().out
    assert "full cache" in table
    assert "time: 2 s, and 1 s to start the engine" in table


def test_defaults_are_all_policies_at_half_and_a_quarter(
    monkeypatch: pytest.MonkeyPatch, fake: dict[str, Any]
) -> None:
    assert run(monkeypatch, *SMALL) == 0
    plan: Plan = fake["plan"]
    names = {"streaming-llm", "sliding-window", "random", "h2o", "scissorhands", "fastgen"}
    assert names <= set(plan.policies)
    assert plan.budgets == (0.5, 0.25)
    assert (plan.tasks, plan.reclaim) == (("passkey", "perplexity", "rouge"), "background")
    assert fake["checkpoint"] == "embedded"
    assert fake["text"].source == "pydoc_data.topics"
    assert fake["settings"].reclaim == "background"


def test_what_policies_are_given_comes_from_a_file(
    monkeypatch: pytest.MonkeyPatch, fake: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "vtoken.toml"
    config.write_text('policy = "h2o"\nbudget = 64\nsinks = 8\nslack = 16\n')
    arguments = ["--config", str(config), "--policy", "streaming-llm", "--checks", "2"]
    assert run(monkeypatch, *SMALL, *arguments, "--seed", "5") == 0
    settings: VTokenConfig = fake["settings"]
    assert (settings.policy, settings.budget, settings.budget_ratio) == ("streaming-llm", None, 0.5)
    assert (settings.sinks, settings.slack, settings.checks, settings.seed) == (8, 16, 2, 5)
    assert fake["plan"].seed == 5


def test_a_policy_that_fails_shows_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: dict[str, Any]
) -> None:
    fake["engine"] = FakeEngine(fails=["random"])
    assert run(monkeypatch, *SMALL, "--policy", "random,h2o") == 1
    assert capsys.readouterr().err == "vtoken: warning: policy random failed\n"


def test_no_plot_is_drawn_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, fake: dict[str, Any]
) -> None:
    """The drawing library takes a second to import."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    assert run(monkeypatch, *SMALL, "--policy", "random", "--tasks", "passkey") == 0
    assert "matplotlib" not in sys.modules
