"""The device's copies against a token-by-token reference, in Triton's interpreter.

Collected only with `VTOKEN_TEST_ATTENTION=triton`, in a process that has chosen the interpreter, as
`make test` does; tests/gpu has the same on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from support import engines
from vtoken.kv import KVLayout, TokenRowLayout, TransposedKeyLayout, stack_layers

assert engines.ATTENTION == "triton"

from vtoken.kv.triton_copy import DevicePart  # noqa: E402

LAYERS, BLOCKS, DIM = 3, 5, 8
#: orders of (layers, blocks, heads, tokens, content) in memory
ORDERS = {"LBHN": (0, 1, 2, 3, 4), "LBNH": (0, 1, 3, 2, 4), "BLHN": (1, 0, 2, 3, 4)}
Make = Callable[[list[torch.Tensor]], KVLayout]


def layers_of(
    order: str, heads: int, size: int, dtype: torch.dtype, dim: int = DIM
) -> list[torch.Tensor]:
    """Layers of one allocation, logical `[blocks, heads, tokens, 2 * dim]`."""
    logical = (LAYERS, BLOCKS, heads, size, 2 * dim)
    axes = ORDERS[order]
    generator = torch.Generator().manual_seed(heads * size)
    flat = torch.randn(logical, generator=generator).to(dtype).flatten()
    memory = flat.view([logical[axis] for axis in axes])
    return list(memory.permute([axes.index(axis) for axis in range(5)]))


CASES = [
    (TokenRowLayout, order, heads, size, dtype)
    for order, heads, size, dtype in product(
        ORDERS, (1, 2, 3), (16, 32), (torch.float32, torch.bfloat16, torch.float16)
    )
] + [
    (TransposedKeyLayout, "LBHN", heads, 32, dtype)
    for heads, dtype in product((1, 3), (torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("make", "order", "heads", "size", "dtype"), CASES)
def test_every_byte_of_every_layer_and_no_other(
    make: Make, order: str, heads: int, size: int, dtype: torch.dtype
) -> None:
    layers = layers_of(order, heads, size, dtype)
    expected = [layer.clone(memory_format=torch.preserve_format) for layer in layers]
    picked = torch.randperm(BLOCKS * size, generator=torch.Generator().manual_seed(1))[:30]
    sources, targets = picked[:15], picked[15:]
    # One token at a time through the adapter itself, on a copy.
    reference = make(stack_layers([layer.clone() for layer in layers]))
    for source, target in zip(sources.split(1), targets.split(1), strict=True):
        reference.write(target, reference.read(source))
    layout = make(stack_layers(layers))
    for view in layout.parts():
        DevicePart(view).copy(sources, targets)
    every = torch.arange(BLOCKS * size)
    assert torch.equal(layout.read(every), reference.read(every))
    assert not all(torch.equal(*pair) for pair in zip(layers, expected, strict=True))


def test_sixteen_bytes_at_a_time_where_the_layout_allows() -> None:
    paired = {
        (order, heads, dim): DevicePart(
            TokenRowLayout(stack_layers(layers_of(order, heads, 16, torch.bfloat16, dim))).parts()[
                0
            ]
        )._paired
        for order, heads, dim in product(ORDERS, (1, 3), (2, 4, 8))
    }
    assert paired == {key: key[2] % 4 == 0 for key in paired}


def test_a_token_of_more_words_than_a_round_holds() -> None:
    layers = layers_of("LBNH", 3, 16, torch.float32, dim=700)
    layout = TokenRowLayout(stack_layers(layers))
    before = layout.read(torch.arange(BLOCKS * 16)).clone()
    (view,) = layout.parts()
    DevicePart(view).copy(torch.tensor([3, 17]), torch.tensor([40, 79]))
    before[torch.tensor([40, 79])] = before[torch.tensor([3, 17])]
    assert torch.equal(layout.read(torch.arange(BLOCKS * 16)), before)
