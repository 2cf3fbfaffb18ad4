"""The report of `make test-gpu`, by running pytest on a small folder of tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.device_report import table

TESTS = Path(__file__).resolve().parents[1]
CONFTEST = """
from pathlib import Path
from support.device_report import DeviceReport

def pytest_configure(config):
    config.pluginmanager.register(DeviceReport(Path("out/report.json")), "report")
"""
SAMPLE = """
import pytest

def test_measures(record_property):
    record_property("ratio", 0.123456)
    record_property("rows", 12)

def test_fails(record_property):
    record_property("ratio", 2.5)
    assert 1 == 2, "not equal"

@pytest.mark.skip(reason="no such card")
def test_skips():
    pass

@pytest.fixture
def broken():
    yield
    raise OSError("at the end")

def test_ends_badly(broken):
    pass

def test_plain():
    pass
"""
SKIPPED_FILE = """
import pytest
pytest.importorskip("no_such_module_anywhere")
"""
BROKEN_FILE = "import no_such_module_anywhere"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report, and what pytest printed."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_sample.py").write_text(SAMPLE, encoding="utf-8")
    (folder / "test_skipped.py").write_text(SKIPPED_FILE, encoding="utf-8")
    (folder / "test_broken.py").write_text(BROKEN_FILE, encoding="utf-8")
    (folder / "out").mkdir()
    (folder / "out" / "report.json").write_text("of an earlier run", encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    return json.loads((folder / "out" / "report.json").read_text(encoding="utf-8")), done.stdout


def test_each_test_has_its_outcome_time_and_numbers(ran: tuple[dict[str, Any], str]) -> None:
    report, _ = ran
    tests = {name.rpartition("::")[2]: test for name, test in report["tests"].items()}
    assert {name: test["outcome"] for name, test in tests.items() if "." not in name} == {
        "test_measures": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_ends_badly": "failed",
        "test_plain": "passed",
    }
    assert tests["test_measures"]["numbers"] == {"ratio": 0.123456, "rows": 12}
    assert tests["test_fails"]["numbers"] == {"ratio": 2.5}
    assert "no such card" in tests["test_skips"]["reason"]
    assert all(test["seconds"] >= 0 for test in tests.values())
    assert report["seconds"] > 0


def test_files_without_tests_to_say_so_are_in_it(ran: tuple[dict[str, Any], str]) -> None:
    report, _ = ran
    files = {name: test for name, test in report["tests"].items() if "::" not in name}
    assert {name: test["outcome"] for name, test in files.items()} == {
        "test_skipped.py": "skipped",
        "test_broken.py": "failed",
    }
    assert all("no_such_module_anywhere" in test["reason"] for test in files.values())
    assert report["counts"] == {"passed": 2, "failed": 3, "skipped": 2}


def test_the_report_names_the_card_or_says_that_there_is_none(
    ran: tuple[dict[str, Any], str],
) -> None:
    report, printed = ran
    assert report["torch"] == torch.__version__
    assert {"triton", "python", "cuda", "vllm", "driver", "compute_capability"} <= report.keys()
    if torch.cuda.is_available():
        assert report["card"] == torch.cuda.get_device_name()
    else:
        assert report["card"] is None
        assert "no CUDA device: 2 passed, 3 failed, 2 skipped" in printed


def test_the_table_has_what_failed_and_what_was_measured(ran: tuple[dict[str, Any], str]) -> None:
    report, printed = ran
    _, *lines = table(report)
    assert lines == [
        "  failed  test_broken.py: ",
        "  passed  test_sample.py::test_measures: ratio 0.1235, rows 12",
        "  failed  test_sample.py::test_fails: ratio 2.5",
        "  failed  test_sample.py::test_ends_badly: ",
    ]
    for line in lines:
        assert line in printed
    assert "written to out/report.json" in printed
