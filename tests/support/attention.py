"""One step of the score tap over made-up keys, on all ranks, held to a plain softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

BLOCK, DIM, LAYERS, BLOCKS, CHUNK = 32, 8, 5, 9, 6
HEADS, KV_HEADS = 4, 2  # of one rank


def tapped_step(seed: int) -> None:
    """Tap several rows of a step on each of the ranks and compare what comes together.

    Rows differ in their live slots, in how many of their queries are observed, in which layers, and
    in whether single heads are wanted; q is used in the layers, or copied there.

    Raises:
        AssertionError: another number than the softmax has.
    """
    from vtoken.kv.scores import HostKeys
    from vtoken.policies.taps import RowTap, Taps
    from vtoken.vllm import scores

    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    ranks = 1 + seed % 2
    count = int(rng.integers(1, 4))
    taps = {
        str(n): RowTap(int(rng.integers(1, CHUNK)), rng.random() < 0.5, int(rng.choice([1, 2, 9])))
        for n in range(count)
    }
    slots = {name: rng.permutation(BLOCKS * BLOCK)[: rng.integers(CHUNK, 90)] for name in taps}
    names = [f"layer {n}" for n in range(LAYERS)]
    shape = (BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    caches = torch.randn((ranks, LAYERS, *shape), generator=generator)
    queries = torch.randn((ranks, LAYERS, count * CHUNK, HEADS, DIM), generator=generator)
    cap = [0.0, 2.0][seed // 2 % 2]

    def on_rank(rank: int, others: torch.Tensor | None) -> Any:
        patch = pytest.MonkeyPatch()
        group = SimpleNamespace(world_size=ranks, rank_in_group=rank, cpu_group=None)
        patch.setattr(scores, "get_tp_group", lambda: group)
        parts: list[torch.Tensor] = []

        def all_reduce(flat: torch.Tensor, group: Any) -> None:
            parts.append(flat.clone())
            if others is not None:
                flat += others

        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        try:
            wanted = set().union(*(scores.tapped_layers(names, t.stride) for t in taps.values()))
            layers = {}
            for index, name in enumerate(names):
                if name in wanted:
                    cache = caches[rank, index]
                    keys = HostKeys(cache)
                    keys.usable = keys.usable and seed % 3 > 0
                    layers[name] = scores.TappedLayer(cache, HEADS, DIM, DIM**-0.5, cap, keys)
            rows = {
                name: scores.scored_row(
                    own,
                    slice(n * CHUNK, (n + 1) * CHUNK),
                    slots[name],
                    BLOCK,
                    layers=len(scores.tapped_layers(names, own.stride)),
                    heads=HEADS,
                )
                for n, (name, own) in enumerate(taps.items())
            }
            made: scores.StepTap
            if seed % 4 < 2:
                made = scores.DirectTap(Taps(1, taps), rows, layers, names)
            else:
                buffers = scores.QueryBuffers(count * CHUNK + 3)
                made = scores.CapturedTap(Taps(1, taps), rows, layers, names, buffers=buffers)
            for index, name in enumerate(names):
                own_query = queries[rank, index].clone()
                made.hand_over(name, own_query)
                own_query.fill_(float("nan"))  # a graph's buffers are used again
            return made.finish(), parts
        finally:
            patch.undo()

    found, others = on_rank(0, None)
    if ranks == 2:
        _, (others,) = on_rank(1, None)
        found, _ = on_rank(0, others)
    for n, (name, own) in enumerate(taps.items()):
        want = []
        for index in _layers(own.stride):
            for rank in range(ranks):
                read = _keys(caches[rank, index], slots[name])
                chunk = queries[rank, index, n * CHUNK : (n + 1) * CHUNK]
                want.append(_softmax(chunk, read, own.queries, cap))
        by_head = np.concatenate(want)
        mine = found.rows[name]
        assert mine.heads == len(by_head)
        np.testing.assert_allclose(mine.values, by_head.sum(0), atol=2e-5)
        assert (mine.per_head is not None) == own.per_head
        if own.per_head:
            np.testing.assert_allclose(mine.per_head, by_head, atol=2e-6)


def _layers(stride: int) -> list[int]:
    """Layers 2, 4, ... for a stride of 2, counted from 1; the last one if there are too few."""
    return [n for n in range(LAYERS) if (n + 1) % stride == 0] or [LAYERS - 1]


def _keys(cache: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """K of the slots, `[slots, kv_heads, DIM]`: component d of token t at `d * BLOCK + t`."""
    flat, component = cache.reshape(BLOCKS, KV_HEADS, -1), torch.arange(DIM) * BLOCK
    rows = [flat[slot // BLOCK, :, component + slot % BLOCK] for slot in slots.tolist()]
    return torch.stack(rows)


def _softmax(chunk: torch.Tensor, keys: torch.Tensor, observed: int, cap: float) -> np.ndarray:
    """Of the chunk's last `observed` queries, added up; `[HEADS, slots]`, fp64."""
    found = np.zeros((HEADS, len(keys)))
    for place in range(CHUNK - observed, CHUNK):
        seen = len(keys) - (CHUNK - 1 - place)
        for head in range(HEADS):
            logits = keys[:seen, head * KV_HEADS // HEADS].double() @ chunk[place, head].double()
            logits = logits * DIM**-0.5
            if cap:
                logits = cap * torch.tanh(logits / cap)
            found[head, :seen] += logits.softmax(0).numpy()
    return found
