"""The page-1 view: the KV cache seen as pages of one token, for vLLM's Triton attention.

A paged kernel that takes any page size needs no second pass for a row with holes: its block table
becomes the list of its live slots. The kernel, the cache and the bytes in it are the stock ones;
only the strides that it is told differ. A step in which some row has holes uses this view for all
of its rows, since a launch has one page size. Costs O(rows x longest row) per such step for the
tables, on the device, and nothing in other steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vtoken.errors import UnsupportedConfiguration

_PAGES = "vtoken_pages"
#: entries of a row that the kernel may load beyond its end, and ignores: its largest tile
TILE = 128


def one_token_pages(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A layer's cache as pages of one token, and how many pages lie between two blocks.

    The token at offset t of block b is page `b * between + t`, in any order of heads and tokens in
    which a token's stride divides a block's.

    Args:
        cache: `[blocks, heads, tokens, content]`, any strides.

    Returns:
        A view `[pages, heads, 1, content]` of the same memory, whose pages may overlap; and the
        number of pages.

    Raises:
        UnsupportedConfiguration: the strides have no such unit.
    """
    blocks, heads, tokens, content = cache.shape
    block, head, token, element = cache.stride()
    if block % token:
        raise UnsupportedConfiguration(
            f"a KV cache with strides {tuple(cache.stride())} has no pages of one token; use "
            "--reclaim eager and --no-enable-prefix-caching"
        )
    between = block // token
    pages = cache.as_strided(
        ((blocks - 1) * between + tokens, heads, 1, content),
        (token, head, token, element),
        cache.storage_offset(),
    )
    return pages, between


@dataclass
class PageRows:
    """What a step's layers are given in place of their own metadata and cache.

    Attributes:
        metadata: page tables and lengths of all rows.
        views: each layer's cache as pages.
    """

    metadata: Any
    views: Mapping[str, torch.Tensor]
    #: layers that have used it
    uses: int = 0


class PageTables:
    """Page tables and lengths in buffers that keep their address.

    Args:
        caches: each layer's cache by name, `[blocks, heads, tokens, content]`.
        max_rows, max_length: of a batch.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], *, max_rows: int, max_length: int
    ) -> None:
        found = {name: one_token_pages(cache) for name, cache in caches.items()}
        self._views = {name: view for name, (view, _) in found.items()}
        first = next(iter(caches.values()))
        self.block_size = first.shape[2]
        (self.between,) = {between for _, between in found.values()}
        self.tables = torch.zeros(
            (max_rows, max_length + TILE), dtype=torch.int32, device=first.device
        )
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=first.device)

    def fill(self, metadata: Any, rows: Sequence[tuple[int, torch.Tensor]]) -> PageRows:
        """The view of one step.

        Args:
            metadata: of vLLM's Triton backend, lengths in slots.
            rows: (batch row, slots of all its live tokens with the step's chunk last, int64).
        """
        count = len(metadata.seq_lens)
        longest = min(metadata.max_seq_len, self.tables.shape[1] - TILE)
        place = torch.arange(longest, device=self.tables.device)
        blocks = metadata.block_table[:count, place // self.block_size]
        self.tables[:count, :longest] = blocks * self.between + place % self.block_size
        self.lengths[:count] = metadata.seq_lens
        for row, slots in rows:
            pages = slots // self.block_size * self.between + slots % self.block_size
            self.tables[row, : len(pages)] = pages.to(torch.int32)
            self.lengths[row] = len(pages)
        given = replace(metadata, block_table=self.tables[:count], seq_lens=self.lengths[:count])
        return PageRows(given, self._views)


class VTokenTritonAttentionImpl(TritonAttentionImpl):
    """vLLM's Triton attention, which takes the page-1 view where a step has one."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pages: PageRows | None = getattr(attn_metadata, _PAGES, None)
        if pages is not None:
            kv_cache, attn_metadata = pages.views[layer.layer_name], pages.metadata
            pages.uses += 1
        return super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )


def attach_pages(metadata: Any, rows: PageRows) -> None:
    setattr(metadata, _PAGES, rows)
