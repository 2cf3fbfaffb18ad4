"""Attention backend with the gather view and the score tap, for vLLM's CPU kernels.

A row with holes cannot be given to a kernel that reads full blocks: a dead token would be seen.
So the unmodified kernel runs for the whole batch, then, for those rows only, the live K and V
are gathered into scratch blocks and the same kernel runs on them; its result replaces the
row's. Costs O(live) per layer and step for such rows and nothing for the others.

The layer's query goes to the score tap where a step has one (`scores.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vtoken.errors import UnsupportedConfiguration
from vtoken.kv import KVLayout, TransposedKeyLayout
from vtoken.vllm.scores import tap_of
from vtoken.vllm.views import capability_of

_GATHER = "vtoken_gather"


@dataclass
class GatherRows:
    """The rows with holes of one step.

    Attributes:
        tokens: their query tokens in the batch, int64 `[q]`.
        sources: slots of their live tokens, row after row, each row's chunk last; int64 `[k]`.
        targets: where those lie in the scratch blocks, int64 `[k]`.
        metadata: attention metadata of these rows over the scratch blocks.
        scratch: one layer's blocks, `[n, heads, tokens, content]`, used by all layers in turn.
    """

    tokens: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    metadata: CPUAttentionMetadata
    scratch: torch.Tensor
    #: layers that have used it, counted by the second pass itself
    uses: int = 0


class VTokenCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, plus the second pass for rows with holes and the score tap."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        super().forward(
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
        rows: GatherRows | None = getattr(attn_metadata, _GATHER, None)
        if rows is not None:
            cache = TransposedKeyLayout([kv_cache.unsqueeze(0)])
            scratch = TransposedKeyLayout([rows.scratch.unsqueeze(0)])
            scratch.write(rows.targets, cache.read(rows.sources))
            picked = query[rows.tokens]
            result = torch.empty_like(picked, memory_format=torch.contiguous_format)
            super().forward(layer, picked, key, value, rows.scratch, rows.metadata, result)
            output[rows.tokens] = result.view_as(output[rows.tokens])
            rows.uses += 1
        tap = tap_of(attn_metadata)
        if tap is not None:
            tap.hand_over(layer.layer_name, query)
        return output


def adopt_attention(layers: Sequence[Any], backend: str) -> None:
    """Give attention layers the view for rows with holes, where their backend has one.

    The finished objects change their class, which adds behaviour and no state. Registering a
    backend instead would miss layers when another engine of this process made vLLM remember
    its own choice, and would reach into engines that have nothing to do with vToken.

    Args:
        backend: vLLM's name of it.

    Raises:
        UnsupportedConfiguration: a layer's attention is not what the backend's name says.
    """
    if capability_of(backend).with_holes is None:
        return
    stock, ours = _adopted(backend)
    for layer in layers:
        if type(layer.impl) is stock:
            layer.impl.__class__ = ours
        elif type(layer.impl) is not ours:
            raise UnsupportedConfiguration(
                f"attention is {type(layer.impl).__name__}, which vToken has no view for; "
                f"use vLLM's own {backend} backend"
            )


def _adopted(backend: str) -> tuple[type, type]:
    if backend == "CPU_ATTN":
        return CPUAttentionBackendImpl, VTokenCPUAttentionImpl
    from vtoken.vllm.triton_attention import TritonAttentionImpl, VTokenTritonAttentionImpl

    return TritonAttentionImpl, VTokenTritonAttentionImpl


class GatherScratch:
    """Scratch blocks for the gather view, kept between steps and grown when a step needs more.

    Args:
        layout: the KV cache; scratch blocks have its block size, heads and dtype.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._blocks = torch.empty(0)

    @property
    def num_blocks(self) -> int:
        return int(self._blocks.shape[0])

    def blocks(self, count: int) -> torch.Tensor:
        """At least `count` scratch blocks of one layer, zero-filled when new."""
        if self._blocks.dim() < 4 or self._blocks.shape[0] < count:
            layout = self._layout
            shape = (count, layout.num_heads, layout.block_size, 2 * layout.head_dim)
            # Zeros, not garbage: kernels may load (and mask) slots past the sequence's end.
            self._blocks = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
        return self._blocks


def gather_rows(
    query_start_loc: torch.Tensor,
    builder: CPUAttentionMetadataBuilder,
    rows: list[tuple[int, torch.Tensor]],
    scratch: GatherScratch,
    block_size: int,
) -> GatherRows:
    """Plan the second pass.

    Args:
        query_start_loc: first query token of each batch row, int32 on the CPU.
        builder: the attention group's own builder.
        rows: (batch row, slots of all its live tokens with the step's chunk last, int64) each.
    """
    starts = query_start_loc.tolist()
    tokens, targets, lengths, queries, tables = [], [], [], [], []
    first_block = 0
    for row, slots in rows:
        tokens.append(torch.arange(starts[row], starts[row + 1]))
        count = -(-len(slots) // block_size)
        targets.append(torch.arange(len(slots)) + first_block * block_size)
        tables.append(torch.arange(first_block, first_block + count, dtype=torch.int32))
        lengths.append(len(slots))
        queries.append(starts[row + 1] - starts[row])
        first_block += count
    block_table = torch.zeros((len(rows), max(len(t) for t in tables)), dtype=torch.int32)
    for i, table in enumerate(tables):
        block_table[i, : len(table)] = table
    query_start = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    total = int(query_start[-1])
    metadata = builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=query_start,
            query_start_loc_cpu=query_start,
            seq_lens=seq_lens,
            num_reqs=len(rows),
            num_actual_tokens=total,
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            block_table_tensor=block_table,
            slot_mapping=torch.empty(0, dtype=torch.int64),  # nothing is written in this pass
            causal=True,
        ),
    )
    return GatherRows(
        tokens=torch.cat(tokens),
        sources=torch.cat([slots for _, slots in rows]),
        targets=torch.cat(targets),
        metadata=metadata,
        scratch=scratch.blocks(first_block),
    )


def attach_rows(metadata: CPUAttentionMetadata, rows: GatherRows) -> None:
    setattr(metadata, _GATHER, rows)
