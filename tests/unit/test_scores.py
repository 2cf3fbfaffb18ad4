"""Attention weights from paged K equal a softmax over the gathered keys, one slot at a time; the
compiled pass equals the plain one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vtoken.kv import TransposedKeyLayout
from vtoken.kv.scores import HostKeys, ScoredRow, fast_row, keys_of, row_weights

BLOCK, DIM = 32, 16
SCALE = DIM**-0.5


def add_plainly(row: ScoredRow, layer: int, weights: torch.Tensor) -> None:
    row.values += weights.sum(0).numpy()
    if row.per_head is not None:
        row.per_head[layer] += weights.numpy()


def drawn(*, heads: int, kv_heads: int, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Queries `[tokens, heads, DIM]` of a batch and a layer's cache of 12 blocks."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((tokens, heads, DIM), generator=generator)
    return query, torch.randn((12, kv_heads, BLOCK, 2 * DIM), generator=generator)


def expected(
    query: torch.Tensor, cache: torch.Tensor, observed: slice, slots: np.ndarray, cap: float
) -> np.ndarray:
    """By head, `[heads, k]`, in fp64, from K as the layout adapter reads it."""
    read = TransposedKeyLayout([cache.unsqueeze(0)]).read(torch.from_numpy(slots.astype(np.int64)))
    keys = read[:, 0, 0].double()  # [k, kv_heads, DIM]
    found = np.zeros((query.shape[1], len(slots)))
    for place, token in enumerate(range(observed.start, observed.stop)):
        seen = len(slots) - (observed.stop - observed.start - 1 - place)
        for head in range(query.shape[1]):
            mine = keys[:seen, head * keys.shape[1] // query.shape[1]]
            logits = mine @ query[token, head].double() * SCALE
            if cap:
                logits = cap * torch.tanh(logits / cap)
            found[head, :seen] += logits.softmax(0).numpy()
    return found


ROWS = {
    "one block": np.arange(32, 64),
    "a part of one": np.arange(64, 69),
    "blocks in any order": np.concatenate([np.arange(320, 352), np.arange(32, 64), [96, 97]]),
    "slots in any order": np.random.default_rng(0).permutation(12 * BLOCK)[:201],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_weights_are_those_of_the_listed_slots_and_no_others(
    name: str, queries: int, heads: tuple[int, int], cap: float
) -> None:
    query, cache = drawn(heads=heads[0], kv_heads=heads[1], tokens=9, seed=queries)
    observed = slice(7 - queries, 7)
    want = expected(query, cache, observed, ROWS[name], cap)
    rows = [ScoredRow.of(observed, ROWS[name], BLOCK, per_head=(3, heads[0])) for _ in range(2)]
    add_plainly(rows[0], 1, row_weights(rows[0], query, keys_of(cache), SCALE, cap))
    fast_row(rows[1], 1, query.numpy(), HostKeys(cache), SCALE, cap)
    for row in rows:
        assert row.per_head is not None
        np.testing.assert_allclose(row.per_head[1], want, atol=1e-6)
        np.testing.assert_allclose(row.values, want.sum(0), atol=2e-6)
        assert not row.per_head[[0, 2]].any()
    wrong = ROWS[name].copy()
    wrong[0] = np.setdiff1d(np.arange(12 * BLOCK), wrong)[0]
    shifted = expected(query, cache, observed, wrong, cap)
    assert np.abs(shifted - want).max() > 1e-3, "the control: one wrong slot shows"


def test_layers_and_calls_add_up() -> None:
    query, cache = drawn(heads=4, kv_heads=2, tokens=3, seed=8)
    slots = ROWS["blocks in any order"]
    row, keys = ScoredRow.of(slice(1, 3), slots, BLOCK), HostKeys(cache)
    for layer in range(5):
        fast_row(row, layer, query.numpy(), keys, SCALE, 0.0)
    assert math.isclose(row.values.sum(), 5 * 4 * 2, rel_tol=1e-5)
    assert row.per_head is None


def test_a_layer_amid_others_is_read_where_it_lies() -> None:
    """vLLM's layers share one allocation; a view of one has gaps and an offset."""
    caches = torch.randn((3, 12, 2, BLOCK, 2 * DIM), generator=torch.Generator().manual_seed(1))
    query, _ = drawn(heads=4, kv_heads=2, tokens=2, seed=2)
    for cache in (caches[1], caches.transpose(0, 1).contiguous().transpose(0, 1)[2]):
        row = ScoredRow.of(slice(0, 2), ROWS["slots in any order"], BLOCK)
        fast_row(row, 0, query.numpy(), HostKeys(cache), SCALE, 0.0)
        want = expected(query, cache, slice(0, 2), ROWS["slots in any order"], 0.0).sum(0)
        np.testing.assert_allclose(row.values, want, atol=2e-6)


def test_a_rank_fills_in_its_own_heads() -> None:
    row = ScoredRow.of(slice(0, 1), ROWS["one block"], BLOCK, per_head=(2, 4), rank=1, ranks=3)
    query, cache = drawn(heads=4, kv_heads=2, tokens=1, seed=3)
    fast_row(row, 1, query.numpy(), HostKeys(cache), SCALE, 0.0)
    assert row.all_heads is not None
    assert row.all_heads.shape == (2, 12, 32)
    assert np.flatnonzero(row.all_heads.any(2)).tolist() == [16, 17, 18, 19]


def test_a_cache_that_is_not_fp32_goes_the_plain_way() -> None:
    query, cache = drawn(heads=4, kv_heads=2, tokens=2, seed=4)
    half = cache.to(torch.bfloat16)
    assert not HostKeys(half).usable
    row = ScoredRow.of(slice(0, 2), ROWS["slots in any order"], BLOCK)
    add_plainly(row, 0, row_weights(row, query.to(torch.bfloat16), keys_of(half), SCALE, 0.0))
    want = expected(query.to(torch.bfloat16), half, slice(0, 2), ROWS["slots in any order"], 0.0)
    np.testing.assert_allclose(row.values, want.sum(0), atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    query, cache = drawn(heads=4, kv_heads=2, tokens=1, seed=5)
    row = ScoredRow.of(slice(0, 1), ROWS["slots in any order"], BLOCK)
    fast_row(row, 0, 1000 * query.numpy(), HostKeys(cache), SCALE, 0.0)
    assert math.isclose(row.values.sum(), 4, rel_tol=1e-6)
    want = expected(1000 * query, cache, slice(0, 1), ROWS["slots in any order"], 0.0).sum(0)
    np.testing.assert_allclose(row.values, want, atol=1e-3)
