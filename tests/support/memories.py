"""KV caches as vLLM allocates them, and the reference for where each element of them lies.

The reference computes addresses in the flat allocation from the formats' descriptions and the
allocation's geometry; it shares no code with the adapters. "vec" is the CPU kernels' format: per
(block, head) first K transposed, `[head_dim, tokens]`, then V, `[tokens, head_dim]`. "rows" is
the GPU backends' format: per token K then V, under whatever strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from vtoken.kv import KVLayout, TokenRowLayout, TransposedKeyLayout, stack_layers

LAYERS, BLOCKS, HEAD_DIM = 3, 5, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLASSES = {"vec": TransposedKeyLayout, "rows": TokenRowLayout}
BITS = {2: torch.int16, 4: torch.int32}
"""By bytes of an element: the integers to compare its bits as."""


@dataclass
class Memory:
    """One allocation with per-layer views as vLLM hands them out.

    `order` names the nesting of the allocation, outermost first: L layers, B blocks, H heads,
    N tokens, C content; `gap` elements lie between two outermost entries. With `separate`, each
    layer is a copy in an allocation of its own. The values are small integers, or with a `seed`
    any bits at all, NaNs of every payload included.
    """

    fmt: str
    heads: int
    tokens: int
    dtype: torch.dtype
    order: str = "LBHNC"
    gap: int = 0
    separate: bool = False
    num_layers: int = LAYERS
    num_blocks: int = BLOCKS
    head_dim: int = HEAD_DIM
    seed: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_blocks, self.heads, self.tokens, 2 * self.head_dim)
        extent = dict(zip("LBHNC", sizes, strict=True))
        self.stride: dict[str, int] = {}
        step = 1
        for axis in reversed(self.order):
            self.stride[axis] = step + (self.gap if axis == self.order[0] else 0)
            step *= extent[axis]
        self.flat = self._values(self.stride[self.order[0]] * extent[self.order[0]] + 7)
        shape = [extent[axis] for axis in "BHNC"]
        strides = [self.stride[axis] for axis in "BHNC"]
        self._views = [
            self.flat.as_strided(shape, strides, 7 + layer * self.stride["L"])
            for layer in range(self.num_layers)
        ]
        self.layers = self._views
        if self.separate:
            self.layers = [
                layer.clone(memory_format=torch.preserve_format) for layer in self.layers
            ]
        self.layout: KVLayout = CLASSES[self.fmt](stack_layers(self.layers))

    def _values(self, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(size if self.seed is None else self.seed)
        if self.seed is None:
            return torch.randint(-99, 99, (size,), generator=generator).to(self.dtype)
        bits = BITS[self.dtype.itemsize]
        limits = torch.iinfo(bits)
        return torch.randint(limits.min, limits.max, (size,), generator=generator, dtype=bits).view(
            self.dtype
        )

    def bits(self) -> torch.Tensor:
        """Every element of the allocation, or of what it would be if the layers lay in it."""
        if self.separate:
            for view, layer in zip(self._views, self.layers, strict=True):
                view.copy_(layer)
        return self.flat.view(BITS[self.dtype.itemsize])

    def address(self, slot: int, layer: int, half: int, head: int, d: int) -> int:
        """Index into the flat allocation of element d of K (half 0) or V (half 1)."""
        block, t = divmod(slot, self.tokens)
        run = 7 + layer * self.stride["L"] + block * self.stride["B"] + head * self.stride["H"]
        if self.fmt == "rows":
            return run + t * self.stride["N"] + (half * self.head_dim + d) * self.stride["C"]
        if half == 0:
            return run + d * self.tokens + t
        return run + self.tokens * self.head_dim + t * self.head_dim + d

    def elements(self, slot: int) -> Iterator[int]:
        for layer, half, head, d in product(
            range(self.num_layers), range(2), range(self.heads), range(self.head_dim)
        ):
            yield self.address(slot, layer, half, head, d)

    def token(self, slot: int) -> torch.Tensor:
        """K and V of one token in all layers, `[layers, 2, heads, head_dim]`."""
        values = self.flat[list(self.elements(slot))]
        return values.reshape(self.num_layers, 2, self.heads, self.head_dim)
