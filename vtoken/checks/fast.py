"""Vectorised forms of the laws: true exactly when the spec's predicate yields no breach.

They exist because the obvious forms walk Python objects. A property test holds each of them
equal to its predicate on random views, broken ones included.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vtoken_spec import NO_SLOT, PoolView, RequestView

Ints = npt.NDArray[np.integer]


def i2_request(pool: PoolView, request: RequestView) -> bool:
    """I2 within one request (the spec's parts but the one across requests)."""
    slots = np.asarray(request.slots, dtype=np.int64)
    live = np.asarray(request.live, dtype=np.bool_)
    blocks = np.asarray(request.blocks, dtype=np.int64)
    if not (request.logical_len == len(slots) == len(live)):
        return False
    if not 0 <= request.physical_len <= len(blocks) * pool.block_size:
        return False
    if len(blocks) and (
        blocks.min() < 0 or blocks.max() >= pool.num_blocks or len(np.unique(blocks)) != len(blocks)
    ):
        return False
    placed = slots[slots != NO_SLOT]
    if np.count_nonzero(live & (slots == NO_SLOT)):
        return False
    if len(placed) == 0:
        return True
    if placed.min() < 0 or placed.max() >= pool.num_blocks * pool.block_size:
        return False
    index = np.full(pool.num_blocks, -1, dtype=np.int64)
    index[blocks] = np.arange(len(blocks))
    where = index[placed // pool.block_size]
    if (where < 0).any():
        return False
    positions = where * pool.block_size + placed % pool.block_size
    if positions.max() >= request.physical_len:
        return False
    return len(np.unique(placed)) == len(placed)


def i2_across(pool: PoolView, requests: Mapping[str, RequestView]) -> bool:
    """I2 across requests: a slot held by several is one logical id, with a reference for each."""
    slots, tokens = [], []
    for request in requests.values():
        held = np.asarray(request.slots, dtype=np.int64)
        placed = np.flatnonzero((held >= 0) & (held < pool.num_blocks * pool.block_size))
        own, first = np.unique(held[placed], return_index=True)
        slots.append(own)
        tokens.append(placed[first])
    if not slots:
        return True
    token = np.concatenate(tokens)
    slot, which, holders = np.unique(np.concatenate(slots), return_inverse=True, return_counts=True)
    shared = holders > 1
    if not shared.any():
        return True
    lowest = np.full(len(slot), len(token) + int(token.max()))
    highest = np.full(len(slot), -1)
    np.minimum.at(lowest, which, token)
    np.maximum.at(highest, which, token)
    if (lowest[shared] != highest[shared]).any():
        return False
    blocks, counts = (slot[shared] // pool.block_size).tolist(), holders[shared].tolist()
    needed = set(zip(blocks, counts, strict=True))
    return all(pool.ref_count(block) >= count for block, count in needed)


def l5_pool(pool: PoolView, requests: Mapping[str, RequestView]) -> bool:
    """L5: every block in one place, and the references agree."""
    lists = [np.unique(np.asarray(request.blocks, dtype=np.int64)) for request in requests.values()]
    groups = [np.asarray(list(g), dtype=np.int64) for g in (pool.free, pool.headroom, pool.held)]
    for blocks in (*lists, *groups):
        if len(blocks) and not (blocks.min() > 0 and blocks.max() < pool.num_blocks):
            return False
    owners = np.zeros(pool.num_blocks, dtype=np.int64)
    for blocks in lists:
        owners[blocks] += 1
    places = (owners > 0).astype(np.int64)
    for blocks in groups:
        np.add.at(places, blocks, 1)
    if not (places[1:] == 1).all():
        return False
    if any(pool.ref_count(b) < owners[b] for b in np.flatnonzero(owners).tolist()):
        return False
    return all(pool.ref_count(b) == 0 for b in groups[0].tolist())


def l6_reads(slots: Ints, live: npt.NDArray[np.bool_], reads: Ints, queries: Ints) -> bool:
    """L6: `reads` are the live slots once each; a chunk is read last and in order."""
    if not np.array_equal(np.unique(slots[live]), np.sort(reads)):
        return False
    count = len(queries)
    if not np.array_equal(queries, np.arange(len(slots) - count, len(slots))):
        return False
    return count <= 1 or np.array_equal(reads[-count:], slots[-count:])
