"""The start-up probe: proves that a layout adapter sees what the attention backend writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vtoken.errors import UnsupportedConfiguration
from vtoken.kv.layouts import KVLayout
from vtoken.kv.mover import Mover

#: writes key and value `[n, heads, head_dim]` of one layer to slots (int64 `[n]`)
BackendWrite = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


def probe_layout(layout: KVLayout, write: BackendWrite, blocks: Sequence[int]) -> None:
    """Write known values with the backend's own op and read them back through `layout`.

    Every layer gets different values, at the first, an inner and the last offset of two blocks;
    then the mover relocates them and they are read again. The bytes of both blocks are restored.

    Args:
        write: the backend's KV cache update for layer i.
        blocks: two block ids that no request uses.

    Raises:
        UnsupportedConfiguration: the adapter and the backend disagree.
    """
    size = layout.block_size
    here, there = blocks
    offsets = sorted({0, min(1, size - 1), size // 2, size - 1})
    sources = torch.tensor([here * size + o for o in offsets], device=layout.device)
    # Another order and other offsets, so that a move along one axis only cannot pass.
    targets = torch.tensor(
        [there * size + (o + size // 3 + 1) % size for o in reversed(offsets)],
        device=layout.device,
    )
    saved = [cache[:, [here, there]].clone() for cache in layout.caches]
    try:
        shape = (len(offsets), layout.num_layers, 2, layout.num_heads, layout.head_dim)
        count = int(torch.tensor(shape).prod())
        # Small distinct integers are exact in every floating dtype down to bfloat16.
        marks = (torch.arange(count) * 37 % 251 - 125).reshape(shape)
        expected = marks.to(layout.dtype).to(layout.device)
        for layer in range(layout.num_layers):
            write(layer, expected[:, layer, 0], expected[:, layer, 1], sources)
        _compare(layout, layout.read(sources), expected, "reads back other values than")
        Mover(layout).move(sources, targets)
        _compare(layout, layout.read(targets), expected, "moves other bytes than")
        _compare(layout, layout.read(sources), expected, "damages the source of a move, unlike")
    finally:
        for cache, bytes_before in zip(layout.caches, saved, strict=True):
            cache[:, [here, there]] = bytes_before


def _compare(layout: KVLayout, found: torch.Tensor, expected: torch.Tensor, complaint: str) -> None:
    if not torch.equal(found, expected):
        raise UnsupportedConfiguration(
            f"KV cache layout '{layout.name}' {complaint} what this attention backend wrote "
            f"({layout.dtype}, block {layout.block_size}, {layout.num_heads} KV heads); this "
            "kernel's cache format is unknown to vToken: use --dtype float32 on a CPU, or an "
            "attention backend listed in the README"
        )
