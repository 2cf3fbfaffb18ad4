"""Says on standard error what `make test-gpu` can test with this Python, and on standard output
which Python is to run the tests: this one, or the one named as argument where this one lacks a
package. Exit status 1 where neither will do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NEEDED = ("torch", "triton", "numpy", "pytest")
ASK = "name another with make test-gpu GPU_PYTHON=/path/to/python"


def main() -> int:
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not lacking:
        import torch

        if torch.cuda.is_available():
            say(f"{sys.executable} on {torch.cuda.get_device_name()}")
        else:
            build = "CPU build" if torch.version.cuda is None else "CUDA build"
            say(
                f"the tests that need a device will skip: the torch of {sys.executable} "
                f"({torch.__version__}, {build}) sees no CUDA device; if there is one, {ASK}"
            )
        print(sys.executable)
        return 0
    missing = f"{sys.executable} has no {', '.join(lacking)}"
    other = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if other is not None and other.exists():
        say(
            f"{missing}, so {other} is taken, and the tests that need a device will skip if its "
            f"torch is a CPU build; for a device, {ASK} whose torch sees it"
        )
        print(other)
        return 0
    say(f"{missing}; install what it lacks, or {ASK}")
    return 1


def say(text: str) -> None:
    print(f"test-gpu: {text}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
