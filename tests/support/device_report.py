"""The report of `make test-gpu`: a pytest plugin that writes JSON and a short table."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest


def card() -> dict[str, Any]:
    """What the numbers belong to. The card's fields are None where there is no device."""
    import torch

    found: dict[str, Any] = {
        "card": None,
        "compute_capability": None,
        "driver": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "vllm": _version("vllm"),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["card"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["driver"] = _driver()
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else None


class DeviceReport:
    """Collects each test's outcome, time and recorded properties.

    Args:
        path: of the JSON file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}
        self._began = time.monotonic()

    def pytest_sessionstart(self) -> None:
        """An earlier run's report is not to be taken for this one's, should this one be stopped."""
        self._path.unlink(missing_ok=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that skips as a whole, or cannot be read, has no tests that would say so."""
        if report.outcome != "passed":
            self._tests[report.nodeid] = {"outcome": "passed", "seconds": 0.0, "numbers": {}}
            self._judge(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(
            report.nodeid, {"outcome": "passed", "seconds": 0.0, "numbers": {}}
        )
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        # A teardown repeats what the call recorded, and may have more.
        test["numbers"].update(report.user_properties)
        self._judge(report)

    def _judge(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        test = self._tests[report.nodeid]
        if report.skipped:
            test["outcome"] = "skipped"
            test["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        elif report.failed:
            test["outcome"] = "failed"
            test["reason"] = report.longreprtext.splitlines()[-1] if report.longreprtext else ""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._tests:
            return
        found = self.report()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write = terminalreporter.write_line
        write("")
        for line in table(found):
            write(line)
        write(f"written to {self._path}")

    def report(self) -> dict[str, Any]:
        outcomes = [test["outcome"] for test in self._tests.values()]
        return {
            **card(),
            "seconds": round(time.monotonic() - self._began, 1),
            "counts": {name: outcomes.count(name) for name in ("passed", "failed", "skipped")},
            "tests": self._tests,
        }


def table(report: dict[str, Any]) -> list[str]:
    """Counts, and a line for each test that failed or measured something."""
    counts = ", ".join(f"{number} {name}" for name, number in report["counts"].items())
    where = report["card"] or "no CUDA device"
    lines = [f"{where}: {counts} in {report['seconds']} s"]
    for name, test in report["tests"].items():
        if test["outcome"] == "failed" or test["numbers"]:
            numbers = ", ".join(f"{key} {_short(value)}" for key, value in test["numbers"].items())
            lines.append(f"  {test['outcome']:<8}{name.rpartition('/')[2]}: {numbers}")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
