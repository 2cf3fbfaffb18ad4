"""Where a test of tests/gpu runs: on a CUDA device, or on the CPU as far as it can."""

from __future__ import annotations

import os

import pytest
import torch

#: whether Triton's kernels run in Triton's interpreter in this process
INTERPRETED = (
    os.environ.get("VTOKEN_TEST_ATTENTION") == "triton" or os.environ.get("TRITON_INTERPRET") == "1"
)
if INTERPRETED:
    # Looked at where a kernel is defined, so this module comes before those that define one.
    os.environ["TRITON_INTERPRET"] = "1"


def without_device() -> str | None:
    """Why there is no CUDA device to test on, or None."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    return f"no CUDA device: torch {torch.__version__} finds none"


_REASON = without_device()
on_device = [pytest.mark.gpu, pytest.mark.skipif(_REASON is not None, reason=_REASON or "")]

#: parameters of tests whose kernels are Triton's
KERNEL_DEVICES = [
    pytest.param("cpu", id="interpreter") if INTERPRETED else pytest.param("cuda", marks=on_device)
]
