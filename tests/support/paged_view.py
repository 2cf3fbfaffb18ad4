"""One step's page-1 view over made-up caches, and its uses, held to plain definitions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from vtoken.errors import InvariantViolation

BLOCKS, HEADS, CONTENT, LAYERS = 7, 3, 4, 2


@dataclass
class Metadata:
    """What a step's view is made from."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int


def paged_view(seed: int) -> None:
    """Fill the view of two steps, and read every row through it.

    Raises:
        AssertionError: another token than the row's is read, or another number of them.
    """
    from vtoken.vllm.pages import PageBuffers, PageTables

    rng = np.random.default_rng(seed)
    size, most = int(rng.choice([2, 4])), 5
    numbers = torch.arange(LAYERS * BLOCKS * HEADS * size * CONTENT, dtype=torch.float32)
    shape = (LAYERS, BLOCKS, HEADS, size, CONTENT)
    if seed % 2:
        both = numbers.view(shape)
    else:  # tokens before heads
        both = numbers.view(LAYERS, BLOCKS, size, HEADS, CONTENT).transpose(2, 3)
    caches = {"a": both[0], "b": both[1]}
    longest = 3 * size
    buffers = PageBuffers(max_rows=most, max_length=longest, device=torch.device("cpu"))
    tables = PageTables(buffers, caches)
    for _ in range(2):
        count = int(rng.integers(1, most + 1))
        blocks = [rng.permutation(BLOCKS)[:3] for _ in range(count)]
        lengths = rng.integers(1, longest + 1, count)
        metadata = Metadata(
            torch.from_numpy(np.stack(blocks).astype(np.int32)),
            torch.from_numpy(lengths.astype(np.int32)),
            int(lengths.max()),
        )
        slots = [
            (own[:, None] * size + np.arange(size)).ravel()[:length].astype(np.int64)
            for own, length in zip(blocks, lengths, strict=True)
        ]
        holed = []
        for row in range(count):
            if rng.random() < 0.6:
                slots[row] = rng.permutation(slots[row])[: rng.integers(1, len(slots[row]) + 1)]
                holed.append((row, torch.from_numpy(slots[row])))
        given = tables.fill(metadata, holed)
        assert given.metadata.block_table.data_ptr() == buffers.tables.data_ptr()
        assert given.metadata.seq_lens.data_ptr() == buffers.lengths.data_ptr()
        for row, want in enumerate(slots):
            length = int(given.metadata.seq_lens[row])
            assert length == len(want)
            assert tables.slots(given, row).tolist() == want.tolist()
            pages = given.metadata.block_table[row, :length].long()
            for name, cache in caches.items():
                read = given.views[name][pages][:, :, 0]
                assert torch.equal(read, cache[want // size, :, want % size])


def view_uses(seed: int) -> None:
    """Judge some steps by `ViewUse`.

    Raises:
        InvariantViolation: L6, of a step that used its view in every layer, or was a replay of what
            did.
        AssertionError: nothing is said of another one.
    """
    from vtoken.vllm.pages import ViewUse

    rng = random.Random(seed)
    judge, dummies = ViewUse(LAYERS), []
    for _ in range(rng.randrange(4)):
        dummies.append(rng.choice([0, LAYERS, 2 * LAYERS, 1] if seed % 2 else [0, LAYERS]))
        judge.of_dummy([SimpleNamespace(uses=dummies[-1])])
    sound = any(dummies) and all(uses % LAYERS == 0 for uses in dummies)
    uses, replayed = rng.randrange(LAYERS + 2), rng.random() < 0.5
    judge.of_step([SimpleNamespace(uses=uses)], replayed=replayed)
    if uses == LAYERS or (uses == 0 and replayed and sound):
        judge.check()
        return
    laws = []
    try:
        judge.check()
    except InvariantViolation as error:
        laws.append(error.law)
    assert laws == ["L6"], "a step whose layers did not use the view"
