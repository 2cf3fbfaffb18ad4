"""Paged decode attention in Triton, for tests that need a kernel whose page size is free.

One query per row; grouped heads; the cache as pages of any number of tokens, of which the page
table names those to read. A row's tokens are shared out among programs, each of which goes through
its own with an online softmax, and a second kernel joins what they found. Page size 16 is the dense
view, page size 1 the view for holes: the same code, so that a difference in time is the layout's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import support.where  # noqa: F401  # chooses the interpreter, before there is a kernel

Launch = Callable[..., None]
"""`launch(kernel, grid, *arguments, **constants)`"""


def launch_now(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants)


@triton.jit
def attend_split(
    query,
    cache,
    tables,
    lengths,
    partial,
    logarithms,
    scale,
    query_row,
    query_head,
    table_row,
    cache_page,
    cache_head,
    cache_token,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (row, KV head, split): all query heads of the group over a share of the tokens."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    first = split * share
    last = tl.minimum(first + share, length)
    member = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, DIM)
    query_at = query + row * query_row + (head * GROUP + member) * query_head
    asked = tl.load(query_at[:, None] + dim[None, :], mask=(member < GROUP)[:, None], other=0.0)
    best = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    gathered = tl.zeros([PADDED_GROUP, DIM], tl.float32)
    of_head = cache + head * cache_head
    for start in range(first, last, TILE):
        place = start + tl.arange(0, TILE)
        here = place < last
        page = tl.load(tables + row * table_row + place // PAGE, mask=here, other=0)
        token = page.to(tl.int64) * cache_page + place % PAGE * cache_token
        keys_at = of_head + token[:, None] + dim[None, :]
        keys = tl.load(keys_at, mask=here[:, None], other=0.0)
        values = tl.load(keys_at + DIM, mask=here[:, None], other=0.0)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(here[None, :], scores, float("-inf"))
        # Never minus infinity: a tile has at least one token.
        largest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        shrink = tl.exp2(best - largest)
        total = total * shrink + tl.sum(weights, 1)
        seen = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        gathered = gathered * shrink[:, None] + seen
        best = largest
    found = total > 0
    divisor = tl.where(found, total, 1.0)
    heads = tl.num_programs(1) * GROUP
    out = (row * heads + head * GROUP + member) * SPLITS + split
    mine = member < GROUP
    logarithm = tl.where(found, best + tl.log2(divisor), float("-inf"))
    tl.store(logarithms + out, logarithm, mask=mine)
    average = gathered / divisor[:, None]
    tl.store(partial + out[:, None] * DIM + dim[None, :], average, mask=mine[:, None])


@triton.jit
def join_splits(
    partial, logarithms, out, out_row, out_head, DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """Program (row, query head): the splits' averages, each by its share of the softmax's sum. A
    row without tokens gets zeros."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    at = (row * tl.num_programs(1) + head) * SPLITS + split
    logarithm = tl.load(logarithms + at)
    largest = tl.max(logarithm, 0)
    some = largest > float("-inf")
    weights = tl.where(some, tl.exp2(logarithm - tl.where(some, largest, 0.0)), 0.0)
    averages = tl.load(partial + at[:, None] * DIM + dim[None, :])
    total = tl.where(some, tl.sum(weights, 0), 1.0)
    value = tl.sum(weights[:, None] * averages, 0) / total
    tl.store(out + row * out_row + head * out_head + dim, value)


@triton.jit
def store_tokens(
    new,
    cache,
    slots,
    new_row,
    new_head,
    cache_block,
    cache_head,
    cache_token,
    SIZE: tl.constexpr,
    CONTENT: tl.constexpr,
):
    """Program (row, KV head): the row's new K and V into its slot; none where that is negative."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    content = tl.arange(0, CONTENT)
    if slot >= 0:
        value = tl.load(new + row * new_row + head * new_head + content)
        place = slot // SIZE * cache_block + slot % SIZE * cache_token + head * cache_head
        tl.store(cache + place + content, value)


def pages_of(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The page-1 view: a cache `[blocks, heads, tokens, content]` as `[pages, heads, 1, content]`,
    and how many pages lie between two blocks. The token at offset t of block b is page
    `b * between + t`."""
    blocks, heads, tokens, content = cache.shape
    block, head, token, element = cache.stride()
    between, rest = divmod(block, token)
    assert rest == 0, "a token's stride divides a block's"
    shape = ((blocks - 1) * between + tokens, heads, 1, content)
    return cache.as_strided(shape, (token, head, token, element), cache.storage_offset()), between


class PagedAttention:
    """Decode attention of a batch, over caches of one shape.

    Args:
        rows: of the batch.
        heads, group: KV heads, and query heads for each.
        dim: a power of two, as Triton's ranges are.
        splits: programs among which a row's tokens are shared out; a power of two.
        tile: tokens that a program reads at a time.
    """

    def __init__(
        self,
        *,
        rows: int,
        heads: int,
        group: int,
        dim: int,
        device: torch.device | str,
        splits: int = 1,
        tile: int = 64,
    ) -> None:
        self.rows, self.heads, self.group, self.dim = rows, heads, group, dim
        self.splits, self.tile = splits, tile
        shape = (rows, heads * group, splits)
        self._partial = torch.zeros((*shape, dim), dtype=torch.float32, device=device)
        self._logarithms = torch.zeros(shape, dtype=torch.float32, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        *,
        launch: Launch = launch_now,
    ) -> None:
        """Attend.

        Args:
            query, out: `[rows, query heads, dim]`.
            pages: `[pages, heads, page size, 2 * dim]`, K then V, elements next to each other.
            tables: int32 `[rows, pages of the longest row]`.
            lengths: tokens of each row, int32 `[rows]`.
            launch: what starts a kernel, or writes down that it was started.
        """
        launch(
            attend_split,
            (self.rows, self.heads, self.splits),
            query,
            pages,
            tables,
            lengths,
            self._partial,
            self._logarithms,
            math.log2(math.e) / math.sqrt(self.dim),
            query.stride(0),
            query.stride(1),
            tables.stride(0),
            pages.stride(0),
            pages.stride(1),
            pages.stride(2),
            GROUP=self.group,
            PADDED_GROUP=max(16, triton.next_power_of_2(self.group)),
            DIM=self.dim,
            PAGE=pages.shape[2],
            TILE=self.tile,
            SPLITS=self.splits,
            num_warps=4,
            num_stages=3,
        )
        launch(
            join_splits,
            (self.rows, self.heads * self.group),
            self._partial,
            self._logarithms,
            out,
            out.stride(0),
            out.stride(1),
            DIM=self.dim,
            SPLITS=self.splits,
        )


def store(
    new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *, launch: Launch = launch_now
) -> None:
    """Write each row's new token.

    Args:
        new: `[rows, heads, 2 * dim]`.
        cache: `[blocks, heads, tokens, 2 * dim]`.
        slots: int64 `[rows]`; negative for none.
    """
    launch(
        store_tokens,
        (new.shape[0], new.shape[1]),
        new,
        cache,
        slots,
        new.stride(0),
        new.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        SIZE=cache.shape[2],
        CONTENT=cache.shape[3],
    )


def splits_for(programs: int, longest: int, processors: int, *, tile: int = 64) -> int:
    """Splits with which `programs` rows and heads keep all processors busy, with at least four
    tiles each."""
    splits = 1
    while splits * programs < 8 * processors and 2 * splits * 4 * tile <= longest:
        splits *= 2
    return splits


def reference(query: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
    """One row in plain torch, fp32.

    Args:
        query: `[query heads, dim]`.
        keys_values: `[tokens, heads, 2 * dim]`.

    Returns:
        `[query heads, dim]`.
    """
    keys, values = keys_values.float().chunk(2, dim=-1)
    heads, dim = keys.shape[1:]
    grouped = query.float().view(heads, -1, dim)
    scores = torch.einsum("hgd,thd->hgt", grouped, keys) / math.sqrt(dim)
    found = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values)
    return found.reshape(query.shape)
