"""Each law's online check fires on a fault that is seeded into a running engine.

A fault is tried at the lowest level that promises to find it and at every level above. The
report names the law and, where the fault has them, the request, the token and the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import vtoken.core.reclaimer as reclaimer_module
from vtoken.checks.judge import screened
from vtoken.checks.online import SCAN_PERIOD, OnlineChecker
from vtoken.core import BackgroundParams, LayoutChange, RequestTable
from vtoken.errors import InvariantViolation
from vtoken.testing.harness import FakeEngine

Patch = pytest.MonkeyPatch


def scene(level: int, *, mode: str = "eager", shared: bool = False) -> FakeEngine:
    """Request "a": 11 tokens in blocks 1, 2, 3 of 4 slots, blocks 1 and 2 in the prefix cache;
    with `shared`, request "b" has adopted them."""
    engine = FakeEngine(mode=mode, block_size=4, num_blocks=12, level=level)
    engine.add("a", prompt_len=10)
    engine.step()
    if shared:
        engine.add("b", prompt_len=9)
    engine.step()
    assert engine.table("a").blocks.tolist() == [1, 2, 3]
    assert engine.table("a").logical_len == 11
    return engine


# The faults -------------------------------------------------------------------------------------


def free_twice(engine: FakeEngine, patch: Patch) -> None:
    engine.pool._free.append(engine.pool._free[0])


def leak(engine: FakeEngine, patch: Patch) -> None:
    engine.pool._free.pop()


def lose_reference(engine: FakeEngine, patch: Patch) -> None:
    engine.pool._refs[3] -= 1


def lose_shared_reference(engine: FakeEngine, patch: Patch) -> None:
    engine.pool._refs[1] -= 1


def gain_reference(engine: FakeEngine, patch: Patch) -> None:
    engine.pool._refs[3] += 1


def forget_the_newest(engine: FakeEngine, patch: Patch) -> None:
    real = RequestTable.append

    def append(self: RequestTable, *args: Any, **kwargs: Any) -> Any:
        positions = real(self, *args, **kwargs)
        self._live[self.logical_len - 1] = False
        return positions

    patch.setattr(RequestTable, "append", append)


def lose_the_newest_owner(engine: FakeEngine, patch: Patch) -> None:
    """The place of the newest token names another token as its owner."""
    real = RequestTable.append

    def append(self: RequestTable, *args: Any, **kwargs: Any) -> Any:
        positions = real(self, *args, **kwargs)
        self._owner[positions[-1]] = 0
        return positions

    patch.setattr(RequestTable, "append", append)


def two_tokens_one_slot(engine: FakeEngine, patch: Patch) -> None:
    engine.table("a")._position[6] = engine.table("a")._position[5]
    engine.evict("a", [0])


def quiet_slot_swap(engine: FakeEngine, patch: Patch) -> None:
    engine.table("a")._position[6] = engine.table("a")._position[5]


def write_protection_off(engine: FakeEngine, patch: Patch) -> None:
    """The pool calls every block private, and nothing leaves the prefix cache."""
    patch.setattr(engine.pool, "private", lambda blocks: np.ones(len(blocks), dtype=np.bool_))
    patch.setattr(engine.pool, "uncache", lambda blocks: None)


def move_into_a_shared_block(engine: FakeEngine, patch: Patch) -> None:
    write_protection_off(engine, patch)
    engine.evict("a", [1, 2, 9])


def write_into_a_shared_block(engine: FakeEngine, patch: Patch) -> None:
    write_protection_off(engine, patch)
    engine.evict("a", [1])


def write_into_a_cached_block(engine: FakeEngine, patch: Patch) -> None:
    patch.setattr(engine.pool, "uncache", lambda blocks: None)
    engine.evict("a", [1])


def move_into_a_cached_block(engine: FakeEngine, patch: Patch) -> None:
    patch.setattr(engine.pool, "uncache", lambda blocks: None)
    engine.evict("a", [1, 2])


def move_onto_a_live_token(engine: FakeEngine, patch: Patch) -> None:
    real = reclaimer_module.plan_dense

    def plan(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        return made and replace(made, targets=np.zeros_like(made.targets))

    patch.setattr(reclaimer_module, "plan_dense", plan)
    engine.evict("a", [1, 2])


def stale_plan(engine: FakeEngine, patch: Patch) -> None:
    real = reclaimer_module.plan_dense

    def plan(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        return made and replace(made, version=made.version - 1)

    patch.setattr(reclaimer_module, "plan_dense", plan)
    engine.evict("a", [1, 2])


def recycle_a_live_slot(engine: FakeEngine, patch: Patch) -> None:
    engine.reclaimer._holes["a"] = 5


def hand_out_a_block_in_use(engine: FakeEngine, patch: Patch) -> None:
    patch.setattr(engine.pool, "_take", lambda: 3)
    engine.add("c", prompt_len=2, family=9)


def tamper_access(
    change: Callable[[dict[str, Any]], object], *, evict: tuple[int, ...] = (1,)
) -> Callable[[FakeEngine, Patch], None]:
    def sabotage(engine: FakeEngine, patch: Patch) -> None:
        real = engine.worker.check_access

        def check(table: object, **buffers: Any) -> None:
            change(buffers)
            real(table, **buffers)  # type: ignore[arg-type]

        patch.setattr(engine.worker, "check_access", check)
        engine.evict("a", evict)

    return sabotage


def read_a_dead_slot(buffers: dict[str, Any]) -> None:
    buffers["gathered"] = np.append(buffers["gathered"], 5)


def read_twice(buffers: dict[str, Any]) -> None:
    buffers["gathered"] = np.append(buffers["gathered"], 8)


def read_a_foreign_block(buffers: dict[str, Any]) -> None:
    buffers["block_row"][0] = 9


def read_one_less(buffers: dict[str, Any]) -> None:
    buffers["seq_len"] -= 1


def ask_from_physical_positions(buffers: dict[str, Any]) -> None:
    buffers["query_positions"] = buffers["query_positions"] - 1


def write_one_further(buffers: dict[str, Any]) -> None:
    buffers["writes"] = buffers["writes"] + 1


def wrong_length(engine: FakeEngine, patch: Patch) -> None:
    real = engine.worker.check_lengths
    patch.setattr(
        engine.worker,
        "check_lengths",
        lambda req_ids, lengths, live: real(req_ids, lengths + 1, live),
    )


def copy_keys_only(engine: FakeEngine, patch: Patch) -> None:
    """V of one head of the last layer is not what it was."""
    real = engine.mover.move

    def move(sources: torch.Tensor, targets: torch.Tensor) -> None:
        real(sources, targets)
        values = engine.layout.read(targets)
        values[:, -1, 1, -1, -1] += 1
        engine.layout.write(targets, values)

    patch.setattr(engine.mover, "move", move)
    engine.evict("a", [1, 2])


def copy_nothing(engine: FakeEngine, patch: Patch) -> None:
    patch.setattr(engine.mover, "move", lambda sources, targets: None)
    engine.evict("a", [1, 2])


def overwrite_a_value(engine: FakeEngine, patch: Patch) -> None:
    slot = torch.tensor([engine.table("a").slot_of(6)])
    values = engine.layout.read(slot)
    values[:, 0, 1] += 1
    engine.layout.write(slot, values)


def drift_from_the_model(engine: FakeEngine, patch: Patch) -> None:
    """The real table forgets a hole's token; every law of one state still holds."""
    table = engine.table("a")
    table.evict(np.array([1], dtype=np.int32))


@dataclass(frozen=True)
class Fault:
    name: str
    law: str
    level: int
    sabotage: Callable[[FakeEngine, Patch], None]
    words: str
    req_id: str | None = "a"
    token_id: int | None = None
    slot: int | None = None
    mode: str = "eager"
    shared: bool = False
    steps: int = 1


FAULTS = [
    Fault("block freed twice", "L5", 1, free_twice, "free", req_id=None),
    Fault("block leaked", "L5", 1, leak, "free", req_id=None),
    Fault(
        "reference lost", "L5", 2, lose_reference, "block 3 has 0 reference(s)", req_id=None,
        steps=SCAN_PERIOD + 1,
    ),
    Fault(
        "reference lost, seen at once", "L5", 3, lose_reference, "block 3 has 0 reference(s)",
        req_id=None,
    ),
    Fault(
        "reference of a shared block lost", "I2", 2, lose_shared_reference,
        "block 1 has 1 reference(s)", token_id=0, slot=4, shared=True, steps=SCAN_PERIOD + 1,
    ),
    Fault("reference gained", "L5", 3, gain_reference, "references to block 3", req_id=None),
    Fault("newest token forgotten", "I2", 1, forget_the_newest, "counters", token_id=11, slot=15),
    Fault("newest place lost", "I2", 1, lose_the_newest_owner, "counters", token_id=11, slot=15),
    Fault("two tokens, one slot", "I2", 2, two_tokens_one_slot, "token 5", token_id=6, slot=9),
    Fault(
        "the same in a request that rests", "I2", 2, quiet_slot_swap, "token 5", token_id=6,
        slot=9, steps=SCAN_PERIOD + 1,
    ),
    Fault("stale plan", "I4", 1, stale_plan, "version"),
    Fault(
        "move into a shared block", "I4", 1, move_into_a_shared_block, "shared or cached",
        token_id=10, slot=5, shared=True,
    ),
    Fault(
        "move into a cached block", "I4", 1, move_into_a_cached_block, "shared or cached",
        token_id=10, slot=5,
    ),
    Fault(
        "move onto a live token", "I4", 2, move_onto_a_live_token, "live token 0", token_id=10,
        slot=4,
    ),
    Fault(
        "live slot recycled", "L7", 1, recycle_a_live_slot, "live token 5", token_id=11, slot=9
    ),
    Fault(
        "block in use handed out", "L7", 1, hand_out_a_block_in_use, "alone", req_id="c",
        token_id=0, slot=12,
    ),
    Fault(
        "write into a shared block", "L7", 1, write_into_a_shared_block, "shared block",
        token_id=11, slot=4, shared=True,
    ),
    Fault(
        "write into a cached block", "L7", 1, write_into_a_cached_block, "prefix cache",
        token_id=11, slot=4,
    ),
    Fault("wrong length", "L6", 1, wrong_length, "12 live", mode="off"),
    Fault(
        "dead slot read", "L6", 2, tamper_access(read_a_dead_slot), "dead token", token_id=1,
        slot=5, mode="off",
    ),
    Fault(
        "slot read twice", "L6", 2, tamper_access(read_twice), "2 times", token_id=4, slot=8,
        mode="off",
    ),
    Fault(
        "foreign block read", "L6", 2, tamper_access(read_a_foreign_block), "foreign slot",
        slot=36,
    ),
    Fault("live token not read", "L6", 2, tamper_access(read_one_less), "not read", token_id=10),
    Fault(
        "physical query position", "L6", 2, tamper_access(ask_from_physical_positions),
        "query positions",
    ),
    Fault(
        "wrong write slot", "L7", 2, tamper_access(write_one_further), "another slot",
        token_id=11, slot=6,
    ),
    Fault("V not copied", "I1", 2, copy_keys_only, "payload changed", token_id=10),
    Fault("nothing copied", "I1", 2, copy_nothing, "payload changed", token_id=10),
    Fault("value overwritten", "I1", 3, overwrite_a_value, "payload changed", token_id=6),
    Fault(
        "table unlike the model", "L6", 3, drift_from_the_model, "is not read", req_id=None,
        mode="off",
    ),
]  # fmt: skip

AT_LEVELS = [(fault, level) for fault in FAULTS for level in range(fault.level, 4)]


def run(fault: Fault, level: int, patch: Patch) -> None:
    engine = scene(level, mode=fault.mode, shared=fault.shared)
    fault.sabotage(engine, patch)
    for _ in range(fault.steps):
        engine.step()


@pytest.mark.parametrize(
    ("fault", "level"), AT_LEVELS, ids=[f"{fault.name}-{level}" for fault, level in AT_LEVELS]
)
def test_a_seeded_fault_is_reported_with_its_law(
    fault: Fault, level: int, monkeypatch: Patch
) -> None:
    """Claim: found at the level that promises it and above, under the right law, with the
    request, token and slot concerned."""
    with pytest.raises(InvariantViolation) as caught:
        run(fault, level, monkeypatch)
    found = caught.value
    if level == fault.level:
        assert (found.law, found.req_id) == (fault.law, fault.req_id)
        assert fault.words in found.message
        if fault.token_id is not None:
            assert found.token_id == fault.token_id
        if fault.slot is not None:
            assert found.slot == fault.slot
    report = str(found)
    assert f"law {found.law}" in report
    assert found.req_id is None or found.req_id in report


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", ["off", "eager"])
def test_without_a_fault_nothing_is_reported(level: int, shared: bool, mode: str) -> None:
    engine = scene(level, mode=mode, shared=shared)
    for step in range(2 * SCAN_PERIOD):
        engine.evict("a", engine.evictable("a")[: step % 3])
        engine.step()
        engine.verify()


def test_faults_of_every_online_law_are_seeded() -> None:
    assert {fault.law for fault in FAULTS} == {"I1", "I2", "I4", "L5", "L6", "L7"}


@pytest.mark.parametrize(
    ("level", "laws"),
    [
        (0, set()),
        (1, {"I2", "I4", "L5", "L7"}),
        (2, {"I2", "I4", "L5", "L7"}),
        (3, {"I2", "I4", "L5", "L7"}),
    ],
)
def test_counts_grow_with_every_step_and_by_level(level: int, laws: set[str]) -> None:
    engine = scene(level)
    totals = []
    for _ in range(4):
        engine.evict("a", engine.evictable("a")[:2])  # one hole alone needs no plan
        engine.step()
        totals.append(engine.checker.counts())
    assert set(totals[-1]) == laws
    for law in laws:
        assert totals[-1][law] > totals[0][law]


def test_the_worker_counts_rows_writes_and_moved_tokens() -> None:
    seen = {}
    for level in range(4):
        engine = scene(level)
        engine.evict("a", [1, 2])
        engine.step()
        seen[level] = engine.worker.counts()
    assert seen[0] == {}
    assert seen[1] == {"L6": 3}
    assert set(seen[2]) == {"I1", "L6", "L7"}
    assert seen[2]["I1"] == 1
    assert seen[3]["I1"] > 1


# Direct calls: faults that no running engine can be brought to ----------------------------------


def test_a_write_into_a_block_of_nobody_is_reported() -> None:
    engine = scene(1)
    with pytest.raises(InvariantViolation, match="does not own") as caught:
        engine.checker.writing(engine.table("a"), np.array([4 * 9], dtype=np.int32), ())
    assert (caught.value.law, caught.value.slot) == ("L7", 36)


def test_a_write_into_a_block_of_another_request_is_reported() -> None:
    engine = scene(1)
    engine.add("c", prompt_len=2, family=9)
    engine.step()
    theirs = engine.table("c").slot_of(0)
    with pytest.raises(InvariantViolation, match="does not own"):
        engine.checker.writing(engine.table("a"), np.array([theirs], dtype=np.int32), ())


def test_the_null_block_is_never_written() -> None:
    engine = scene(1)
    with pytest.raises(InvariantViolation, match="alone") as caught:
        engine.checker.writing(engine.table("a"), np.array([0], dtype=np.int32), (0,))
    assert caught.value.law == "L7"


def test_a_block_returned_twice_is_reported_with_the_request() -> None:
    """S06, the table's side: the second return of the same block is refused."""
    engine = scene(1)
    none = np.empty(0, dtype=np.int32)
    change = LayoutChange("a", none, none, none, [1, 2], [3, 3], trimmed=False)
    with pytest.raises(InvariantViolation, match="block 3 is returned more often") as caught:
        engine.checker.reclaimed(engine.table("a"), change)
    assert (caught.value.law, caught.value.req_id) == ("L5", "a")


def test_two_plans_of_one_request_in_one_step_are_refused() -> None:
    """Claim (I4): the second would replace moves that the worker has not heard of."""
    engine = scene(1)
    engine.reclaimer.evict("a", np.array([1, 2], dtype=np.int32))
    engine.reclaimer.prepare("a", pending=1)
    engine.reclaimer.evict("a", np.array([5], dtype=np.int32))
    with pytest.raises(InvariantViolation, match="twice in one step") as caught:
        engine.reclaimer.prepare("a", pending=1)
    assert caught.value.law == "I4"


def test_an_identical_prompt_in_the_same_step_is_no_violation() -> None:
    """Claim: vLLM caches blocks as it allots them, so the second of two equal prompts shares
    them before the first is registered; both are served at every level."""
    for level in (1, 2, 3):
        engine = FakeEngine(mode="eager", block_size=4, num_blocks=12, level=level)
        engine.add("a", prompt_len=10)
        engine.add("b", prompt_len=10)
        engine.step()
        engine.verify()
        assert engine.pool.ref_count(engine.table("a").blocks[0]) == 2
        engine.evict("a", [1, 5])
        engine.step()
        engine.verify()


def test_a_preempted_request_may_come_back_with_other_payloads() -> None:
    """Claim: I1 over time speaks of one life of a request, also when all of the next one comes
    from the prefix cache."""
    engine = FakeEngine(mode="eager", block_size=2, num_blocks=30)
    engine.add("a", prompt_len=13)
    engine.step(cap=5)
    engine.evict("a", [1])
    engine.step(cap=4)
    engine.step(cap=1)
    engine.preempt("a")
    engine.add("b", prompt_len=13)
    engine.waiting.reverse()  # "b" computes the prompt that "a" then adopts
    engine.step()
    engine.verify()


@pytest.mark.parametrize(
    ("place", "law", "words"),
    [
        ("headroom", "L5", "headroom blocks differ"),
        ("held", "L11", "is headroom while a copy may still touch it"),
    ],
)
def test_headroom_and_held_blocks_are_told_apart(place: str, law: str, words: str) -> None:
    """Claim: a pool that counts headroom among the held blocks breaks no law of one state, and the
    model in lock step tells; one that counts a held block as headroom would let it be drawn while
    a copy goes there."""
    params = BackgroundParams(headroom=1, threshold=0.01, commit_delay=8, copy_out=True)
    engine = FakeEngine(mode="background", block_size=4, num_blocks=24, background=params)
    engine.add("a", prompt_len=17, family=1)
    engine.step()
    engine.add("b", prompt_len=18, family=1)
    engine.step()
    engine.step()
    assert len(engine.pool.headroom) == 1
    beside = engine.reclaimer.background
    assert beside is not None
    if place == "held":  # a plan that draws it: few tokens stay in blocks that b shares
        engine.evict("a", [*range(1, 4), *range(5, 8), *range(9, 12)])
        engine.step()
        assert len(beside.held) == 1
    wrong = list(engine.pool.headroom) if place == "headroom" else []
    engine.pool.held_by = lambda: wrong
    with pytest.raises(InvariantViolation, match=words) as caught:
        engine.step()
    assert caught.value.law == law


def test_two_forms_that_differ_are_a_fault_of_the_checks() -> None:
    with pytest.raises(InvariantViolation, match="two forms differ"):
        screened(law="I2", holds=False, breaches=iter(()), what="x")
    screened(law="I2", holds=True, breaches=iter(()), what="x")


def test_level_0_asks_for_no_view() -> None:
    checker = OnlineChecker(level=0)
    checker.end_step()
    assert checker.counts() == {}
    assert not checker.watches_reads("a")
