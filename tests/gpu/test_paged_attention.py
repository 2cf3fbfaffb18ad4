"""The tests' own paged attention kernel against plain torch: both views, holes, any grouping. On a
CUDA device, or in Triton's interpreter in a process that has chosen it."""

from __future__ import annotations

import pytest
import torch

from support.paged_attention import PagedAttention, pages_of, reference, splits_for, store
from support.where import INTERPRETED, KERNEL_DEVICES

SIZE = 16
#: of rows; within a tile, a whole one, several, one token more, and one token
LENGTHS = (5, 16, 70, 33, 1)
pytestmark = pytest.mark.parametrize("device", KERNEL_DEVICES)


def cache_of(order: str, heads: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """`[blocks, heads, tokens, 2 * dim]` with the heads or the tokens outside, and not at the
    storage's start."""
    blocks = sum(-(-length // SIZE) for length in LENGTHS) + 3
    generator = torch.Generator().manual_seed(heads * dim)
    memory = torch.randn(2, blocks, SIZE, heads, 2 * dim, generator=generator).to(dtype).to(device)
    if order == "tokens first":
        return memory[1].transpose(1, 2)
    return memory.transpose(2, 3).contiguous()[1]


def tables_of(
    cache: torch.Tensor, *, page: int
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Page tables and lengths of rows whose blocks lie anywhere; also the slots that they name.
    With pages of one token, only some slots of each block."""
    generator = torch.Generator().manual_seed(7)
    free = torch.randperm(cache.shape[0], generator=generator).tolist()
    slots = []
    between = pages_of(cache)[1]
    tables = torch.zeros(len(LENGTHS), 200, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        taken = [free.pop() for _ in range(-(-length // SIZE))]
        mine = [block * SIZE + offset for block in taken for offset in range(SIZE)][:length]
        if page == 1:
            some = torch.rand(length, generator=generator) < 0.6
            mine = [slot for slot, lives in zip(mine, some, strict=True) if lives] or mine[:1]
            entries = [slot // SIZE * between + slot % SIZE for slot in mine]
        else:
            entries = taken
        tables[row, : len(entries)] = torch.tensor(entries)
        # What is behind the end is never looked at.
        tables[row, len(entries) :] = 1 << 30
        slots.append(mine)
    lengths = torch.tensor([len(each) for each in slots], dtype=torch.int32)
    return tables.to(cache.device), lengths.to(cache.device), slots


# The interpreter's products of bfloat16 are those of its bit patterns.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
CASES = [
    # heads, group, splits, tile
    (1, 1, 1, 16, torch.float32),
    (2, 3, 2, 16, HALF),
    (1, 17, 8, 32, HALF),
]


@pytest.mark.parametrize("page", [16, 1])
@pytest.mark.parametrize("order", ["tokens first", "heads first"])
@pytest.mark.parametrize(("heads", "group", "splits", "tile", "dtype"), CASES)
def test_attention_equals_plain_torch(
    device: str,
    page: int,
    order: str,
    heads: int,
    group: int,
    splits: int,
    tile: int,
    dtype: torch.dtype,
) -> None:
    dim = 16
    cache = cache_of(order, heads, dim, dtype, device)
    tables, lengths, slots = tables_of(cache, page=page)
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), heads * group, dim)
    query = torch.randn(shape, generator=generator).to(dtype).to(device)
    attention = PagedAttention(
        rows=len(LENGTHS),
        heads=heads,
        group=group,
        dim=dim,
        device=device,
        splits=splits,
        tile=tile,
    )
    out = torch.full(shape, float("nan"), dtype=torch.float32, device=device)
    pages = cache if page == 16 else pages_of(cache)[0]
    attention(query, pages, tables, lengths, out)
    for row, mine in enumerate(slots):
        block, offset = (torch.tensor(part, device=device) for part in places(mine))
        expected = reference(query[row], cache[block, :, offset])
        # The weights are rounded to the cache's type before they meet the values.
        bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        assert (out[row] - expected).abs().max() <= bound
        assert not torch.allclose(out[row], reference(query[row], cache[block - 1, :, offset]))


def places(slots: list[int]) -> tuple[list[int], list[int]]:
    return [slot // SIZE for slot in slots], [slot % SIZE for slot in slots]


def test_a_row_without_tokens_is_zeros_and_disturbs_no_other(device: str) -> None:
    cache = cache_of("tokens first", 1, 16, torch.float16, device)
    tables, lengths, slots = tables_of(cache, page=1)
    lengths[2] = 0
    query = torch.ones(len(LENGTHS), 1, 16, dtype=torch.float16, device=device)
    attention = PagedAttention(
        rows=len(LENGTHS), heads=1, group=1, dim=16, device=device, splits=2, tile=16
    )
    out = torch.full((len(LENGTHS), 1, 16), float("nan"), device=device)
    attention(query, pages_of(cache)[0], tables, lengths, out)
    assert not out[2].any()
    block, offset = (torch.tensor(part, device=device) for part in places(slots[3]))
    expected = reference(query[3], cache[block, :, offset])
    assert (out[3] - expected).abs().max() <= 4e-3


@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_new_tokens_are_stored_in_their_slots_and_nowhere_else(device: str, order: str) -> None:
    cache = cache_of(order, 2, 16, torch.float16, device)
    expected = cache.clone()
    new = torch.randn(3, 2, 32, device=device).to(torch.float16)
    for row, slot in ((0, 37), (2, 5)):
        expected[slot // SIZE, :, slot % SIZE] = new[row]
    store(new, cache, torch.tensor([37, -1, 5], device=device))
    assert torch.equal(cache, expected)


def test_splits_fill_the_device_and_stay_long(device: str) -> None:
    assert splits_for(256, 4096, 132) == 8
    assert splits_for(8, 4096, 132) == 16, "four tiles are left for each"
    assert splits_for(8, 100, 132) == 1
    assert splits_for(5000, 4096, 132) == 1
