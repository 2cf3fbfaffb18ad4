"""Layouts, digests and probe against the documented memory formats, token by token, copies in host
memory, and the mover's workspace. What the mover copies is claimed in tests/property/test_mover.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from support.memories import CLASSES, DTYPES, HEAD_DIM, LAYERS, Memory
from vtoken.errors import Rejected, UnsupportedConfiguration
from vtoken.kv import (
    KVLayout,
    Mover,
    TokenRowLayout,
    TransposedKeyLayout,
    payload_digests,
    probe_layout,
    stack_layers,
)
from vtoken.kv.host_copy import HostPart, compiled_copy, copy_words, host_parts


def memories() -> list[Memory]:
    found = [
        Memory(fmt, heads, tokens, dtype)
        for fmt, heads, dtype in product(CLASSES, (1, 2, 3), DTYPES)
        for tokens in (16, 32)
    ]
    found += [Memory(fmt, 2, tokens, torch.float32) for fmt in CLASSES for tokens in (64, 128)]
    # Heads inside or outside of blocks, blocks outside of layers, padding between layers.
    for order in ("BLHNC", "LHBNC", "HLBNC"):
        found += [Memory(fmt, 2, 16, torch.float32, order=order) for fmt in CLASSES]
    found += [Memory("rows", 2, 16, torch.bfloat16, order=order) for order in ("LBNHC", "BNLHC")]
    found += [Memory(fmt, 3, 16, torch.float16, gap=64) for fmt in CLASSES]
    return found


def name_of(memory: Memory) -> str:
    dtype = str(memory.dtype).removeprefix("torch.")
    return f"{memory.fmt}-{memory.heads}h-{memory.tokens}t-{dtype}-{memory.order}-{memory.gap}"


@pytest.fixture(params=memories(), ids=name_of)
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    kept: Memory = request.param
    before = kept.flat.clone()
    yield kept
    kept.flat.copy_(before)


def test_layers_of_one_allocation_are_moved_as_one_tensor(memory: Memory) -> None:
    assert len(memory.layout.caches) == 1
    assert memory.layout.num_layers == LAYERS


@pytest.mark.parametrize("fmt", CLASSES)
def test_layers_in_allocations_of_their_own_are_read_in_order(fmt: str) -> None:
    apart = Memory(fmt, 2, 16, torch.float32, separate=True)
    assert len(apart.layout.caches) == LAYERS
    for slot in (16, 37, 79):
        assert torch.equal(apart.layout.read(torch.tensor([slot]))[0], apart.token(slot))
    apart.layout.write(torch.tensor([40]), apart.layout.read(torch.tensor([37])))
    assert torch.equal(apart.layout.read(torch.tensor([40]))[0], apart.token(37))


def test_unequal_distances_between_layers_fall_back_to_one_view_per_layer() -> None:
    flat = torch.zeros(10_000)
    shape, strides = (2, 2, 4, 8), (64, 32, 8, 1)
    layers = [flat.as_strided(shape, strides, at) for at in (0, 1000, 3000)]
    assert len(stack_layers(layers)) == 3
    assert len(stack_layers(layers[:2])) == 1
    assert len(stack_layers(layers[1::-1])) == 2  # a negative distance is no stride


def test_layers_of_different_shape_or_dtype_are_refused() -> None:
    one = torch.zeros(2, 2, 4, 8)
    for other in (torch.zeros(2, 1, 4, 8), torch.zeros(2, 2, 4, 8).half()):
        with pytest.raises(UnsupportedConfiguration, match="uniform"):
            stack_layers([one, other])


@pytest.mark.parametrize("order", ["LBNHC", "LNBHC"])
def test_a_transposed_layout_needs_a_head_s_block_in_one_run(order: str) -> None:
    with pytest.raises(UnsupportedConfiguration, match="one run"):
        Memory("vec", 2, 16, torch.float32, order=order)


def test_the_scratch_of_one_layer_has_the_same_format() -> None:
    memory = Memory("vec", 2, 16, torch.float32)
    one = memory.layout.for_layer(memory.layers[1])
    slots = torch.tensor([20, 35])
    assert torch.equal(one.read(slots)[:, 0], memory.layout.read(slots)[:, 1])


# The probe --------------------------------------------------------------------------------------


def writer(memory: Memory, fmt: str, *, drop: str = "") -> object:
    """A backend that writes in `fmt`, or leaves `drop` ("V", "last layer") out."""
    other = Memory(fmt, memory.heads, memory.tokens, memory.dtype, memory.order, memory.gap)

    def write(layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        if drop == "last layer" and layer == LAYERS - 1:
            return
        halves = [key] if drop == "V" else [key, value]
        for index, slot in enumerate(slots.tolist()):
            for half, content in enumerate(halves):
                for head, d in product(range(memory.heads), range(HEAD_DIM)):
                    where = other.address(slot, layer, half, head, d)
                    memory.flat[where] = content[index, head, d]

    return write


def test_the_probe_accepts_the_true_format_and_restores_every_byte(memory: Memory) -> None:
    before = memory.flat.clone()
    probe_layout(memory.layout, writer(memory, memory.fmt), (3, 4))  # type: ignore[arg-type]
    assert torch.equal(memory.flat, before)


@pytest.mark.parametrize("fmt", CLASSES)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [2, 16])
def test_the_probe_refuses_the_other_format_of_the_same_shape(
    fmt: str, heads: int, tokens: int
) -> None:
    """S13. Given 2 KV heads (and 1 and 3), blocks of 2 or 16, where both formats have one shape;
    when the backend writes the other one; then it is refused, and the two blocks are restored."""
    memory = Memory(fmt, heads, tokens, torch.float32)
    before = memory.flat.clone()
    other = "rows" if fmt == "vec" else "vec"
    with pytest.raises(UnsupportedConfiguration, match="layout"):
        probe_layout(memory.layout, writer(memory, other), (3, 4))  # type: ignore[arg-type]
    assert torch.equal(memory.flat, before)


@pytest.mark.parametrize("drop", ["V", "last layer"])
def test_the_probe_refuses_a_backend_that_writes_less(drop: str) -> None:
    memory = Memory("rows", 2, 16, torch.float32)
    with pytest.raises(UnsupportedConfiguration, match="reads back"):
        probe_layout(memory.layout, writer(memory, "rows", drop=drop), (3, 4))  # type: ignore[arg-type]


def test_the_probe_refuses_a_move_that_copies_something_else() -> None:
    class Wrong(TokenRowLayout):
        def copy_slots(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
            self.write(targets, self.read(sources).flip(-1))

    memory = Memory("rows", 2, 16, torch.float32)
    before = memory.flat.clone()
    layout = Wrong(stack_layers(memory.layers))
    with pytest.raises(UnsupportedConfiguration, match="moves other bytes"):
        probe_layout(layout, writer(memory, "rows"), (3, 4))  # type: ignore[arg-type]
    assert torch.equal(memory.flat, before)


def test_the_probe_stays_in_its_two_blocks_whatever_their_size() -> None:
    for tokens in (1, 2, 3, 5):
        memory = Memory("rows", 2, tokens, torch.float32)
        before = memory.flat.clone()
        probe_layout(memory.layout, writer(memory, "rows"), (1, 3))  # type: ignore[arg-type]
        assert torch.equal(memory.flat, before)


# Digests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", CLASSES)
def test_a_digest_changes_with_any_byte_of_k_or_v_in_any_layer(
    fmt: str, dtype: torch.dtype
) -> None:
    """Claim: flipping one bit of any byte of one token's payload changes its digest and nobody
    else's."""
    memory = Memory(fmt, 2, 16, dtype)
    slots = torch.tensor([17, 18, 33])
    clean = payload_digests(memory.layout.read(slots))
    raw = memory.flat.view(torch.uint8)
    width = dtype.itemsize
    for element in memory.elements(18):
        for byte in range(width):
            raw[element * width + byte] ^= 1
            found = payload_digests(memory.layout.read(slots))
            raw[element * width + byte] ^= 1
            assert found[1] != clean[1]
            assert (found[0], found[2]) == (clean[0], clean[2])


def test_digests_compare_bytes_and_not_values() -> None:
    zero, nan = torch.zeros(1, 1, 2, 1, 4), torch.full((1, 1, 2, 1, 4), float("nan"))
    assert payload_digests(zero) != payload_digests(-zero)
    assert payload_digests(nan) == payload_digests(nan.clone())


def test_digests_of_no_token_are_none() -> None:
    assert payload_digests(torch.zeros(0, 2, 2, 1, 4)) == []


def test_a_digest_does_not_depend_on_the_order_of_the_batch() -> None:
    memory = Memory("vec", 2, 16, torch.float32)
    there = payload_digests(memory.layout.read(torch.tensor([17, 40, 60])))
    back = payload_digests(memory.layout.read(torch.tensor([60, 40, 17])))
    assert there == back[::-1]


# Copies in host memory --------------------------------------------------------------------------


def test_copies_in_host_memory_are_compiled_and_let_go_of_the_interpreter_lock() -> None:
    """Here, where vLLM has brought Numba along; elsewhere they are slow, and no less right."""
    kernel: Any = compiled_copy()
    assert kernel.targetoptions["nogil"]
    assert all(Memory(fmt, 2, 16, torch.float32).layout._host_parts for fmt in CLASSES)


def test_without_numba_or_in_other_memory_tokens_go_torch_s_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = Memory("rows", 2, 16, torch.float32).layout.parts()
    assert host_parts([view.to("meta") for view in views]) == []
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled_copy.cache_clear()
    try:
        assert host_parts(views) == []
    finally:
        compiled_copy.cache_clear()


def test_a_worker_of_vllm_may_start_after_copies_were_compiled() -> None:
    """Claim: what vLLM does then fails without our help, also the second time, and not with it."""
    rebind = pytest.importorskip("vllm.triton_utils.dispatcher")._rebind_kernels
    compiled_copy()
    rebind([])
    import_module("llvmlite.binding.ffi").lib._fntab.pop("__dict__")
    for _ in range(2):
        with pytest.raises(AttributeError):
            rebind([])
    compiled_copy.cache_clear()
    compiled_copy()
    rebind([])


def test_compiled_loops_do_what_they_say(memory: Memory) -> None:
    """Claim: they store what the same loops in plain Python store."""
    views, before = memory.layout.parts(), memory.flat.clone()
    slots = np.array([17, 31, 3]), np.array([16, 40, 66])
    for view in views:
        HostPart(view, copy_words).copy(*slots)
    expected = memory.flat.clone()
    assert not torch.equal(expected, before)
    memory.flat.copy_(before)
    for part in host_parts(views):
        part.copy(*slots)
    assert torch.equal(memory.flat, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_words_fit_wherever_the_memory_begins(dtype: torch.dtype, shift: int) -> None:
    """Claim: blocks of 3 tokens of 3 elements, from any address, are copied byte by byte alike."""
    count = 2 * 2 * 1 * 3 * 6
    raw = bytearray(random.Random(shift).randbytes(count * dtype.itemsize + shift))
    cache = torch.frombuffer(raw, dtype=dtype, offset=shift).reshape(2, 2, 1, 3, 6)
    for layout in (TokenRowLayout([cache]), TransposedKeyLayout([cache])):
        before = layout.read(torch.arange(6)).clone()
        layout.copy_slots(torch.tensor([4, 0]), torch.tensor([1, 5]))
        after = layout.read(torch.arange(6))
        expected = before[[0, 4, 2, 3, 4, 0]]
        assert payload_digests(after) == payload_digests(expected)


@pytest.mark.parametrize("fmt", CLASSES)
@pytest.mark.parametrize("wrong", [-1, 80])
def test_a_slot_outside_of_the_cache_is_refused_before_anything_is_stored(
    fmt: str, wrong: int
) -> None:
    memory = Memory(fmt, 2, 16, torch.float32)
    before = memory.flat.clone()
    inside, outside = torch.tensor([1, 2]), torch.tensor([3, wrong])
    for slots in ((inside, outside), (outside, inside)):
        with pytest.raises(IndexError, match="of a cache of 80"):
            memory.layout.copy_slots(*slots)
    with pytest.raises(Rejected, match="2 sources and 1 targets"):
        memory.layout.copy_slots(inside, outside[:1])
    assert torch.equal(memory.flat, before)


def test_an_adapter_of_one_s_own_needs_no_more_than_reading_and_writing() -> None:
    class Own(TokenRowLayout):
        def parts(self) -> list[torch.Tensor]:
            return KVLayout.parts(self)

    memory = Memory("rows", 2, 16, torch.float32)
    layout = Own(stack_layers(memory.layers))
    expected = layout.read(torch.tensor([3]))
    layout.copy_slots(torch.tensor([3]), torch.tensor([40]))
    assert torch.equal(layout.read(torch.tensor([40])), expected)


# Workspace --------------------------------------------------------------------------------------


def test_a_workspace_that_holds_no_token_is_rejected() -> None:
    layout = Memory("rows", 2, 16, torch.float32).layout
    Mover(layout, workspace_bytes=layout.token_bytes)
    with pytest.raises(Rejected, match="does not hold one token"):
        Mover(layout, workspace_bytes=layout.token_bytes - 1)


def test_a_very_large_plan_is_split_and_each_part_makes_progress() -> None:
    """S28. Given a plan of many times the workspace; when it is moved; then no part is larger
    than the workspace, every part moves tokens, and the result is that of one large copy."""
    memory = Memory("rows", 2, 128, torch.float32)
    batches: list[int] = []

    class Counted(TokenRowLayout):
        def copy_slots(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
            batches.append(len(sources))
            super().copy_slots(sources, targets)

    layout = Counted(stack_layers(memory.layers))
    rng = np.random.default_rng(0)
    order = torch.from_numpy(rng.permutation(2 * 128) + 128)
    sources, targets = order[:100], order[100:200]
    expected = TokenRowLayout(stack_layers(memory.layers)).read(sources)
    mover = Mover(layout, workspace_bytes=7 * layout.token_bytes + 3)
    mover.move(sources, targets)
    assert max(batches) == mover.batch_tokens == 7
    assert min(batches) > 0
    assert sum(batches) == mover.moved_tokens == 100
    assert torch.equal(layout.read(targets), expected)


def test_objects_of_the_compiler_can_be_asked_for_their_attributes() -> None:
    """Claim: once the copies are compiled, no module of the process holds an object whose
    attributes cannot be looked at, as vLLM does with all of them when an engine starts."""
    assert compiled_copy() is not None
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if hasattr(value, "__dict__"):
                vars(value).get("kernel")
