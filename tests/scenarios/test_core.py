"""Faults that hurt people in systems of this kind, on the core with real bytes and no engine.

Each test's name carries the scenario's id; its docstring says given, when, and what is right.
README.md has the table of all scenarios. S13 and S28 are about memory formats and the mover: see
also tests/unit/test_kv.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken.core import BackgroundParams, LayoutChange
from vtoken.errors import InvariantViolation, UnsupportedConfiguration
from vtoken.kv import KVLayout, Mover, TokenRowLayout, TransposedKeyLayout, probe_layout
from vtoken.testing.harness import FakeEngine
from vtoken.testing.pool import PoolFault

MODES = ("off", "eager", "background")


def engine(mode: str, block_size: int, *, num_blocks: int = 40, tokens: int) -> FakeEngine:
    """A request "a" with `tokens` tokens computed."""
    made = FakeEngine(mode=mode, block_size=block_size, num_blocks=num_blocks)
    made.add("a", prompt_len=tokens)
    made.step()
    return made


@pytest.mark.parametrize("mode", MODES)
def test_s06_a_block_that_is_freed_twice_is_refused_the_second_time(mode: str) -> None:
    """Given a request whose middle block died and was returned; when the same block is returned
    again, in the same free or later, by its plan or by the pool; then the second return is
    refused, and the free count is the number of distinct free blocks."""
    made = engine(mode, 2, tokens=8)
    block = int(made.table("a").blocks[1])
    made.evict("a", [2, 3])
    made.step()
    none = np.empty(0, dtype=np.int32)
    for dropped in ([block], [int(made.table("a").blocks[0])] * 2):
        change = LayoutChange("a", none, none, none, [], dropped, trimmed=False)
        with pytest.raises(InvariantViolation, match="more often than it was owned") as caught:
            made.checker.reclaimed(made.table("a"), change)
        assert caught.value.law == "L5"
    with pytest.raises(PoolFault):
        made.pool.give_back([block])
    assert len(set(made.pool.free)) == made.pool.num_free


@pytest.mark.parametrize("mode", MODES)
def test_s06_finishing_after_releases_returns_each_block_once(mode: str) -> None:
    """Given a request that released some of its blocks; when it finishes; then the pool is as
    full as before it, and no block is in the free list twice."""
    made = FakeEngine(mode=mode, block_size=2, num_blocks=20)
    before = made.pool.num_free
    made.add("a", prompt_len=13)
    made.step()
    for victims in ([0, 1, 5], [2, 3, 4, 8], [6]):
        made.evict("a", victims)
        made.step()
    made.finish("a")
    made.step()
    assert made.pool.num_free == before
    assert len(set(made.pool.free)) == before


@pytest.mark.parametrize("last_deaths", [[0, 2], [2, 0], [0, 2, 4]])
def test_s07_a_block_returns_once_and_only_after_its_last_death(last_deaths: list[int]) -> None:
    """Given B=4, without reclamation; when tokens 1 and 3 of a block die in one step and 0 and 2
    in a later one; then the block is returned exactly once, and only after the last death."""
    made = engine("off", 4, tokens=10)
    block = int(made.table("a").blocks[0])
    made.evict("a", [1, 3])
    made.step()
    assert block in made.table("a").blocks
    assert block not in made.pool.free
    made.evict("a", last_deaths)
    made.step()
    made.verify()
    assert block not in made.table("a").blocks
    assert made.pool.free.count(block) == 1
    assert made.reclaimer.counters.released_blocks == 1
    for _ in range(6):
        made.step()
        made.verify()
    assert made.reclaimer.counters.released_blocks == 1
    assert made.reclaimer.counters.moved == 0


@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize("stride_order", ["heads outside tokens", "tokens outside heads"])
def test_s13_the_layout_is_declared_and_probed_and_never_guessed(
    tokens: int, stride_order: str
) -> None:
    """Given 2 KV heads and B=2 or 16, where different layouts have one shape; when the backend
    writes marked values; then only the layout it writes in is accepted, and moved marks land in
    the same element of the target slot; a layout that the strides contradict is refused."""
    heads, dim, blocks = 2, 4, 4
    if stride_order == "heads outside tokens":
        cache = torch.zeros(1, blocks, heads, tokens, 2 * dim)
    else:
        cache = torch.zeros(1, blocks, tokens, heads, 2 * dim).transpose(2, 3)
    rows = TokenRowLayout([cache])

    def write_rows(layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        for index, slot in enumerate(slots.tolist()):
            entry = cache[layer, slot // tokens, :, slot % tokens]
            entry[:, :dim], entry[:, dim:] = key[index], value[index]

    probe_layout(rows, write_rows, (2, 3))
    assert not cache.any()
    if stride_order == "tokens outside heads":
        with pytest.raises(UnsupportedConfiguration, match="strides"):
            TransposedKeyLayout([cache])
    else:
        with pytest.raises(UnsupportedConfiguration, match="layout"):
            probe_layout(TransposedKeyLayout([cache]), write_rows, (2, 3))
    marks = torch.arange(1.0, 1 + heads * 2 * dim).reshape(2, heads, dim)
    write_rows(0, marks[None, 0], marks[None, 1], torch.tensor([tokens]))
    Mover(rows).move(torch.tensor([tokens]), torch.tensor([2 * tokens + 1]))
    moved = cache[0, 2, :, 1]
    assert torch.equal(moved[:, :dim], marks[0])
    assert torch.equal(moved[:, dim:], marks[1])


@pytest.mark.parametrize("seed", range(4))
def test_s15_scattered_death_frees_nothing_alone_and_everything_with_moves(seed: int) -> None:
    """Given B=16 and 75 % of 400 tokens dead at random; when reclaimed; then without moves about
    no block comes back, and with them at least floor(dead / B) - 1: at once, or with plans in
    flight as soon as the first is committed."""
    freed = {}
    for mode in MODES:
        made = engine(mode, 16, tokens=400, num_blocks=60)
        held = made.pool.num_free
        rng = np.random.default_rng(seed)
        dead = rng.choice(made.evictable("a"), size=300, replace=False)
        made.evict("a", dead)
        for _ in range(1 + (mode == "background") * BackgroundParams().commit_delay):
            made.step()
            made.verify()
        freed[mode] = made.pool.num_free - held
    assert freed["off"] <= 2
    assert min(freed["eager"], freed["background"]) >= 300 // 16 - 1


@pytest.mark.parametrize("mode", MODES)
def test_s16_a_token_that_would_be_written_as_a_padding_row_is_caught(mode: str) -> None:
    """Given a step whose new token got the slot of a padding row, -1; when it runs; then that is a
    broken L7, and not a token that is silently missing. (What padding rows themselves do:
    test_padding.py.)"""
    made = engine(mode, 4, tokens=6)
    step = made.schedule()
    step.rows[0].layout.new_slots[-1] = -1
    with pytest.raises(InvariantViolation, match="L7"):
        made.execute(step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cap", [1, 5])
def test_s17_positions_stay_logical_after_two_evictions(mode: str, cap: int) -> None:
    """Given two evictions of different ranges; when the request decodes on, one token or several
    at a time; then query positions are the logical ids, every live token is seen once with its
    own bytes, and nothing is shifted twice."""
    made = engine(mode, 4, tokens=20)
    made.evict("a", range(2, 7))
    made.step()
    made.evict("a", range(9, 15))
    positions = []
    for _ in range(8):
        if cap > 1:
            made.grow("a", 2)
        step = made.schedule(cap=cap)
        for row in step.rows:
            assert row.expected is not None  # level 3: L6 judges the query positions
            positions += range(row.start, row.start + row.count)
        made.execute(step)
        made.verify()
    assert positions == list(range(21, 21 + len(positions)))
    table = made.table("a")
    assert np.flatnonzero(~table.live).tolist() == [*range(2, 7), *range(9, 15)]
    assert table.reclaimed == table.logical_len - table.physical_len >= 0


@pytest.mark.parametrize("mode", MODES)
def test_s26_a_block_read_by_an_outstanding_step_is_returned_once_behind_it(mode: str) -> None:
    """Given a scheduled step that reads a block and has not run; when all tokens of the block are
    evicted, the block is returned and handed to another request in the next step; then the
    outstanding step still reads the old bytes, the new owner's come after it, and the block is
    returned once."""
    made = FakeEngine(mode=mode, block_size=4, num_blocks=7)
    made.add("a", prompt_len=11)
    made.step()
    block = int(made.table("a").blocks[1])
    outstanding = made.schedule()
    made.evict("a", range(4, 8))
    made.add("b", prompt_len=12, family=1)
    following = made.schedule()
    assert block in made.table("b").blocks
    assert made.reclaimer.counters.released_blocks == 1
    made.execute(outstanding)  # its attention finds the bytes of all 12 tokens
    made.execute(following)
    made.verify()
    made.finish("b")
    made.finish("a")
    assert sorted(made.pool.free) == list(range(1, 7))


@pytest.mark.parametrize("mode", MODES)
def test_s26_the_control_that_runs_the_new_owner_first_is_caught(mode: str) -> None:
    """Given the same; when the steps run in the wrong order; then wrong bytes are seen: the order
    of execution is the fence, and the test above can fail."""
    made = FakeEngine(mode=mode, block_size=4, num_blocks=7)
    made.add("a", prompt_len=11)
    made.step()
    block = int(made.table("a").blocks[1])
    outstanding = made.schedule()
    made.evict("a", range(4, 8))
    made.add("b", prompt_len=12, family=1)
    following = made.schedule()
    assert block in made.table("b").blocks
    following.changes.clear()  # "a" keeps its old row: only the new owner's writes run early
    following.rows = [row for row in following.rows if row.req_id == "b"]
    following.taps = None
    made.execute(following)
    with pytest.raises((AssertionError, InvariantViolation)):
        made.execute(outstanding)


def test_s28_a_plan_larger_than_the_workspace_is_split_and_gets_through() -> None:
    """Given a request whose plan moves many times what the workspace holds; when the step runs;
    then it is copied in parts of at most the workspace, each of which moves something, and every
    byte is right."""
    made = engine("eager", 16, tokens=400, num_blocks=60)
    parts: list[int] = []
    layout = made.layout
    made.mover = Mover(layout, workspace_bytes=3 * layout.token_bytes)
    real = layout.copy_slots

    def copy_slots(sources: torch.Tensor, targets: torch.Tensor) -> None:
        parts.append(len(sources))
        real(sources, targets)

    layout.copy_slots = copy_slots  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    made.evict("a", rng.choice(made.evictable("a"), size=200, replace=False))
    made.step()
    made.verify()
    assert made.reclaimer.counters.moved == sum(parts) > 40
    assert max(parts) == 3
    assert min(parts) > 0
    assert isinstance(layout, KVLayout)


def test_two_steps_ahead_of_the_worker_moves_and_reads_still_match() -> None:
    """Given evictions and plans in three steps that are all scheduled before the first one runs;
    when they run in order; then each one's attention sees the bytes it was scheduled for."""
    made = engine("eager", 4, tokens=22)
    steps = []
    for victims in ([1, 5, 9, 13], [2, 6, 10], [0, 4, 8, 12, 16]):
        made.evict("a", victims)
        steps.append(made.schedule())
    assert sum(len(change.token_ids) for step in steps for change in step.changes) > 0
    for step in steps:
        made.execute(step)
    made.verify()
