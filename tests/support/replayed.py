"""Stands in for full CUDA graphs on vLLM's Triton attention: a decode step's attention is given
what a dummy batch was captured with, the very tensors, whatever the step would give it. The graph
is larger than the step, so that some of its rows are padding. As at a replay, no Python of
vToken's runs in the layers.

On Model Runner V2 batches are prepared, captured and dispatched by vLLM's own code, and the forward
pass of the whole model is replayed; on V1 the attention of each layer.
"""

from __future__ import annotations

from contextlib import nullcontext
from inspect import signature
from typing import Any

import pytest
import torch

PADDING = 2


class Replays:
    """How many forward passes of attention have been replayed, and with how many padding rows."""

    def __init__(self) -> None:
        self.count = 0
        self.paddings: set[int] = set()

    def add(self, padding: int) -> None:
        self.count += 1
        self.paddings.add(padding)


def replay_decode_steps(
    runner: Any, patch: pytest.MonkeyPatch, *, most: int, version: str
) -> Replays:
    """Capture, and replay decode steps of `most` requests, or of one less, from then on.

    Args:
        runner: with vToken, `vtoken_always_pages` and `vtoken_captures` on.
        version: of the model runner, "v1" or "v2".
    """
    return {"v1": _by_layer, "v2": _by_model}[version](runner, patch, most + PADDING)


def _by_layer(runner: Any, patch: pytest.MonkeyPatch, largest: int) -> Replays:
    from vtoken.vllm.query_buffers import QueryBuffers
    from vtoken.vllm.triton_attention import TritonAttentionImpl, VTokenTritonAttentionImpl

    eager, stock = VTokenTritonAttentionImpl.forward, TritonAttentionImpl.forward
    arguments = signature(stock)
    captured: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}
    copies: dict[tuple[str, int], QueryBuffers] = {}
    replays = Replays()

    def noting(*args: Any, **named: Any) -> torch.Tensor:
        given = arguments.bind(*args, **named).arguments
        if (metadata := given["attn_metadata"]) is not None:
            key = (given["layer"].layer_name, metadata.num_actual_tokens)
            captured[key] = (given["kv_cache"], metadata)
        return stock(*args, **named)

    hand_over = QueryBuffers.hand_over

    def copying(buffers: QueryBuffers, name: str, query: torch.Tensor) -> None:
        copies[name, len(query)] = buffers
        hand_over(buffers, name, query)

    with pytest.MonkeyPatch.context() as capturing:
        capturing.setattr(TritonAttentionImpl, "forward", noting)
        capturing.setattr(QueryBuffers, "hand_over", copying)
        for size in range(largest - 1, largest + 1):
            runner._dummy_run(size, force_attention=True, uniform_decode=True)

    build = runner._build_attention_metadata

    def padded(*args: Any, **named: Any) -> Any:
        decodes = named.get("num_scheduled_tokens") is not None and named["max_query_len"] == 1
        if decodes and named["num_tokens"] + PADDING >= largest - 1:
            named["num_tokens_padded"] = named["num_tokens"] + PADDING
            named["num_reqs_padded"] = named["num_reqs"] + PADDING
        return build(*args, **named)

    def replay(*args: Any, **named: Any) -> torch.Tensor:
        bound = arguments.bind(*args, **named)
        given = bound.arguments
        metadata, query, output = given["attn_metadata"], given["query"], given["output"]
        if metadata is None or metadata.max_query_len > 1:
            return eager(*args, **named)
        name, size = given["layer"].layer_name, metadata.num_actual_tokens
        if (name, size) not in captured or size == len(query):
            return eager(*args, **named)
        padding = size - len(query)
        replays.add(padding)
        given["kv_cache"], given["attn_metadata"] = captured[name, size]
        given["query"] = torch.cat((query, query.new_zeros(padding, *query.shape[1:])))
        given["output"] = output.new_zeros(size, *output.shape[1:])
        stock(*bound.args, **bound.kwargs)
        copies[name, size].hand_over(name, given["query"])
        return output.copy_(given["output"][: len(query)])

    patch.setattr(runner, "_build_attention_metadata", padded)
    patch.setattr(VTokenTritonAttentionImpl, "forward", replay)
    return replays


def _by_model(runner: Any, patch: pytest.MonkeyPatch, largest: int) -> Replays:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from vtoken.vllm.pages import pages_of

    manager, replays = runner.cudagraph_manager, Replays()
    prepared: dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}

    def forward(size: int) -> Any:
        metadata, slots = prepared[size]
        with (
            torch.inference_mode(),
            set_forward_context(
                metadata,
                runner.vllm_config,
                num_tokens=size,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=slots,
            ),
        ):
            return runner.model(
                input_ids=runner.input_buffers.input_ids[:size],
                positions=runner.input_buffers.positions[:size],
            )

    # vLLM's loop runs a batch of a piecewise graph twice, with one and the same metadata.
    with pytest.MonkeyPatch.context() as capturing, torch.inference_mode():
        piecewise = BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=2, num_reqs=None
        )
        descriptions = {CUDAGraphMode.PIECEWISE: [piecewise]}
        capturing.setattr(manager, "_capture_descs", descriptions)
        capturing.setattr(manager, "run_pw_graph", lambda model, inputs: model(**inputs))
        capturing.setattr(cudagraph_utils, "graph_capture", lambda device: nullcontext())
        manager.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            None,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
        )
        for size in range(largest - 1, largest + 1):
            for _ in range(2 if size == largest else 1):  # warming up, and capturing
                prepared[size] = cudagraph_utils.prepare_inputs_to_capture(
                    size,
                    size,
                    runner.model_state,
                    runner.input_buffers,
                    runner.block_tables,
                    runner.attn_groups,
                    runner.kv_cache_config,
                    full_cudagraph=True,
                    max_query_len=1,
                )
                forward(size)

    def dispatch(num_reqs: int, num_tokens: int, uniform: int | None, *_: Any, **__: Any) -> Any:
        size = num_tokens + PADDING
        if uniform != 1 or size not in prepared:
            return BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs
            )
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=size, uniform_token_count=1
        )

    def run_fullgraph(description: Any) -> Any:
        size = description.num_tokens
        pages = pages_of(next(iter(prepared[size][0].values())))
        assert pages is not None
        uses = pages.uses
        output = forward(size)
        pages.uses = uses  # counted by Python, which a replay does not run
        replays.add(PADDING)
        return output

    patch.setattr(manager, "dispatch", dispatch)
    patch.setattr(manager, "run_fullgraph", run_fullgraph)
    return replays
