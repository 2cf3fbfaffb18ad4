"""The page-1 view: the KV cache seen as pages of one token, for vLLM's Triton attention.

A paged kernel that takes any page size needs no second pass for a row with holes: its block table
becomes the list of its live slots. The kernel, the cache and the bytes in it are the stock ones;
only the strides that it is told differ. A step in which some row has holes uses this view for all
of its rows, since a launch has one page size. A full CUDA graph keeps the strides and addresses
that it was captured with: where vLLM captures such graphs, all steps use this view, whose buffers
stay. Costs O(rows x longest row) per step that uses it, on the device, and nothing in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vtoken.core.arrays import IntArray
from vtoken.errors import InvariantViolation, UnsupportedConfiguration
from vtoken.kv.translation import on_device

_PAGES = "vtoken_pages"
_EAGER = "use --reclaim eager and --no-enable-prefix-caching"
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
            f"a KV cache with strides {tuple(cache.stride())} has no pages of one token; {_EAGER}"
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


class PageBuffers:
    """Memory of page tables and lengths, which keeps its address from one KV cache to the next.

    Args:
        max_rows, max_length: of a batch.
        device: of the KV cache.
    """

    def __init__(self, *, max_rows: int, max_length: int, device: torch.device) -> None:
        shape = (max_rows, max_length + TILE)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)


class PageTables:
    """The page-1 view of a KV cache.

    Args:
        buffers: for its tables.
        caches: each layer's cache by name, `[blocks, heads, tokens, content]`.

    Raises:
        UnsupportedConfiguration: a cache has no pages of one token.
    """

    def __init__(self, buffers: PageBuffers, caches: Mapping[str, torch.Tensor]) -> None:
        found = {name: one_token_pages(cache) for name, cache in caches.items()}
        self._views = {name: view for name, (view, _) in found.items()}
        self.block_size = next(iter(caches.values())).shape[2]
        units = {between for _, between in found.values()}
        if len(units) > 1:
            raise UnsupportedConfiguration(
                f"layers differ in the pages of one token between two blocks ({sorted(units)}); "
                f"{_EAGER}"
            )
        (self.between,) = units
        self.tables, self.lengths = buffers.tables, buffers.lengths

    def fill(self, metadata: Any, rows: Sequence[tuple[int, torch.Tensor]]) -> PageRows:
        """The view of one step: operations on the device, their number the same for any rows.

        Args:
            metadata: of vLLM's Triton backend, lengths in slots.
            rows: (batch row, slots of all its live tokens with the step's chunk last, int64).
        """
        count, width = len(metadata.seq_lens), self.tables.shape[1]
        place = torch.arange(min(metadata.max_seq_len, width - TILE), device=self.tables.device)
        blocks = metadata.block_table[:count, place // self.block_size]
        self.tables[:count, : len(place)] = blocks * self.between + place % self.block_size
        self.lengths[:count] = metadata.seq_lens
        if rows:
            self._fill_rows(rows)
        given = replace(metadata, block_table=self.tables[:count], seq_lens=self.lengths[:count])
        return PageRows(given, self._views)

    def slots(self, rows: PageRows, row: int) -> IntArray:
        """What attention reads of a batch row, from the very tables that it was given; int64 `[k]`.
        The host waits for the device."""
        length = int(rows.metadata.seq_lens[row])
        pages = rows.metadata.block_table[row, :length].cpu().numpy().astype(np.int64)
        blocks, offsets = np.divmod(pages, self.between)
        found: IntArray = blocks * self.block_size + offsets
        return found

    def _fill_rows(self, rows: Sequence[tuple[int, torch.Tensor]]) -> None:
        device, width = self.tables.device, self.tables.shape[1]
        places = np.array([row for row, _ in rows])
        lengths = np.array([len(slots) for _, slots in rows])
        total = int(lengths.sum())
        # Where each row's first page lies in the flat table, less what comes before it in `slots`.
        shifts = places * width - (lengths.cumsum() - lengths)
        slots = torch.cat([slots for _, slots in rows])
        pages = slots // self.block_size * self.between + slots % self.block_size
        index = torch.arange(total, device=device)
        counts = on_device(lengths, device)
        index += on_device(shifts, device).repeat_interleave(counts, output_size=total)
        self.tables.view(-1)[index] = pages.to(torch.int32)
        self.lengths[on_device(places, device)] = counts.to(torch.int32)


def attach_pages(metadata: Any, rows: PageRows) -> None:
    setattr(metadata, _PAGES, rows)


def pages_of(metadata: Any) -> PageRows | None:
    found: PageRows | None = getattr(metadata, _PAGES, None)
    return found


class ViewUse:
    """L6: the view for holes that a step was given was used by every layer, not only prepared.

    A replayed CUDA graph runs no Python that could count. It does what was captured, and that was
    dummy batches, of each of which all layers must have used the view, equally often: warming up
    and capturing may run one batch more than once.

    Args:
        num_layers: of the model on this rank.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._step: Sequence[Any] = ()
        self._replayed = False
        self._dummy: Sequence[Any] = ()
        self._captured, self._faulty = False, False

    def of_step(self, given: Sequence[Any], *, replayed: bool) -> None:
        """Note what a step's metadata were given, with `uses` each; and whether vLLM replays a full
        graph for it."""
        self._step, self._replayed = given, replayed

    def of_dummy(self, given: Sequence[Any]) -> None:
        """The same of a dummy batch, which may be what a graph is captured from."""
        self._fold_dummy()
        self._dummy = given

    def check(self) -> None:
        """Judge the last step, which is over.

        Raises:
            InvariantViolation: L6
        """
        self._fold_dummy()
        given, self._step = self._step, ()
        uses = _uses(given)
        if not given or uses == self._num_layers:
            return
        if self._replayed and uses == 0 and self._captured and not self._faulty:
            return
        raise InvariantViolation(
            law="L6",
            message="a row with holes was attended to without the view for holes",
            before=self._num_layers,
            after=uses,
        )

    def _fold_dummy(self) -> None:
        uses, self._dummy = _uses(self._dummy), ()
        self._captured |= uses > 0
        self._faulty |= uses % self._num_layers != 0


def _uses(given: Sequence[Any]) -> int:
    return sum(rows.uses for rows in given)
