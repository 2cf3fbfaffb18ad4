"""Compares the layout that every tensor-parallel rank is about to use (check level 2).

All ranks execute the scheduler's decisions, so their block tables, lengths and slots are the same
in every step. A rank that missed a step or applied one twice would compute with another layout
and give wrong outputs without any error; an eight-byte digest per rank and step finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vtoken.errors import InvariantViolation

MASK = (1 << 64) - 1


def fingerprint_of(arrays: Iterable[np.ndarray]) -> int:
    """64-bit digest of integer arrays, of their values and shapes, whatever their dtype."""
    digest = blake2b(digest_size=8)
    for array in arrays:
        values = np.ascontiguousarray(array, dtype=np.int64)
        digest.update(np.array(values.shape, dtype=np.int64).tobytes())
        digest.update(values.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def compare_ranks(fingerprint: int) -> None:
    """Every rank calls this in the same steps.

    Raises:
        InvariantViolation: L6, on all ranks, if one of them differs.
    """
    group = get_tp_group()
    if group.world_size < 2:
        return
    mine = torch.tensor([fingerprint])
    theirs = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(theirs, mine, group=group.cpu_group)
    found = [int(value) for value in theirs]
    if len(set(found)) > 1:
        raise InvariantViolation(
            law="L6",
            message="tensor-parallel ranks are about to use different layouts "
            f"(digests by rank: {', '.join(hex(value & MASK) for value in found)})",
        )
