"""Policies of another package that fail when they are first asked, to see what a user sees then.

They come in by the entry point that any package may use, so nothing of vToken is replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

_SOURCE = """
from vtoken.errors import InvariantViolation
from vtoken.policies import Policy

class Unlawful(Policy):
    name = "unlawful"

    def __init__(self, params, *, stream=0):
        pass

    def victims(self, view):
        raise InvariantViolation(
            "I2", "slot 17 belongs to two tokens", req_id="made up", slot=17, before={"owner": 4}
        )

class Crashing(Unlawful):
    name = "crashing"

    def victims(self, view):
        raise RuntimeError("no idea")
"""
_ENTRY_POINTS = """[vtoken.policies]
unlawful = broken_policies_of_others:Unlawful
crashing = broken_policies_of_others:Crashing
"""

#: how the violation of "unlawful" reads
REPORT = (
    "law I2 is violated: slot 17 belongs to two tokens\n"
    "  request  made up\n"
    "  slot     17\n"
    "  before   {'owner': 4}"
)


def install(folder: Path) -> dict[str, str]:
    """Write the package; returns the environment in which Python finds it."""
    (folder / "broken_policies_of_others.py").write_text(_SOURCE)
    metadata = folder / "broken_policies_of_others-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
