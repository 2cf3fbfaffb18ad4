"""Traces: what happened to the token tables and the pool, as a file that replays.

A trace holds ids, slots and blocks, never text or token values. It is valid when the unchanged
spec accepts every event of it and its state agrees with what was recorded after each.
"""

from vtoken.trace.format import SCHEMA, Header, Record, read_trace, write_trace
from vtoken.trace.recorder import Recorder
from vtoken.trace.replay import Divergence, ReplayResult, replay
from vtoken.trace.shrink import shrink

__all__ = [
    "SCHEMA",
    "Divergence",
    "Header",
    "Record",
    "Recorder",
    "ReplayResult",
    "read_trace",
    "replay",
    "shrink",
    "write_trace",
]
