"""Vectorised forms of the laws: true exactly when the spec's predicate yields no breach.

They exist because the obvious forms walk Python objects. A property test holds each of them
equal to its predicate on random views, broken ones included.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vtoken_spec import NO_SLOT, NULL_BLOCK, PoolView, RequestView

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
        blocks.min() <= NULL_BLOCK
        or blocks.max() >= pool.num_blocks
        or len(np.unique(blocks)) != len(blocks)
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
    """I2 across requests: a block with k holders of live slots has at least k references."""
    holders: dict[int, int] = {}
    for request in requests.values():
        slots = np.asarray(request.slots, dtype=np.int64)
        live = np.asarray(request.live, dtype=np.bool_)
        for block in np.unique(slots[live] // pool.block_size).tolist():
            holders[block] = holders.get(block, 0) + 1
    return all(count == 1 or pool.ref_count(block) >= count for block, count in holders.items())


def l5_pool(pool: PoolView, requests: Mapping[str, RequestView]) -> bool:
    """L5: every block in one place, and the references agree."""
    owners = np.zeros(pool.num_blocks, dtype=np.int64)
    for request in requests.values():
        owners[np.unique(np.asarray(request.blocks, dtype=np.int64))] += 1
    places = (owners > 0).astype(np.int64)
    for group in (pool.free, pool.headroom, pool.held):
        np.add.at(places, np.asarray(list(group), dtype=np.int64), 1)
    if places[NULL_BLOCK] != 0 or not (places[1:] == 1).all():
        return False
    if any(pool.ref_count(b) < owners[b] for b in np.flatnonzero(owners).tolist()):
        return False
    return all(pool.ref_count(int(b)) == 0 for b in pool.free)


def l6_reads(slots: Ints, live: npt.NDArray[np.bool_], reads: Ints, queries: Ints) -> bool:
    """L6: `reads` are the live slots once each; a chunk is read last and in order."""
    expected = slots[live]
    if len(expected) != len(reads) or not np.array_equal(np.sort(expected), np.sort(reads)):
        return False
    count = len(queries)
    if not np.array_equal(queries, np.arange(len(slots) - count, len(slots))):
        return False
    return count <= 1 or np.array_equal(reads[-count:], slots[-count:])
