"""Batches with padding rows, as full and piecewise graphs have them, on the real engine.

A CPU engine never pads. So the step's size is raised where vLLM decides on it, and everything
behind that is vLLM's own: the padded inputs, the slot mapping with -1 in it, the cache write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import Engine
from vtoken.errors import InvariantViolation
from vtoken.models import ensure_tiny_llama

pytestmark = pytest.mark.engine

ROWS = 128


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(ensure_tiny_llama(), blocks=24, chunk=ROWS)


@dataclass
class Forward:
    """One forward pass: rows that are tokens, the slot mapping, and slots whose bytes changed."""

    real: int
    mapping: list[int]
    changed: set[int]


@contextmanager
def padded(engine: Engine, *, pad_slot: int = -1) -> Iterator[list[Forward]]:
    """Pad every step to `ROWS` rows and watch the cache; padding rows get this slot."""
    runner = engine.runner
    layout = runner.vtoken_layout
    every = torch.arange(layout.num_blocks * layout.block_size)
    decide, forward = runner._determine_batch_execution_and_padding, runner._model_forward
    seen: list[Forward] = []
    real = 0

    def decide_on_all(*args: Any, **kwargs: Any) -> Any:
        nonlocal real
        real = kwargs["num_tokens"]
        mode, batch, *others = decide(*args, **kwargs)
        return (mode, replace(batch, num_tokens=ROWS), *others)

    def watch(*args: Any, **kwargs: Any) -> Any:
        mapping = runner.input_batch.block_table[0].slot_mapping.gpu
        assert kwargs["positions"].shape[0] == ROWS
        mapping[real:][mapping[real:] == -1] = pad_slot
        before = layout.read(every)
        result = forward(*args, **kwargs)
        differs = (layout.read(every) != before).flatten(1).any(1)
        seen.append(Forward(real, mapping.tolist(), set(every[differs].tolist())))
        return result

    runner._determine_batch_execution_and_padding, runner._model_forward = decide_on_all, watch
    try:
        yield seen
    finally:
        del runner._determine_batch_execution_and_padding, runner._model_forward


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(16)
    return [rng.integers(3, 259, length).tolist() for length in (64, 33, 90)]


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_s16_padding_rows_change_no_slot(engine: Engine, mode: str) -> None:
    """S16: given steps of up to 64 tokens padded to 128 rows; when rows are moved, recycled and
    gathered; then padding rows keep slot -1, the cache changes at the tokens' own slots and
    nowhere else, and the output is that without padding."""
    engine.configure(policy="random", budget=40, reclaim=mode, checks=3)
    plain = engine.serve(prompts()[:1], 30)
    assert engine.compare(plain).max_error <= 1e-5
    engine.configure(policy="random", budget=40, reclaim=mode, checks=3)
    with padded(engine) as seen:
        alone = engine.serve(prompts()[:1], 30)
        together = engine.serve(prompts(), 30)
    assert alone.outputs == plain.outputs
    comparison = engine.compare(together)
    assert comparison.max_error <= 1e-5
    assert comparison.wrong_tokens == 0
    assert seen[0].real == 64
    for forward in seen:
        assert forward.mapping[forward.real :] == [-1] * (ROWS - forward.real)
        # Not equal to it: a slot may be given the bytes that it has.
        assert forward.changed <= set(forward.mapping[: forward.real])
    assert sum(len(forward.changed) for forward in seen) > 200


def test_s16_the_control_whose_padding_rows_have_a_slot_is_caught(engine: Engine) -> None:
    """Given padding rows with the slot of somebody's token; when steps run; then the cache changes
    there, and the checks see it: the test above can fail. The engine must not be used again."""
    engine.configure(policy="random", budget=40, reclaim="eager", checks=3)
    name = engine.submit("0", prompts()[0], 30)
    engine.step({})
    slot = int(engine.scheduler.vtoken.tables[name].slots[0])
    with padded(engine, pad_slot=slot) as seen, pytest.raises(InvariantViolation, match="I1"):
        engine.drain()
    assert slot in seen[0].changed
