"""The mover on a CUDA device: the same bytes as a token-by-token copy, and how fast. Needs torch,
and Triton for the mover's own kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vtoken.kv import Mover, TokenRowLayout, payload_digests, stack_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

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


def milliseconds(action: Callable[[], object]) -> float:
    """Best of twenty, by the device's clock."""
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


@pytest.mark.parametrize("spread", ["scattered", "whole blocks"])
def test_a_plan_of_4096_tokens_reaches_seven_tenths_of_a_plain_copy(
    spread: str, record_property: Callable[[str, object], None]
) -> None:
    """32 layers of 8 heads of 128, bf16: 0.5 GB of K and V, read and written."""
    blocks = 1024
    cache = torch.zeros(32, blocks, 8, SIZE, 2 * 128, dtype=torch.bfloat16, device="cuda")
    mover, count = Mover(TokenRowLayout(stack_layers(list(cache)))), 4096
    order = torch.arange(blocks * SIZE, device="cuda")
    if spread == "scattered":
        order = torch.randperm(blocks * SIZE, device="cuda")
    sources, targets = order[:count].sort()[0], order[count : 2 * count].sort()[0]
    volume = count * mover.layout.token_bytes
    plain = torch.empty(2, volume // 2, dtype=torch.bfloat16, device="cuda")
    copied = milliseconds(lambda: plain[1].copy_(plain[0]))
    moved = milliseconds(lambda: mover.move(sources, targets))
    record_property("of_a_plain_copy", copied / moved)
    record_property("gigabytes_per_second", 2 * volume / moved / 1e6)
    assert copied / moved >= 0.7
