"""`vtoken run` as a script and as a person at a terminal meet it."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import broken_policies
from support.processes import VTOKEN, Ended, environment, vtoken, vtoken_one_by_one
from vtoken.models import ensure_tiny_llama

pytestmark = pytest.mark.engine

PROMPT = "a tale of two blocks"


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(ensure_tiny_llama())


@pytest.fixture(scope="module")
def small(tiny: str) -> list[str]:
    """Flags of a small engine."""
    return ["--model", tiny, "--kv-memory-mb", "4", "--max-model-len", "512", "--ignore-eos"]


def finish(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stderr
    return done


def test_the_form_that_scripts_rely_on(tmp_path: Path) -> None:
    """The embedded model and default memory, with every name that OUT.json must have."""
    out = tmp_path / "OUT.json"
    done = finish(
        vtoken(
            *("run", "--policy", "streaming-llm", "--budget", "128", "--reclaim", "eager"),
            *("--checks", "2", "--max-tokens", "64", "--json", str(out), "a prompt"),
            timeout_s=240,
        )
    )
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["model"] == "SmolLM2-135M-Instruct"
    assert (result["policy"], result["reclaim"]) == ("streaming-llm", "eager")
    (output,) = result["outputs"]
    assert output["prompt"] == "a prompt"
    assert 0 < len(output["token_ids"]) <= 64
    assert output["text"].strip()
    assert output["text"] in done.stdout
    assert set(result["blocks_peak"]) == {"native", "naive", "vtoken", "ideal"}
    assert {"evicted", "recycled", "moved"} <= set(result["tokens"])
    assert {"I2", "L5", "L6", "L7"} <= set(result["checks"])
    assert result["violations"] == 0
    pool = result["pool"]
    assert pool["total"] == pool["free_before"] == pool["free_after"] > 0
    # A prompt this short never reaches the budget, and the user is told.
    assert result["tokens"]["evicted"] == 0
    assert done.stderr.splitlines()[-1] == (
        "vtoken: warning: nothing was evicted: no request reached the budget; lower --budget"
    )


def test_several_prompts_from_all_places_with_the_strictest_checks(
    small: list[str], tmp_path: Path
) -> None:
    lines, config, out = tmp_path / "lines.txt", tmp_path / "vtoken.toml", tmp_path / "out.json"
    lines.write_text('from a line\n{"prompt": "from\\njson"}\n')
    config.write_text('policy = "streaming-llm"\nbudget = 1000\nchecks = 1\n')
    done = finish(
        vtoken(
            *("run", *small, "--max-tokens", "60", "--json", str(out), "--no-chat"),
            *("--config", str(config), "--budget", "40", "--checks", "3"),
            *("--file", str(lines), PROMPT, "-"),
            stdin="from standard input\n",
        )
    )
    result = json.loads(out.read_text())
    prompts = [output["prompt"] for output in result["outputs"]]
    assert prompts == [PROMPT, "from a line", "from\njson", "from standard input"]
    for output in result["outputs"]:
        assert (len(output["token_ids"]), output["finish_reason"]) == (60, "length")
    config_used = result["config"]
    assert (config_used["policy"], config_used["budget"]) == ("streaming-llm", 40)
    assert (config_used["sinks"], config_used["checks"]) == (4, 3)
    assert result["tokens"]["evicted"] > 100
    assert result["tokens"]["recycled"] > 100
    assert min(result["checks"].values()) > 0
    blocks = result["blocks_peak"]
    assert blocks["ideal"] <= blocks["vtoken"] < blocks["naive"] <= blocks["native"]
    # Streams: text and table on standard output, headings in order, nothing but progress beside.
    headings = [line for line in done.stdout.splitlines() if re.match(r"\[\d\] ", line)]
    assert headings == [
        f"[1] {PROMPT}",
        "[2] from a line",
        "[3] from json",
        "[4] from standard input",
    ]
    assert re.search(rf"vtoken +{blocks['vtoken']} ", done.stdout)
    assert done.stderr == "starting vLLM ...\n"


def test_a_terminal_shows_whole_lines_a_bar_and_the_table(small: list[str]) -> None:
    """Through a pseudo terminal: text is not overwritten, and nothing of vLLM's log shows."""
    text, status = on_terminal(
        [*small, "--policy", "streaming-llm", "--budget", "40", "--max-tokens", "80", PROMPT]
    )
    assert status == 0, text
    assert "generating" in text
    assert "80/80" in text
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "tokens   " in seen
    assert " vtoken " in seen
    for unwanted in ("Triton", "Warning", "INFO", "Traceback", "\x07"):
        assert unwanted not in seen


def on_terminal(arguments: list[str]) -> tuple[str, int]:
    """Run `vtoken run` on a terminal of 90 columns; all that it wrote, and its status."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [str(VTOKEN), "run", *arguments],
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment({"COLUMNS": "90", "LINES": "40", "TERM": "xterm"}),
    )
    os.close(its)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    return written.decode(errors="replace"), process.wait(timeout=120)


def sliding(tiny: str, folder: Path) -> str:
    """The tiny checkpoint, taken for a model with a sliding window."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


OFF = ["--policy", "random", "--budget", "40", "--checks", "2", "--max-tokens", "150"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def ended(tiny: str, small: list[str], folder: Path) -> dict[str, Ended]:
    """Commands that need a vLLM and no more than a look at how they end, by name."""
    policy = ["--policy", "random", "--budget"]
    json_file = ["--json", str(folder / "none.json")]
    crashing = [*small, "--policy", "crashing", "--budget", "16"]
    commands = {
        "sliding window": ["--model", sliding(tiny, folder / "sliding")],
        "long context": [*small, "--max-model-len", "100000"],
        "small pool": [*small, "--kv-memory-mb", "2", *policy, "5000"],
        "long prompt": [*small, *policy, "64", "--no-chat", "x" * 602],
        "unlawful": [*small, "--policy", "unlawful", "--budget", "16", *json_file],
        "crashing": [*crashing, "--json", str(folder / "crashing.json")],
        "keeping": [*crashing, "--on-policy-error", "keep-tokens", "--max-tokens", "30"],
        "eager": [*small, *OFF, "--json", str(folder / "eager.json")],
        "off": [*small, *OFF, "--reclaim", "off", "--json", str(folder / "off.json")],
    }
    done = vtoken_one_by_one(
        [["run", PROMPT, *arguments] for arguments in commands.values()],
        broken_policies.install(folder),
    )
    return dict(zip(commands, done, strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sliding window", "the model has sliding-window layers: a window counts physical slots"),
        ("long context", "vLLM does not start with these options: User-specified max_model_len"),
        (
            "small pool",
            "the KV pool holds 2016 tokens (63 blocks of 32), less than the budget of 5000; lower ",
        ),
        ("long prompt", "prompt 2 has 602 tokens and the context is 512; shorten it, or raise "),
    ],
)
def test_what_only_vllm_can_tell_is_refused_in_one_line_too(
    ended: dict[str, Ended], name: str, reason: str
) -> None:
    assert ended[name].status == 2
    assert ended[name].stdout == ""
    begin, last = ended[name].stderr.splitlines()
    assert begin == "starting vLLM ..."
    assert last.startswith("vtoken: ")
    assert reason in last


def test_a_violation_ends_the_run_with_status_1(ended: dict[str, Ended], folder: Path) -> None:
    assert ended["unlawful"].status == 1
    assert ended["unlawful"].stderr == f"starting vLLM ...\nvtoken: {broken_policies.REPORT}\n"
    assert not (folder / "none.json").exists()


def test_a_policy_that_fails_ends_its_prompt_and_the_run_tells(
    ended: dict[str, Ended], folder: Path
) -> None:
    """A policy of another package is found by its entry point, and here breaks."""
    assert ended["crashing"].status == 1
    begin, last = ended["crashing"].stderr.splitlines()
    assert begin == "starting vLLM ..."
    assert last.startswith("vtoken: warning: policy crashing failed for request 0")
    assert "it raised RuntimeError: no idea; the request ends;" in last
    (output,) = json.loads((folder / "crashing.json").read_text())["outputs"]
    assert output["finish_reason"] == "abort"


def test_a_policy_that_fails_may_also_cost_memory_only(ended: dict[str, Ended]) -> None:
    assert ended["keeping"].status == 0
    first = ended["keeping"].stderr.splitlines()[1]
    assert "it raised RuntimeError: no idea; nothing more of it is evicted;" in first


def test_off_evicts_the_same_and_gives_less_back(ended: dict[str, Ended], folder: Path) -> None:
    assert (ended["eager"].status, ended["off"].status) == (0, 0)
    eager, off = (json.loads((folder / f"{name}.json").read_text()) for name in ("eager", "off"))
    assert off["outputs"] == eager["outputs"]
    assert off["tokens"]["evicted"] == eager["tokens"]["evicted"] > 0
    assert off["tokens"]["recycled"] == off["tokens"]["moved"] == 0
    assert eager["blocks_peak"]["vtoken"] < off["blocks_peak"]["vtoken"]
    assert off["blocks_peak"]["vtoken"] == off["blocks_peak"]["naive"]
