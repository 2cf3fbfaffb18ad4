"""What `make test-gpu` says before it begins, and which Python it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

LOOK = Path(__file__).resolve().parents[1] / "gpu" / "look.py"
#: with it, Python knows its own library only
BARE = "-IS"


def look(*options: str, other: Path | None = None) -> subprocess.CompletedProcess[str]:
    arguments = [] if other is None else [str(other)]
    return subprocess.run(
        [sys.executable, *options, str(LOOK), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_python_with_what_it_needs_is_taken_and_told_whether_there_is_a_device() -> None:
    done = look(other=Path("not looked at"))
    assert done.returncode == 0
    assert done.stdout.strip() == sys.executable
    (said,) = done.stderr.splitlines()
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name() in said
    else:
        assert "the tests that need a device will skip" in said
        assert torch.__version__ in said
        assert "GPU_PYTHON=" in said


def test_in_place_of_a_python_without_torch_the_other_is_taken(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.touch()
    done = look(BARE, other=other)
    assert done.returncode == 0
    assert done.stdout.strip() == str(other)
    assert "has no torch, triton, numpy, pytest" in done.stderr


@pytest.mark.parametrize("other", [None, Path("no such python")])
def test_without_either_it_says_what_is_missing(other: Path | None) -> None:
    done = look(BARE, other=other)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "has no torch, triton, numpy, pytest; install what it lacks" in done.stderr
