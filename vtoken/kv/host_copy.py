"""Copies of tokens within host memory, in one pass: straight from source to target, all layers.

Torch can only gather tokens into a temporary and scatter them from there, at a tenth of the speed
where K is transposed and each element of a token lies in another cache line. Here the loops are
compiled, by Numba, which vLLM's worker needs as well; without it tokens go torch's way.

A call lets go of the interpreter lock, so that a copy stream's thread really runs beside the
computation. Nothing is kept between source and target, so that threads have no workspace to share.
Only targets are stored to: another thread may be writing the other slots of their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from vtoken.core.arrays import IntArray

Words = np.ndarray[Any, Any]

TILE_TOKENS = 256
"""Tokens of which one piece is copied before the next piece: enough of them to keep many cache
misses in flight, few enough that lines which hold their next pieces too are still cached then."""


def host_parts(views: Sequence[torch.Tensor]) -> list[HostPart]:
    """The parts of a cache for copies in host memory; none where that cannot be done here.

    Args:
        views: as `KVLayout.parts` gives them.
    """
    if any(view.device.type != "cpu" for view in views):
        return []
    kernel = compiled_copy()
    return [] if kernel is None else [HostPart(view, kernel) for view in views]


@dataclass(frozen=True)
class PartShape:
    """Where the pieces of a token lie, in words of memory.

    A token has the same pieces in each layer: one per head if its content there is one run, else
    one per element. Words are the widest integers in which all places and lengths are whole, so
    that neither the dtype matters nor which bits there are.

    Attributes:
        word: bytes of a word: 1, 2, 4 or 8.
        block_size: tokens of a block.
        block, token: strides.
        layers, pieces: offsets of each layer, and of each piece within a token; int64.
        length: of a piece.
    """

    word: int
    block_size: int
    block: int
    token: int
    layers: IntArray
    pieces: IntArray
    length: int

    @classmethod
    def of(cls, view: torch.Tensor) -> PartShape:
        """Of a view `[layers, blocks, tokens, heads, content]`, any strides."""
        item = view.element_size()
        layers, _, block_size, heads, content = view.shape
        # In bytes; the stride of a dimension of one entry means nothing.
        strides = [
            stride * item if size > 1 else 0
            for size, stride in zip(view.shape, view.stride(), strict=True)
        ]
        length = item
        if strides[-1] <= item:
            length, content, strides[-1] = content * item, 1, 0
        word = math.gcd(8, view.data_ptr(), length, *strides)
        layer, block, token, head, element = (stride // word for stride in strides)
        pieces = np.add.outer(np.arange(heads) * head, np.arange(content) * element)
        return cls(
            word,
            block_size,
            block,
            token,
            layers=np.arange(layers, dtype=np.int64) * layer,
            pieces=pieces.ravel().astype(np.int64),
            length=length // word,
        )


class HostPart:
    """K, V or both of every token, as words of host memory.

    Args:
        view: `[layers, blocks, tokens, heads, content]` in host memory, any strides.
        kernel: `copy_words`, or that compiled.
    """

    def __init__(self, view: torch.Tensor, kernel: Callable[..., None]) -> None:
        self._kernel = kernel
        shape = PartShape.of(view)
        self._block_size, self._block, self._token = shape.block_size, shape.block, shape.token
        self._words = _bytes_of(view).view(f"u{shape.word}")
        self._layers, self._pieces = _unsigned(shape.layers), _unsigned(shape.pieces)
        self._length = np.uint64(shape.length)

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy `sources` to `targets`, int64 `[n]` each: slots of the cache, which the caller has
        looked after. Targets are distinct and no target is a source."""
        move_from, move_to = self._places(sources), self._places(targets)
        self._kernel(self._words, self._layers, self._pieces, self._length, move_from, move_to)

    def _places(self, slots: IntArray) -> Words:
        block, offset = np.divmod(slots, self._block_size)
        return _unsigned(block * self._block + offset * self._token)


def _bytes_of(view: torch.Tensor) -> Words:
    """The memory from the view's first byte to its last, shared with it; uint8 `[n]`."""
    steps = zip(view.shape, view.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    item = view.element_size()
    memory = torch.empty(0, dtype=torch.uint8)
    memory.set_(view.untyped_storage(), view.storage_offset() * item, (count * item,), (1,))
    return memory.numpy()


def _unsigned(values: IntArray) -> Words:
    """uint64, since the compiled code would look at each signed index whether it is negative."""
    return values.astype(np.uint64)


@cache
def compiled_copy() -> Callable[..., None] | None:
    """`copy_words`, compiled at its first call for each width of a word, within a second or so;
    None without Numba. An engine's start-up probe makes that first call."""
    try:
        from numba import njit
    except ImportError:
        return None
    _answer_for_its_attributes()
    return njit(nogil=True)(copy_words)


def _answer_for_its_attributes() -> None:
    """Let the library object of llvmlite, on which Numba stands, say that it has no attributes.

    It takes every name for one of a C function, `__dict__` too. vLLM's CPU platform reads that of
    each object of each module when an engine starts, and fails on a function in its place; so no
    second engine would start in a process.
    """
    with suppress(ImportError, AttributeError):
        from llvmlite.binding import ffi

        ffi.lib._fntab["__dict__"] = {}  # whatever it may have been taken for until now


def copy_words(
    words: Words, layers: Words, pieces: Words, length: np.uint64, sources: Words, targets: Words
) -> None:
    """Copy each piece of each token in each layer, in the subset of Python that Numba compiles.

    Args:
        words: the memory, `[words]`.
        layers, pieces, sources, targets: where each layer, piece and token begins, in words from
            where the memory, its layer and so on do; uint64 `[n]` each.
        length: words of a piece.
    """
    for first in range(0, len(sources), TILE_TOKENS):
        tile_from = sources[first : first + TILE_TOKENS]
        tile_to = targets[first : first + TILE_TOKENS]
        for layer in layers:
            if length == 1:
                for piece in pieces:
                    start = layer + piece
                    for source, target in zip(tile_from, tile_to):  # noqa: B905
                        words[start + target] = words[start + source]
            else:
                for source, target in zip(tile_from, tile_to):  # noqa: B905
                    for piece in pieces:
                        start = layer + piece
                        for word in range(length):
                            words[start + target + word] = words[start + source + word]
