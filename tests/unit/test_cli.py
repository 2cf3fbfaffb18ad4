"""Bad input ends in one clear line and status 2, before any engine exists; prompts and files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from vtoken import cli, options, serve_command
from vtoken.config import VTokenConfig
from vtoken.errors import EngineFailed, InvariantViolation, Rejected, UnsupportedConfiguration


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`vtoken` with these arguments, in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["vtoken", *arguments])
    monkeypatch.setattr(cli.atexit, "register", lambda function: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused here must be refused before a model is fetched or vLLM is touched."""

    def reached() -> None:
        raise AssertionError("the command went on past its input")

    monkeypatch.setattr(cli, "_embedded_model", reached)
    for module in (cli, serve_command):
        monkeypatch.setattr(module, "prepare_environment", lambda *, quiet: reached())


RUN_ERRORS = {
    "unknown policy": (
        ["--policy", "h4o", "--budget", "64"],
        "unknown policy 'h4o'; choose one of: streaming-llm, sliding-window, random",
    ),
    "policy without a budget": (
        ["--policy", "random"],
        "policy random needs a budget; give --budget TOKENS or --budget-ratio SHARE",
    ),
    "budget without a policy": (
        ["--budget", "64"],
        "a budget needs a policy; name one with --policy",
    ),
    "budget 0": (["--policy", "random", "--budget", "0"], "budget must be positive, not 0"),
    "negative budget": (
        ["--policy", "streaming-llm", "--budget", "-5"],
        "budget must be positive, not -5",
    ),
    "budget below sinks": (
        ["--policy", "streaming-llm", "--budget", "8", "--sinks", "8"],
        "budget 8 is too small for streaming-llm: at least 9 (sinks 8 + 1)",
    ),
    "both budgets": (
        ["--policy", "random", "--budget", "64", "--budget-ratio", "0.5"],
        "budget is given both in tokens and as a ratio; give one of them",
    ),
    "ratio above 1": (
        ["--policy", "random", "--budget-ratio", "1.5"],
        "budget_ratio must be in (0, 1], not 1.5",
    ),
    "unknown mode": (["--reclaim", "lazy"], "unknown reclaim mode 'lazy'; choose one of: "),
    "unknown score mode": (
        ["--policy", "h2o", "--budget", "64", "--score-mode", "guessed"],
        "unknown score_mode 'guessed'; choose one of: exact, sampled",
    ),
    "sampling an exact mode": (
        ["--policy", "h2o", "--budget", "64", "--score-every", "4"],
        "score_every is an option of score_mode sampled, not exact; give --score-mode sampled, or "
        "leave it out",
    ),
    "no layer": (
        ["--score-mode", "sampled", "--score-layers", "0"],
        "score_layers must be positive, not 0",
    ),
    "no window": (["--score-window", "0"], "score_window must be positive, not 0"),
    "checks": (["--checks", "4"], "checks must be 0, 1, 2 or 3, not 4"),
    "missing model": (
        ["--model", "/no/such/model"],
        "there is no model folder /no/such/model",
    ),
    "json into nowhere": (
        ["--json", "/no/such/folder/out.json"],
        "cannot write /no/such/folder/out.json: there is no folder /no/such/folder",
    ),
    "missing prompt file": (["--file", "/no/such/file"], "cannot read prompts from /no/such/file"),
    "missing configuration": (
        ["--config", "/no/such/file.toml"],
        "cannot read configuration /no/such/file.toml",
    ),
    "not a number": (["--budget", "many"], "Invalid value for '--budget'"),
    "no new tokens": (["--max-tokens", "0"], "Invalid value for '--max-tokens'"),
    "unknown option": (["--no-such-option"], "No such option: --no-such-option"),
}


@pytest.mark.parametrize(("arguments", "reason"), RUN_ERRORS.values(), ids=RUN_ERRORS.keys())
def test_run_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert run(monkeypatch, "run", *arguments, "a prompt") == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith(f"vtoken: {reason}")
    assert seen.err.count("\n") == 1


SERVE_ERRORS = [
    *("unknown policy", "budget 0", "negative budget", "both budgets", "checks"),
    *("unknown score mode", "sampling an exact mode", "no layer", "no window"),
]


@pytest.mark.parametrize("command", [cli.run, cli.serve])
def test_every_option_has_a_flag_that_reaches_the_configuration(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None]
) -> None:
    names = {field.name for field in fields(VTokenConfig)}
    assert names <= set(signature(command).parameters)
    given: dict[str, Any] = {}

    def load_config(file: object, **flags: Any) -> None:
        given.update(flags)
        raise Rejected("enough")

    monkeypatch.setattr(sys.modules[command.__module__], "load_config", load_config)
    values = {name: object() for name in names - {"trace"}}
    extra = {"context": None} if command is cli.serve else {}
    with pytest.raises(Rejected, match="enough"):
        command(**values, **extra)
    assert given == {**values, "trace": None}


@pytest.mark.parametrize("name", SERVE_ERRORS)
def test_serve_refuses_the_same_before_vllm_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments, reason = RUN_ERRORS[name]
    assert run(monkeypatch, "serve", "--tensor-parallel-size", "2", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"vtoken: {reason}")


@pytest.mark.parametrize("arguments", [["nonsense"], ["run", "--file"], ["--nonsense"]])
def test_wrong_use_names_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    seen = capsys.readouterr().err
    assert seen.startswith("vtoken: ")
    assert seen.count("\n") == 1
    assert seen.rstrip().endswith("--help")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (Rejected("no\n  such thing"), 2, "vtoken: no such thing\n"),
        (UnsupportedConfiguration("not this [model]"), 2, "vtoken: not this [model]\n"),
        (EngineFailed("out of memory"), 1, "vtoken: out of memory\n"),
        (
            InvariantViolation("I2", "two tokens", slot=17),
            1,
            "vtoken: law I2 is violated: two tokens\n  slot     17\n",
        ),
        (KeyboardInterrupt(), 130, "vtoken: interrupted\n"),
    ],
)
def test_the_status_tells_whose_fault_it_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    text: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "load_config", fail)
    assert run(monkeypatch, "run", "a prompt") == status
    assert capsys.readouterr().err == text


def test_help_and_version_need_no_vllm() -> None:
    """Import of vLLM takes many seconds, which nobody waits for to read a help text."""
    script = (
        "import sys, vtoken.cli as cli\n"
        "for arguments in ([], ['--version'], ['run', '--help'], ['serve', '--help']):\n"
        "    sys.argv = ['vtoken', *arguments]\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (arguments, end.code)\n"
        "assert not {'vllm', 'torch'} & set(sys.modules), 'too much is imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for text in ("vtoken 0.", "--policy", "--budget-ratio", "--max-tokens", "--vllm-help"):
        assert text in done.stdout


def test_a_reader_who_leaves_early_is_no_error_worth_a_word() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "vtoken.cli", "run", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, complaint = process.communicate(timeout=60)
    assert complaint == b""
    assert process.returncode in (0, 1)


def test_prompts_come_from_arguments_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('first line\n\n{"prompt": "second\\nprompt", "id": 7}\n  third\n')
    assert options.read_prompts(["an argument"], file) == [
        "an argument",
        "first line",
        "second\nprompt",
        "  third",
    ]


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_prompts_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    source = tmp_path / "stdin"
    source.write_text("one\ntwo\n")
    with source.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert options.read_prompts(arguments, None) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no prompt; give one as an argument, with --file, or on standard input"),
        (b'fine\n{"text": "no prompt"}\n', "line 2: not a JSON object with a 'prompt'"),
        (b'{"prompt": 7}\n', "line 1: 'prompt' is not a string"),
        (b'{"prompt": "   "}\n', "a prompt is empty; leave it out"),
        (b'{"prompt": "cut off\n', "line 1: not a JSON object with a 'prompt'"),
        (b"\xff\xfe\x00", "cannot read prompts from"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(Rejected) as caught:
        options.read_prompts([], file)
    assert reason in str(caught.value)


@pytest.mark.parametrize("prompt", ["", "  \n "])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(Rejected, match="a prompt is empty"):
        options.read_prompts(["fine", prompt], None)


CONFIGURATIONS = {
    "vtoken.toml": 'policy = "streaming-llm"\nbudget = 64\n[unused]\n',
    "vtoken.json": '{"vtoken": {"policy": "streaming-llm", "budget": 64}}',
    "vtoken.yaml": "vtoken:\n  policy: streaming-llm\n  budget: 64\n",
}


@pytest.mark.parametrize("name", ["vtoken.json", "vtoken.yaml"])
def test_flags_override_the_configuration_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(CONFIGURATIONS[name])
    assert options.load_config(file).budget == 64
    config = options.load_config(file, budget_ratio=0.5, checks=3, seed=None)
    assert (config.policy, config.budget, config.budget_ratio) == ("streaming-llm", None, 0.5)
    assert (config.checks, config.seed) == (3, 0)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", CONFIGURATIONS["vtoken.toml"], "unknown vtoken option 'unused'; known: policy"),
        ("a.toml", "policy = ", "is not valid toml"),
        ("a.json", "[1]", "must hold a mapping"),
        ("a.json", '{"budget": "64"}', "budget must be a whole number of tokens, not '64'"),
        ("a.json", '{"checks": true}', "checks must be a whole number, not True"),
        ("a.yaml", "a: [", "is not valid yaml"),
        ("a.ini", "", "has an unknown format; name it .toml, .json or .yaml"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(Rejected) as caught:
        options.load_config(file)
    assert reason in str(caught.value)


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options.write_json_atomically(file, {"text": "ü"})
    assert json.loads(file.read_text()) == {"text": "ü"}
    with pytest.raises(TypeError):
        options.write_json_atomically(file, {"text": object()})
    assert json.loads(file.read_text()) == {"text": "ü"}
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(Rejected, match="cannot write"):
        options.check_writable(tmp_path)


def test_a_model_folder_must_hold_a_model_and_a_hub_name_need_not_exist(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="holds no model"):
        options.check_model_folder(str(tmp_path))
    with pytest.raises(Rejected, match="there is no model folder"):
        options.check_model_folder("some/deep/folder")
    (tmp_path / "config.json").write_text("{}")
    options.check_model_folder(str(tmp_path))
    options.check_model_folder("someone/some-model")
