"""The mover on a CUDA device: the same bytes as a token-by-token copy. Needs torch, and Triton for
the mover's own kernel."""

from __future__ import annotations

import pytest
import torch

from support.where import on_device
from vtoken.kv import Mover, TokenRowLayout, payload_digests, stack_layers

pytestmark = on_device

LAYERS, BLOCKS, SIZE, DIM = 3, 40, 16, 32


def caches(heads: int, dtype: torch.dtype, order: tuple[int, ...]) -> list[torch.Tensor]:
    """Layers of one allocation, logical `[blocks, heads, tokens, 2 * dim]` in any stride order."""
    logical = (LAYERS, BLOCKS, heads, SIZE, 2 * DIM)
    flat = torch.randn(LAYERS * BLOCKS * heads * SIZE * 2 * DIM, device="cuda").to(dtype)
    memory = flat.view([logical[axis] for axis in order])
    back = [order.index(axis) for axis in range(5)]
    return list(memory.permute(back))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("workspace", [1 << 26, 20_000])
def test_moves_carry_every_byte_of_every_layer(
    heads: int, dtype: torch.dtype, order: tuple[int, ...], workspace: int
) -> None:
    layers = caches(heads, dtype, order)
    layout = TokenRowLayout(stack_layers(layers))
    picked = torch.randperm(BLOCKS * SIZE, device="cuda")[:200]
    sources, targets = picked[:100], picked[100:]
    expected = [layer.clone() for layer in layers]
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for layer in expected:
            row = layer[source // SIZE, :, source % SIZE].clone()
            layer[target // SIZE, :, target % SIZE] = row
    before = payload_digests(layout.read(sources))
    workspace = max(workspace, layout.token_bytes)
    Mover(layout, workspace_bytes=workspace).move(sources, targets)
    assert payload_digests(layout.read(targets)) == before
    for layer, want in zip(layers, expected, strict=True):
        assert torch.equal(layer, want)
