"""KV entries as bytes: cache layouts, the mover, payload digests, the start-up probe."""

from vtoken.kv.digests import payload_digests
from vtoken.kv.layouts import KVLayout, TokenRowLayout, TransposedKeyLayout, stack_layers
from vtoken.kv.mover import Mover
from vtoken.kv.probe import probe_layout

__all__ = [
    "KVLayout",
    "Mover",
    "TokenRowLayout",
    "TransposedKeyLayout",
    "payload_digests",
    "probe_layout",
    "stack_layers",
]
