"""A decode step's load on a device's memory: a model's weights and attention over a paged cache.

The proportions are those of a model of 8 billion parameters with 32 layers, in bf16. All layers use
one layer's weights, which are more than a second-level cache holds, so that each is read from
memory like weights of its own. The values mean nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from support.captured import CudaGraph
from support.paged_attention import Launch, PagedAttention, splits_for
from vtoken.core.arrays import IntArray
from vtoken.kv import KVLayout, TokenRowLayout, stack_layers

SIZE, LAYERS, HEADS, GROUP, DIM = 16, 32, 8, 4, 128
HIDDEN, INNER = HEADS * GROUP * DIM, 14336
#: live tokens of a row
CONTEXT = 4096
#: blocks that no row has, where a plan's tokens lie and go
SPARE = 1024
_TOKEN_BYTES = LAYERS * HEADS * 2 * DIM * 2


def rows_that_fit(wanted: int) -> int:
    """As many rows of `CONTEXT` tokens as half the device's free memory holds."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    tokens = free // 2 // _TOKEN_BYTES - SPARE * SIZE
    return max(1, min(wanted, tokens // CONTEXT))


class DecodeLoad:
    """One step over `rows` requests, captured.

    Attributes:
        cache: `[layers, blocks, heads, tokens, content]`.
        layout: of it.
    """

    def __init__(self, *, rows: int) -> None:
        self.rows = rows
        self._blocks = rows * CONTEXT // SIZE
        shape = (LAYERS, self._blocks + SPARE, HEADS, SIZE, 2 * DIM)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self.layout: KVLayout = TokenRowLayout(stack_layers(list(self.cache)))
        sizes = {
            "in": (HIDDEN, HIDDEN + 2 * HEADS * DIM),
            "out": (HIDDEN, HIDDEN),
            "up": (HIDDEN, 2 * INNER),
            "down": (INNER, HIDDEN),
        }
        self._weights = {
            name: torch.randn(size, dtype=torch.bfloat16, device="cuda") / size[0] ** 0.5
            for name, size in sizes.items()
        }
        self._hidden = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self._attention = PagedAttention(
            rows=rows,
            heads=HEADS,
            group=GROUP,
            dim=DIM,
            device="cuda",
            splits=splits_for(rows * HEADS, CONTEXT, processors),
        )
        shuffled = torch.randperm(self._blocks).view(rows, CONTEXT // SIZE)
        self._tables = shuffled.to("cuda", torch.int32)
        self._lengths = torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda")
        self._graph = CudaGraph(self._captured)

    def step(self) -> None:
        self._graph.replay()

    def spare_slots(self, count: int) -> tuple[IntArray, IntArray]:
        """Sources and targets of a plan: scattered tokens of one half of the spare blocks into
        scattered slots of the other."""
        half = SPARE * SIZE // 2
        rng = np.random.default_rng(1)
        first = self._blocks * SIZE
        sources, targets = (
            np.sort(rng.permutation(half)[:count]) + first + side * half for side in (0, 1)
        )
        return sources.astype(np.int32), targets.astype(np.int32)

    def _captured(self, launch: Launch) -> None:
        for layer in range(LAYERS):
            asked = (self._hidden @ self._weights["in"])[:, :HIDDEN]
            query = asked.view(self.rows, HEADS * GROUP, DIM)
            found = torch.empty_like(query, memory_format=torch.contiguous_format)
            self._attention(
                query, self.cache[layer], self._tables, self._lengths, found, launch=launch
            )
            mixed = found.view(self.rows, HIDDEN) @ self._weights["out"]
            gate, up = (mixed @ self._weights["up"]).chunk(2, dim=-1)
            (torch.nn.functional.silu(gate) * up) @ self._weights["down"]
