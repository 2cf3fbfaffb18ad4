"""Payload digests for I1: what "the same K and V bytes in every layer" means, in 16 bytes."""

from __future__ import annotations

from hashlib import blake2b

import torch

DIGEST_BYTES = 16


def payload_digests(payload: torch.Tensor) -> list[bytes]:
    """One digest per token over its K and V in all layers.

    Args:
        payload: `[n, layers, 2, heads, head_dim]` as `KVLayout.read` gives it, any dtype.

    Returns:
        n digests of 16 bytes (BLAKE2b); two tokens have equal digests only if all their bytes
        are equal, NaN payloads and signed zeros included, since bytes are compared, not values.
    """
    tokens = payload.contiguous().cpu().view(torch.uint8).flatten(1).numpy()
    return [blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in tokens]
