"""What is collected in a process of its own."""

from __future__ import annotations

from support.engines import ATTENTION

collect_ignore = [] if ATTENTION == "triton" else ["test_triton_copy.py"]
