"""The commands of vToken as a user starts them: processes of their own, on the loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

VTOKEN = Path(sys.executable).with_name("vtoken")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
#: what a small server of the tiny model is started with
SMALL = (
    *("--block-size", "32", "--enforce-eager", "--dtype", "float32", "--max-model-len", "512"),
    *("--kv-cache-memory-bytes", str(16 << 20), "--num-gpu-blocks-override", "65"),
)
BLOCKS = 64
START_S = 120
STOP_S = 30


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what other tests set for engines inside it."""
    ours = ("VLLM_", "VTOKEN_ERROR", "VTOKEN_SETTINGS", "VTOKEN_NO_SCORES")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**kept, **ENVIRONMENT, **(extra or {})}


def vtoken(
    *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the `vtoken` script to its end; output as text, streams apart."""
    return _run([str(VTOKEN), *arguments], stdin, env, timeout_s)


def vtoken_with_fault(
    name: str, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """The same with a fault of the catalogue."""
    tests = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-m", "support.mutated", name, *arguments]
    return _run(command, "", {**tests, **(env or {})}, timeout_s)


def _run(
    command: Sequence[str], stdin: str, env: Mapping[str, str] | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(env),
        timeout=timeout_s,
        check=False,
    )


class Ended(NamedTuple):
    """A command that came to its end."""

    status: int
    stdout: str
    stderr: str


_ONE_BY_ONE = """
import json, os, sys, tempfile
from vtoken import cli

def run(arguments):
    sys.argv = ["vtoken", *arguments]
    streams = [tempfile.TemporaryFile() for _ in range(2)]
    kept = [os.dup(number) for number in (1, 2)]
    for number, stream in zip((1, 2), streams):
        os.dup2(stream.fileno(), number)
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    for number, own in zip((1, 2), kept):
        os.dup2(own, number)
    for stream in streams:
        stream.seek(0)
    return [status, *(stream.read().decode() for stream in streams)]

json.dump([run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
"""


def vtoken_one_by_one(
    commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run commands one after the other in one process, since importing vLLM takes longest."""
    done = subprocess.run(
        [sys.executable, "-c", _ONE_BY_ONE],
        input=json.dumps([list(command) for command in commands]),
        capture_output=True,
        text=True,
        env=environment(env),
        timeout=60 * len(commands),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Ended(*values) for values in json.loads(done.stdout)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Load(NamedTuple):
    """Requests running and waiting, and KV blocks held, as vLLM's own metrics tell."""

    running: int
    waiting: int
    blocks: int


class Server:
    """A server process in a process group of its own, so that a signal can reach all of it.

    Args:
        command: without host and port, which are added.
        log: file that takes both output streams.
    """

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment(env),
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log[-4000:]}"
            if self.healthy():
                return
            time.sleep(0.25)
        raise AssertionError(f"the server is not healthy after {START_S} s:\n{self.log[-4000:]}")

    def wait_for_log(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self.log:
            assert self.process.poll() is None, f"the server ended:\n{self.log[-4000:]}"
            assert time.monotonic() < deadline, f"no {text!r} in the log:\n{self.log[-4000:]}"
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def metrics(self) -> dict[str, float]:
        """vLLM's metrics by name; those that come with several labels are summed."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            if line.startswith("vllm:"):
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def load(self) -> Load:
        found = self.metrics()
        return Load(
            running=int(found["vllm:num_requests_running"]),
            waiting=int(found["vllm:num_requests_waiting"]),
            blocks=round(found["vllm:kv_cache_usage_perc"] * BLOCKS),
        )

    def wait_until_idle(self) -> None:
        """No request runs or waits, and no block is held."""
        deadline = time.monotonic() + 15
        while (load := self.load()) != Load(0, 0, 0):
            assert time.monotonic() < deadline, f"it does not come to rest: {load}"
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM, *, group: bool = False) -> int:
        """Send a signal to the process, or to its whole group as Ctrl-C does; its status."""
        if self.process.poll() is None:
            if group:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        return self.process.wait(timeout=STOP_S)

    def wait_until_gone(self) -> None:
        """No process of its group is left, the engine's included."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
        raise AssertionError("a process of the server is left")

    def kill(self) -> None:
        """Leave nothing of it behind, whatever happened."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(timeout=STOP_S)
