"""The worker's list of live slots is brought up to date in steady state and rebuilt only after a
structural change; it is always the table's."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from vtoken.core import StepLayout
from vtoken.errors import InvariantViolation
from vtoken.kv.translation import TranslationCache, without
from vtoken.testing.harness import FakeEngine
from vtoken.testing.walk import act, drawn_engine


def counts(engine: FakeEngine) -> tuple[int, int]:
    return engine.executor.translation.rebuilds, engine.executor.translation.updates


def test_steady_state_updates_and_only_a_structural_change_rebuilds() -> None:
    """One scattered token dies per step for 12 steps: one rebuild, then updates. The step in which
    a whole block dies and leaves rebuilds once more, and so does nothing after it."""
    engine = FakeEngine(mode="off", block_size=4, num_blocks=20)
    engine.add("a", prompt_len=33)
    engine.step()
    assert counts(engine) == (0, 0), "without holes there is no list"
    for step in range(12):
        engine.evict("a", [step * 2 + 1])
        engine.step()
        assert counts(engine) == (1, step)
    assert engine.executor.translation.rebuilds == engine.reclaimer.views.told_in_full
    engine.evict("a", [0, 2])  # with tokens 1 and 3 the whole first block
    engine.step()
    assert counts(engine) == (2, 11)
    engine.grow("a", 3)
    engine.step()
    engine.step()
    assert counts(engine) == (2, 13)


def test_a_recycled_hole_is_news_and_not_a_rebuild() -> None:
    engine = FakeEngine(mode="background", block_size=4, num_blocks=20)
    engine.add("a", prompt_len=21)
    engine.step()
    engine.evict("a", [1, 6])
    engine.step()
    for step in range(6):
        engine.evict("a", [9 + step])
        engine.step()
        engine.verify()
    assert engine.reclaimer.counters.recycled >= 6
    assert counts(engine)[0] == 1


@pytest.mark.parametrize("mode", ["off", "eager", "background"])
def test_the_list_is_the_table_s_in_any_walk(mode: str) -> None:
    """Claim: level 3 compares the list that attention is given with the table in every step; here
    it is compared directly as well."""
    rebuilds = updates = 0
    for seed in range(12):
        rng = random.Random(seed)
        engine = drawn_engine(rng, mode=mode, block_size=4, ample=seed % 2 == 0)
        names: Counter[str] = Counter()
        for _ in range(40):
            act(engine, rng, names=names)
            step = engine.schedule()
            live = {row.req_id: engine.table(row.req_id).live_slots() for row in step.rows}
            engine.execute(step)
            for req_id, slots in engine.executor.gathered.items():
                assert sorted(slots.tolist()) == sorted(live[req_id].tolist())
        rebuilds += engine.executor.translation.rebuilds
        updates += engine.executor.translation.updates
    assert rebuilds > 0
    assert mode == "eager" or updates > rebuilds


def test_news_of_an_unknown_row_is_refused() -> None:
    layout = StepLayout(0, 3, np.array([7], dtype=np.int32), holes=True)
    with pytest.raises(InvariantViolation, match="L6"):
        TranslationCache().take("a", layout, 1)


def test_a_chunk_s_own_tokens_come_last_and_in_order() -> None:
    cache = TranslationCache()
    first = StepLayout(0, 3, np.array([6], dtype=np.int32), holes=True)
    first.live_slots = np.array([2, 4, 6], dtype=np.int32)
    assert cache.take("a", first, 1).tolist() == [2, 4, 6]
    news = StepLayout(0, 4, np.array([8, 9], dtype=np.int32), holes=True)
    news.gone = np.array([4], dtype=np.int32)
    assert cache.take("a", news, 2).tolist() == [2, 6, 8, 9]
    assert cache.take("a", first, 1).dtype == torch.int64
    assert (cache.rebuilds, cache.updates) == (2, 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_dead_leave_and_the_others_keep_their_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(60, generator=generator)[: 1 + seed * 2]
    dead = torch.rand(len(slots), generator=generator) < seed / 19
    kept = without(slots, dead, int((~dead).sum()))
    assert torch.equal(kept, slots[~dead])


def test_too_many_promised_show_as_slots_that_nobody_has() -> None:
    slots, dead = torch.tensor([4, 9, 2]), torch.tensor([False, True, False])
    assert without(slots, dead, 3).tolist() == [4, 2, -1]
    assert without(slots, dead, 1).tolist() == [4]
