"""The mover alone: over every layout adapter, dtype and number of KV heads, moves give the bits of
a token-by-token copy, and nothing else in the allocation changes.

Scope: token rows in every nesting of the allocation, transposed keys in every nesting that keeps a
head's block in one run; 1 to 4 layers in one allocation or in several; blocks of 16 to 128
tokens; slots here and there, in runs, and within one block; all bit patterns, which include NaNs of
every payload; compiled copies, and those of torch, which serve other devices.
"""

from __future__ import annotations

import random
import time
from functools import partial
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.memories import BITS, CLASSES, DTYPES, Memory
from vtoken.errors import Rejected
from vtoken.kv import Mover
from vtoken.kv.host_copy import TILE_TOKENS
from vtoken.kv.streams import ThreadCopyStream

ORDERS = {
    "rows": ["".join(order) for order in permutations("LBHNC")],
    "vec": ["".join(order) + "NC" for order in permutations("LBH")],
}


@st.composite
def scenes(
    draw: st.DrawFn, fmt: str, heads: int, dtype: torch.dtype
) -> tuple[Memory, list[int], list[int], int]:
    """A cache, sources and targets that are disjoint, and a workspace in bytes."""
    order = draw(st.just("LBHNC") | st.sampled_from(ORDERS[fmt]))
    seed = draw(st.integers(0, 2**32))
    memory = Memory(
        fmt,
        heads,
        draw(st.sampled_from([16, 32, 48, 64, 128])),
        dtype,
        order,
        gap=draw(st.sampled_from([0, 0, 64])),
        separate=draw(st.booleans()),
        num_layers=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([2, 4])),
        seed=seed,
    )
    slots = range(memory.num_blocks * memory.tokens)
    if draw(st.booleans()):
        slots = slots[: memory.tokens]  # within one block
    count = min(draw(st.sampled_from([0, 1, 2, 3, 8, 24])), len(slots) // 2)
    picked = random.Random(seed).sample(slots, 2 * count)
    sources, targets = picked[:count], picked[count:]
    if draw(st.booleans()):  # runs of slots, the targets' before the sources' or behind them
        first = draw(st.integers(0, len(slots) - 2 * count))
        picked = list(slots[first : first + 2 * count])
        sources, targets = picked[:count], picked[count:]
        if draw(st.booleans()):
            sources, targets = targets, sources
    token = memory.layout.token_bytes
    workspace = draw(st.just(token) | st.integers(token, token * (count + 2)))
    return memory, sources, targets, workspace


def token_by_token(memory: Memory, sources: list[int], targets: list[int]) -> torch.Tensor:
    """The allocation's bits after the moves."""
    before = memory.bits().clone()
    expected = before.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[list(memory.elements(target))] = before[list(memory.elements(source))]
    return expected


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("fmt", CLASSES)
def test_moves_carry_every_bit_and_touch_nothing_else(
    fmt: str, dtype: torch.dtype, heads: int
) -> None:
    @given(scenes(fmt, heads, dtype), st.booleans(), st.booleans())
    def claim(
        scene: tuple[Memory, list[int], list[int], int],
        in_pieces: bool,
        compiled: bool,
    ) -> None:
        memory, sources, targets, workspace = scene
        if not compiled:
            memory.layout._host_parts = []
        expected = token_by_token(memory, sources, targets)
        read = memory.layout.read(torch.tensor(sources, dtype=torch.int64))
        bits = BITS[dtype.itemsize]
        shape = (len(sources), memory.num_layers, 2, heads, memory.head_dim)
        assert read.shape == shape
        for index, slot in enumerate(sources):
            assert torch.equal(read[index].view(bits), memory.token(slot).view(bits))
        mover = Mover(memory.layout, workspace_bytes=workspace)
        move(mover, sources, targets, in_pieces=in_pieces)
        assert torch.equal(memory.bits(), expected)
        assert mover.moved_tokens == len(sources)
        assert mover.moved_bytes == read.numel() * dtype.itemsize

    claim()


def move(mover: Mover, sources: list[int], targets: list[int], *, in_pieces: bool) -> None:
    """By `move`, or by `copies`; their pieces, here in reverse, are bounded by the workspace."""
    slots = [torch.tensor(listed, dtype=torch.int64) for listed in (sources, targets)]
    if not in_pieces:
        mover.move(*slots)
        return
    pieces = mover.copies(*slots, owner="a")
    assert mover.moved_tokens == 0, "counted when it has run"
    assert [slot for piece in pieces for slot in piece.sources.tolist()] == sources
    assert [slot for piece in pieces for slot in piece.targets.tolist()] == targets
    assert all(0 < len(piece.sources) <= mover.batch_tokens for piece in pieces)
    assert len(pieces) == -(-len(sources) // mover.batch_tokens)
    for done, piece in enumerate(reversed(pieces), start=1):
        assert piece.owner == "a"
        piece.run()
        assert mover.moved_tokens <= done * mover.batch_tokens


@pytest.mark.parametrize("fmt", CLASSES)
def test_many_tokens_are_moved_by_one_call(fmt: str) -> None:
    """Claim: also more of them than the compiled loops take at a time."""
    memory = Memory(fmt, 2, 128, torch.bfloat16, num_blocks=9, head_dim=4, seed=5)
    slots = random.Random(0).sample(range(9 * 128), 1100)
    sources, targets = slots[:550], slots[550:]
    assert len(sources) > 2 * TILE_TOKENS
    expected = token_by_token(memory, sources, targets)
    move(Mover(memory.layout), sources, targets, in_pieces=False)
    assert torch.equal(memory.bits(), expected)


def test_pieces_keep_their_slots_when_the_caller_reuses_its_tensors() -> None:
    memory = Memory("rows", 2, 16, torch.float32)
    sources, targets = torch.tensor([1, 2, 3]), torch.tensor([40, 41, 42])
    expected = token_by_token(memory, [1, 2, 3], [40, 41, 42])
    pieces = Mover(memory.layout).copies(sources, targets, owner="a")
    sources.fill_(0)
    targets.fill_(0)
    for piece in pieces:
        piece.run()
    assert torch.equal(memory.bits(), expected)


def test_sources_without_targets_are_rejected_before_anything_runs() -> None:
    mover = Mover(Memory("rows", 2, 16, torch.float32).layout)
    with pytest.raises(Rejected, match="3 sources and 2 targets"):
        mover.copies(torch.tensor([1, 2, 3]), torch.tensor([4, 5]), owner="a")


def test_every_move_counts_though_two_threads_move_at_once() -> None:
    memory = Memory("rows", 1, 128, torch.float32, num_blocks=4)
    mover = Mover(memory.layout, workspace_bytes=memory.layout.token_bytes)
    stream = ThreadCopyStream()
    everything = torch.arange(128)
    event = stream.launch(mover.copies(everything, everything + 128, owner="a"))
    mover.move(everything + 256, everything + 384)
    stream.wait(event)
    stream.close()
    assert mover.moved_tokens == 256


@pytest.mark.parametrize("fmt", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_another_thread_writes_beside_the_targets_stays(fmt: str, dtype: torch.dtype) -> None:
    """Claim: a move stores to its targets only, not even what it found there to other slots of
    their blocks, which belong to a step that runs at the same time."""
    memory = Memory(fmt, 2, 128, dtype, num_blocks=4, head_dim=64)
    layout, stream = memory.layout, ThreadCopyStream()
    mover, block = Mover(layout), torch.arange(128)
    sources, targets, beside = block[::2], block[::2] + 128, block[1::2] + 128
    mover.move(sources, targets)
    values = [torch.full_like(layout.read(beside), value) for value in (1, 2)]
    again = partial(mover.copies, sources.repeat(50), targets.repeat(50), owner="a")
    event = stream.launch(again())
    for number in range(100):
        if stream.done(event):
            event = stream.launch(again())
        layout.write(beside, values[number % 2])
        time.sleep(1e-3)
        assert torch.equal(layout.read(beside), values[number % 2])
    stream.wait(event)
    stream.close()
    assert torch.equal(layout.read(targets), layout.read(sources))
