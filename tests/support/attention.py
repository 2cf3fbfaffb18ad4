"""One step of the score tap over made-up keys, on all ranks, held to a plain softmax."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK, DIM, LAYERS, BLOCKS, CHUNK = 32, 8, 5, 9, 6
HEADS, KV_HEADS = 4, 2  # of one rank


class Graph(TorchDispatchMode):
    """Stands for a CUDA graph: what was captured, as parts, is operations on tensors that stay;
    running a part again runs those and no Python around them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        calls: list[tuple[Any, Any, Any]] = []
        self._calls = calls

        def replay() -> None:
            for function, arguments, named in calls:
                function(*arguments, **named)

        self.parts.append(replay)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.name().split(".")[0].endswith("_"):  # what writes; views and allocations stay
            self._calls.append((func, args, kwargs or {}))
        return made


def tapped_step(seed: int) -> None:
    """Tap several rows of a step on each of the ranks and compare what comes together.

    Rows differ in their live slots, in how many of their queries are observed, in which layers, and
    in whether single heads are wanted; q is used in the layers, or copied there by a graph that is
    captured once and replayed in each step.

    Raises:
        AssertionError: another number than the softmax has.
    """
    from vtoken.policies.taps import RowTap, Taps
    from vtoken.vllm import scores
    from vtoken.vllm.query_buffers import QueryBuffers

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
    transposed = seed % 5 > 1

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
                    impl = SimpleNamespace(logits_soft_cap=cap, num_heads=HEADS, scale=DIM**-0.5)
                    layers[name] = scores.TappedLayer.of(
                        SimpleNamespace(impl=impl, kv_cache=cache), transposed=transposed
                    )
                    host = layers[name].host
                    if host is not None:
                        host.usable = host.usable and seed % 3 > 0
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
            step = (Taps(1, taps), rows, layers, names)
            if seed % 4 < 2:
                made: scores.StepTap = scores.DirectTap(*step)
                for index, name in enumerate(names):
                    made.hand_over(name, queries[rank, index])
                return made.finish(), parts
            if seed % 8 > 5:  # a step that is longer than what is captured
                made = scores.CapturedTap(*step, buffers=QueryBuffers(names, count * CHUNK - 1))
                for index, name in enumerate(names):
                    made.hand_over(name, queries[rank, index])
                return made.finish(), parts
            buffers, graph = QueryBuffers(names, count * CHUNK + 3), Graph()
            passing = torch.zeros_like(queries[rank, 0])  # every layer has its q here in turn
            for name in names:
                with graph:
                    buffers.hand_over(name, passing)
            for garbage in (True, False):  # two steps; nothing of the first is left
                made = scores.CapturedTap(*step, buffers=buffers)
                for index, run in enumerate(graph.parts):
                    passing.copy_(-queries[rank, index] if garbage else queries[rank, index])
                    run()
                passing.fill_(float("nan"))
                if garbage:
                    assert made._handed() == len(layers)
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
                read = _keys(caches[rank, index], slots[name], transposed=transposed)
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


def _keys(cache: torch.Tensor, slots: np.ndarray, *, transposed: bool) -> torch.Tensor:
    """K of the slots, `[slots, kv_heads, DIM]`. Component d of token t lies at `d * BLOCK + t` of
    its block and head if transposed, else at `t * 2 * DIM + d`."""
    flat, component = cache.reshape(BLOCKS, KV_HEADS, -1), torch.arange(DIM)
    rows = []
    for slot in slots.tolist():
        token = slot % BLOCK
        place = component * BLOCK + token if transposed else component + token * 2 * DIM
        rows.append(flat[slot // BLOCK, :, place])
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
