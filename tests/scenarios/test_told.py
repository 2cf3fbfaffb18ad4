"""What a user is told when a policy does nothing, and when the pool is too small to serve.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.processes import SMALL, VTOKEN, Ended, Server, vtoken, vtoken_one_by_one
from vtoken.config import VTokenConfig
from vtoken.models import ensure_tiny_llama
from vtoken.report import run_result, warning_of

_SILENT = """
import numpy as np
from vtoken.policies import Policy

class Silent(Policy):
    name = "silent"

    def victims(self, view):
        return np.empty(0, dtype=np.int32)
"""
NOT_REACHED = "nothing was evicted: no request reached the budget; lower --budget"


def install_silent_policy(folder: Path) -> dict[str, str]:
    """A policy of another package that never names a token; the environment that finds it."""
    (folder / "silent_policy.py").write_text(_SILENT)
    metadata = folder / "silent_policy-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: silent\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vtoken.policies]\nsilent = silent_policy:Silent\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


# S20 --------------------------------------------------------------------------------------------


def result(config: VTokenConfig, *, evicted: int, asked: int) -> dict[str, Any]:
    return run_result(
        model="m",
        config=config,
        outputs=[],
        report={
            "blocks_peak": {},
            "reclaim": config.reclaim,
            "block_size": 32,
            "tokens": {"evicted": evicted},
            "policy_calls": asked,
            "checks": {},
            "pool": {"total": 1, "free": 1},
        },
        free_before=1,
        start_s=0.0,
        generate_s=0.0,
    )


@pytest.mark.parametrize(
    ("options", "evicted", "asked", "warning"),
    [
        ({"policy": "random", "budget": 64}, 0, 0, NOT_REACHED),
        ({"policy": "random", "budget_ratio": 1.0}, 0, 0, f"{NOT_REACHED}-ratio"),
        (
            {"policy": "random", "budget": 64},
            *(0, 7),
            "nothing was evicted: policy random was asked 7 times and named no token; choose "
            "another policy",
        ),
        ({"policy": "random", "budget": 64}, 3, 7, None),
        ({}, 0, 0, None),
    ],
)
def test_s20_a_result_says_why_nothing_was_evicted(
    options: dict[str, Any], evicted: int, asked: int, warning: str | None
) -> None:
    """Given a policy whose budget is never reached, or that never fires; when the run is over; then
    its result has 0 evictions and a warning with the reason; else it has none."""
    found = result(VTokenConfig(**options), evicted=evicted, asked=asked)
    assert found["tokens"]["evicted"] == evicted
    assert found["warnings"] == ([] if warning is None else [warning])
    assert warning_of(found) == warning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """`vtoken run` commands on the tiny model, by name; each with a JSON file of that name."""
    small = ["--model", str(ensure_tiny_llama()), "--max-model-len", "512", "--ignore-eos"]
    commands = {
        "never reached": ["--kv-memory-mb", "4", "--policy", "random", "--budget", "512"],
        "the whole": ["--kv-memory-mb", "4", "--policy", "random", "--budget-ratio", "1"],
        "never fires": ["--kv-memory-mb", "4", "--policy", "silent", "--budget", "20"],
        "fires": ["--kv-memory-mb", "4", "--policy", "random", "--budget", "20"],
        "small pool": [
            *("--kv-memory-mb", "1", "--policy", "random", "--budget", "20"),
            *("--max-model-len", "2048"),
        ],
        "large budget": ["--kv-memory-mb", "1", "--policy", "random", "--budget", "1000"],
    }
    done = vtoken_one_by_one(
        [
            ["run", "hello", *small, "--max-tokens", "40", "--json", str(folder / name), *flags]
            for name, flags in commands.items()
        ],
        install_silent_policy(folder),
    )
    return dict(zip(commands, done, strict=True))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("never reached", NOT_REACHED),
        ("the whole", f"{NOT_REACHED}-ratio"),
        ("never fires", "nothing was evicted: policy silent was asked "),
        ("fires", None),
    ],
)
def test_s20_vtoken_run_says_that_nothing_was_evicted(
    ended: dict[str, Ended], folder: Path, name: str, warning: str | None
) -> None:
    """Given a budget that is never reached, or a policy that never fires; when `vtoken run` ends;
    then 0 evictions and the warning are on the screen and in the JSON."""
    assert ended[name].status == 0
    found = json.loads((folder / name).read_text())
    if warning is None:
        assert found["tokens"]["evicted"] > 0 == len(found["warnings"])
        assert "warning" not in ended[name].stderr
        return
    assert found["tokens"]["evicted"] == 0
    (told,) = found["warnings"]
    assert told.startswith(warning)
    assert "tokens   0 evicted" in ended[name].stdout
    assert ended[name].stderr.splitlines()[-1] == f"vtoken: warning: {told}"


@pytest.mark.engine
def test_s20_a_server_says_it_at_start_and_at_its_end(tmp_path: Path) -> None:
    """Given a budget that no request can reach; when the server starts, serves and is stopped; then
    its log says at both ends that nothing is evicted."""
    flags = ["--policy", "random", "--budget", "600", *SMALL, "--served-model-name", "tiny"]
    server = Server([str(VTOKEN), "serve", str(ensure_tiny_llama()), *flags], tmp_path / "log.txt")
    try:
        server.wait_until_healthy()
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 5}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        assert server.stop() == 0
    finally:
        server.kill()
    early = "nothing will be evicted: the budget of 600 tokens is not below the context of 512"
    assert early in server.log
    assert NOT_REACHED in server.log


# S23 --------------------------------------------------------------------------------------------

TOO_SMALL = (
    "vtoken: the KV pool is smaller than one request may be: a prompt of up to {context} tokens, "
    "the context, has to fit before anything of it is evicted, and again after a preemption; "
    "lower --max-model-len to {fits}, or give the pool more memory (--kv-memory-mb"
)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("small pool", TOO_SMALL.format(context=2048, fits=992)),
        (
            "large budget",
            "vtoken: the KV pool holds 992 tokens (31 blocks of 32), less than the budget of 1000; "
            "lower --budget, or give the pool more memory",
        ),
    ],
)
def test_s23_vtoken_run_refuses_a_pool_that_is_too_small(
    ended: dict[str, Ended], folder: Path, name: str, reason: str
) -> None:
    """Given a pool smaller than one request may be, or than the budget; when `vtoken run` starts;
    then it ends at once, with one line that names the cause and the way out."""
    assert ended[name].status == 2
    assert ended[name].stdout == ""
    begin, last = ended[name].stderr.splitlines()
    assert begin == "starting vLLM ..."
    assert last.startswith(reason)
    assert not (folder / name).exists()


@pytest.mark.engine
def test_s23_a_server_refuses_a_pool_that_is_too_small() -> None:
    """Given the same in a server, whose engine is a process of its own; when it starts; then its
    last word is the same line. (A budget larger than the pool: tests/engine/test_serve.py.)"""
    flags = ["--policy", "random", "--budget", "40", *SMALL, "--num-gpu-blocks-override", "5"]
    done = vtoken("serve", str(ensure_tiny_llama()), *flags)
    assert done.returncode == 2
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith(TOO_SMALL.format(context=512, fits=128))
