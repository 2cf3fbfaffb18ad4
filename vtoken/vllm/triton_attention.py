"""vLLM's Triton attention with the page-1 view; imported only where that backend is in use, since
it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vtoken.vllm.pages import pages_of
from vtoken.vllm.scores import tap_of


class VTokenTritonAttentionImpl(TritonAttentionImpl):
    """vLLM's Triton attention, with the page-1 view and the score tap where a step has them."""

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
        pages, tap = pages_of(attn_metadata), tap_of(attn_metadata)
        if pages is not None:
            kv_cache, attn_metadata = pages.views[layer.layer_name], pages.metadata
            pages.uses += 1
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
        if tap is not None:
            tap.hand_over(layer.layer_name, query)
        return output
