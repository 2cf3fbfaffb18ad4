"""Copies of tokens within a device's memory: one launch for all layers of a part of the cache.

Each program carries one token in one layer straight from source to target, so that nothing lies in
between and no workspace is needed. The cache is seen as words, as in host memory (`host_copy.py`):
the widest integers in which all places and lengths are whole; where they are whole in pairs of 8
bytes, an access takes 16. Any layout adapter will do, as a part says itself where its pieces lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vtoken.kv.host_copy import PartShape

#: most words that one round of a program's loop holds
ROUND_WORDS = 1024


@triton.jit
def copy_tokens(  # type: ignore[no-untyped-def]
    words,
    sources,
    targets,
    layers,
    pieces,
    num_pieces,
    block_size,
    block_stride,
    token_stride,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROUND: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Program (move, layer); offsets in words."""
    move = tl.program_id(0)
    layer = tl.load(layers + tl.program_id(1))
    source = tl.load(sources + move)
    target = tl.load(targets + move)
    move_from = layer + source // block_size * block_stride + source % block_size * token_stride
    move_to = layer + target // block_size * block_stride + target % block_size * token_stride
    if PAIRED:
        move_from = tl.multiple_of(move_from, 2)
        move_to = tl.multiple_of(move_to, 2)
    within = tl.arange(0, PADDED)
    for first in range(0, num_pieces, ROUND):
        index = first + tl.arange(0, ROUND)
        piece = tl.load(pieces + index, mask=index < num_pieces, other=0)
        place = piece[:, None] + within[None, :]
        mask = (index < num_pieces)[:, None] & (within < LENGTH)[None, :]
        if PAIRED:
            place = tl.max_contiguous(tl.multiple_of(place, (1, 2)), (1, 2))
        value = tl.load(words + move_from + place, mask=mask)
        tl.store(words + move_to + place, value, mask=mask)


class DevicePart:
    """K, V or both of every token, as words of a device's memory.

    Args:
        view: `[layers, blocks, tokens, heads, content]`, any strides.
    """

    def __init__(self, view: torch.Tensor) -> None:
        shape = PartShape.of(view)
        self._shape = shape
        dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[shape.word]
        storage = view.untyped_storage()
        self._words = torch.empty(0, dtype=dtype, device=view.device).set_(storage)
        # Relative to the storage, not to the view.
        start = (view.data_ptr() - storage.data_ptr()) // shape.word
        self._layers = torch.from_numpy(shape.layers + start).to(view.device)
        self._pieces = torch.from_numpy(shape.pieces).to(view.device)
        self._padded = triton.next_power_of_2(shape.length)
        all_pieces = triton.next_power_of_2(len(shape.pieces))
        self._round = max(1, min(ROUND_WORDS // self._padded, all_pieces))
        places = [*shape.layers + start, *shape.pieces, shape.block, shape.token, shape.length]
        self._paired = shape.word == 8 and all(int(place) % 2 == 0 for place in places)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy `sources` to `targets`, int64 `[n]` each on the device, in the current stream: slots
        of the cache. Targets are distinct and no target is a source."""
        shape = self._shape
        copy_tokens[(len(sources), len(self._layers))](
            self._words,
            sources,
            targets,
            self._layers,
            self._pieces,
            len(self._pieces),
            shape.block_size,
            shape.block,
            shape.token,
            LENGTH=shape.length,
            PADDED=self._padded,
            ROUND=self._round,
            PAIRED=self._paired,
        )
