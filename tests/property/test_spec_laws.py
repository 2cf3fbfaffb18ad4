"""Each law can fail, alone, and its message says what is wrong.

A healthy scene satisfies every law. Each case breaks one thing in it by hand; exactly the named
law must report it, in words that name the law, the request, the token, the slot, before and
after. The scene is made of plain fakes, so that laws are tested against views the model would
never produce. Blocks of 2 slots, 10 blocks; block 1 is shared by a and b, block 6 is cached, and
a plan of b that empties block 4 into block 9 is in flight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain, combinations
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import vtoken_spec as spec
from vtoken_spec import NO_SLOT, Move, Plan, ReadSet, Write


@dataclass
class FakeRequest:
    req_id: str
    blocks: list[int]
    slots: list[int]
    live: list[bool]
    physical_len: int
    logical_len: int


@dataclass
class FakePool:
    num_blocks: int = 10
    block_size: int = 2
    free: list[int] = field(default_factory=lambda: [6, 7])
    headroom: list[int] = field(default_factory=lambda: [8])
    held: list[int] = field(default_factory=lambda: [9])
    refs: list[int] = field(default_factory=lambda: [0, 2, 1, 1, 1, 1, 0, 0, 0, 0])
    cached: set[int] = field(default_factory=lambda: {6})

    def ref_count(self, block: int) -> int:
        return self.refs[block]

    def is_cached(self, block: int) -> bool:
        return block in self.cached


def request_a() -> FakeRequest:
    """Token 2 is a hole at slot 4, token 3 has been reclaimed, token 5 was moved before 4."""
    slots = [2, 3, 4, NO_SLOT, 7, 5]
    live = [True, True, False, False, True, True]
    return FakeRequest("a", [1, 2, 3], slots, live, 6, 6)


def request_b() -> FakeRequest:
    return FakeRequest("b", [1, 4, 5], [2, 3, 8, 9, 10], [True] * 5, 5, 5)


@dataclass
class FakeFlight:
    plan: Plan
    waited: bool = False
    aborted: bool = False

    @property
    def req_id(self) -> str:
        return self.plan.req_id


def flight_of(req_id: str, *moves: tuple[int, int, int], **fields: object) -> FakeFlight:
    """An aborted plan, unless `fields` say otherwise: its moves may still be running."""
    plan = Plan(req_id, 0, (), tuple(Move(*move) for move in moves), (), "reclaim")
    return FakeFlight(plan, **{"aborted": True, **fields})  # type: ignore[arg-type]


def flight_of_b() -> FakeFlight:
    moves = (Move(2, 8, 18), Move(3, 9, 19))
    return FakeFlight(Plan("b", 7, (1, 4, 5), moves, (4,), "dense"))


@dataclass
class Scene:
    """Everything the laws look at, healthy unless changed."""

    pool: FakePool = field(default_factory=FakePool)
    a: FakeRequest = field(default_factory=request_a)
    b: FakeRequest = field(default_factory=request_b)
    read: ReadSet = field(default_factory=lambda: ReadSet("a", [2, 3, 5, 7], [5]))
    chunk: ReadSet = field(default_factory=lambda: ReadSet("b", [2, 3, 8, 9, 10], [2, 3, 4]))
    writes: list[Write] = field(default_factory=lambda: [Write("a", 6, 4), Write("b", 5, 11)])
    plan: Plan = field(
        default_factory=lambda: Plan("a", 3, (1, 2, 3), (Move(4, 7, 4),), (3,), "reclaim")
    )
    version: int = 3
    flights: list[FakeFlight] = field(default_factory=lambda: [flight_of_b()])
    version_at_commit: int = 7
    overdue: dict[str, int] = field(default_factory=lambda: {"a": 4, "b": 99, "gone": 99})
    kept: dict[int, bytes] = field(default_factory=lambda: {0: b"k0", 1: b"k1"})
    shared: dict[int, bytes] = field(default_factory=lambda: {2: b"k0", 12: b"z"})
    seen: dict[str, dict[int, bytes]] = field(default_factory=lambda: {"a": {0: b"k0"}})

    @property
    def requests(self) -> dict[str, FakeRequest]:
        return {"a": self.a, "b": self.b}


def breaches(scene: Scene) -> Iterator[spec.Breach]:
    """Every law, over the whole scene. Nothing of b could come back, so it is never overdue."""
    yield from spec.i1_conservation({0: b"k0", 1: b"k1"}, scene.kept, req_id="a")
    yield from spec.i2_unique_mapping(scene)
    yield from spec.i3_visibility(scene, scene.read)
    yield from spec.i3_visibility(scene, scene.chunk)
    yield from spec.i4_planning(scene, scene.plan, version=scene.version, in_flight=True)
    for flight in scene.flights:
        if not flight.aborted:
            yield from spec.i4_commit(scene, flight, version=scene.version_at_commit)
    yield from spec.l5_accounting(scene)
    yield from spec.l6_read_set(scene, scene.read)
    yield from spec.l6_read_set(scene, scene.chunk)
    yield from spec.l7_write_safety(scene, scene.writes)
    yield from spec.l8_sharing({2: b"k0", 12: b"z"}, scene.shared)
    yield from spec.l9_neutrality({"a": {0: b"k0"}}, scene.seen)
    yield from spec.l10_progress(scene, scene.overdue, bound=4)
    yield from spec.l11_fence(scene)


Break = Callable[[Scene], object]


def sets(**fields: object) -> Break:
    def apply(scene: Scene) -> None:
        for path, value in fields.items():
            *owners, name = path.split("__")
            target: object = scene
            for owner in owners:
                target = getattr(target, owner)
            setattr(target, name, value)

    return apply


def plans(**fields: object) -> Break:
    return lambda scene: setattr(scene, "plan", replace(scene.plan, **fields))  # type: ignore[arg-type]


def one_block_more(scene: Scene) -> None:
    """a also owns block 7, which is unused and behind its physical end."""
    scene.a.blocks.append(7)
    scene.pool.free.remove(7)
    scene.pool.refs[7] = 1
    plans(blocks=(1, 2, 3, 7))(scene)


def table_of_b_switched(scene: Scene) -> None:
    """As after a commit of b's plan."""
    scene.b = FakeRequest("b", [1, 9, 5], [2, 3, 18, 19, 10], [True] * 5, 5, 5)
    scene.chunk = ReadSet("b", [2, 3, 18, 19, 10], [2, 3, 4])
    scene.pool.held, scene.pool.refs[9], scene.pool.refs[4] = [4], 1, 0


CASES: dict[str, tuple[str, Break, str]] = {
    "lost": ("I1", lambda s: s.kept.pop(1), "request 'a', token 1: live token lost"),
    "invented": ("I1", lambda s: s.kept.update({7: b"?"}), "token 7: live token invented"),
    "changed": (
        "I1",
        lambda s: s.kept.update({1: b"k0"}),
        "request 'a', token 1: payload changed by a relocation (before: b'k1', after: b'k0')",
    ),
    "lengths": ("I2", sets(b__logical_len=6, chunk=ReadSet("b", [2, 3, 8, 9, 10], [5])), "count"),
    "physical length": ("I2", sets(b__physical_len=7), "7 does not fit 6 owned slots"),
    "behind the end": ("I2", sets(b__physical_len=4), "token 4, slot 10: position 4 is not before"),
    "block twice": ("I2", lambda s: s.b.blocks.append(5), "block 5 listed 2 times"),
    "foreign block": (
        "I2",
        sets(a__slots=[2, 3, 13, NO_SLOT, 7, 5]),
        "request 'a', token 2, slot 13: block 6 is not owned",
    ),
    "outside": ("I2", sets(a__slots=[2, 3, 99, -1, 7, 5]), "token 2, slot 99: slot is outside"),
    "no slot": (
        "I2",
        sets(
            b__slots=[2, 3, NO_SLOT, 9, 10], chunk=ReadSet("b", [2, 3, NO_SLOT, 9, 10], [2, 3, 4])
        ),
        "request 'b', token 2: live token has no slot",
    ),
    "two tokens": (
        "I2",
        sets(a__slots=[2, 3, 5, NO_SLOT, 7, 5]),
        "request 'a', token 5, slot 5: slot already belongs to token 2",
    ),
    "two ids": (
        "I2",
        sets(b__slots=[3, 2, 8, 9, 10]),
        "slot 2: shared under different logical ids {'a': 0, 'b': 1}",
    ),
    "read before the wait": (
        "I3",
        lambda s: (table_of_b_switched(s), setattr(s.flights[0], "aborted", True)),
        "request 'b', slot 18: slot is read while a copy of request 'b' may still write it",
    ),
    "version": ("I4", sets(version=4), "another table version (before: 3, after: 4)"),
    "block list": ("I4", plans(blocks=(1, 3, 2)), "another block list"),
    "gone": ("I4", plans(req_id="c"), "request 'c': plan for an unknown request"),
    "dead source": (
        "I4",
        plans(moves=(Move(2, 4, 6),)),
        "request 'a', token 2, slot 4: source is not the slot of this live token",
    ),
    "other token's source": (
        "I4",
        plans(moves=(Move(4, 5, 4),), released=(3,)),
        "request 'a', token 4, slot 5: source is not the slot of this live token",
    ),
    "source twice": ("I4", plans(moves=(Move(4, 7, 4), Move(4, 7, 4))), "source is moved twice"),
    "live target": ("I4", plans(moves=(Move(4, 7, 5),)), "slot 5: target is the slot of live"),
    "target twice": ("I4", plans(moves=(Move(4, 7, 4), Move(5, 5, 4))), "target is used twice"),
    "null target": ("I4", plans(moves=(Move(4, 7, 1),)), "slot 1: target lies in the null block"),
    "foreign target": ("I4", plans(moves=(Move(4, 7, 11),)), "block 5 is neither owned nor"),
    "shared target": (
        "I4",
        lambda s: (
            sets(a__live=[True, False, False, False, True, True])(s),
            plans(moves=(Move(4, 7, 3),))(s),
            sets(read=ReadSet("a", [2, 7, 5], [5]))(s),
        ),
        "token 4, slot 3: target block 1 is shared or cached",
    ),
    "cached target": (
        "I4",
        sets(pool__cached={2}, writes=[Write("a", 6, 6)]),
        "token 4, slot 4: target block 2 is shared or cached",
    ),
    "released live": ("I4", plans(moves=()), "token 4, slot 7: released block 3 still holds"),
    "released foreign": ("I4", plans(released=(3, 5)), "released block 5 is not owned"),
    "released twice": ("I4", plans(released=(3, 3)), "block 3 released 2 times"),
    "no gain": ("I4", plans(released=()), "does not lower the block count (before: 3, after: 3)"),
    "headroom kept": ("I4", plans(moves=(Move(4, 7, 16),)), "not lower the block count"),
    "a second plan": (
        "I4",
        lambda s: s.flights.append(flight_of("a", (5, 5, 18))),
        "request 'a': a plan of the request is in flight already",
    ),
    "target of another plan": (
        "I4",
        lambda s: (
            setattr(s.flights[0], "waited", True),
            plans(moves=(Move(4, 7, 18),), purpose="dense")(s),
            sets(pool__headroom=[8, 9], pool__held=[])(s),
        ),
        "token 4, slot 18: target is a slot of request 'b''s plan in flight",
    ),
    "source of another plan": (
        "I4",
        sets(flights=[flight_of("c", (0, 4, 18))], writes=[]),
        "token 4, slot 4: target is a slot of request 'c''s plan in flight",
    ),
    "target at the end": (
        "I4",
        lambda s: (one_block_more(s), plans(moves=(Move(4, 7, 14),))(s)),
        "token 4, slot 14: target lies at or behind the physical end",
    ),
    "released at the end": (
        "I4",
        lambda s: (one_block_more(s), plans(released=(3, 7))(s)),
        "request 'a': released block 7 is where new tokens go",
    ),
    "order in flight": (
        "I4",
        plans(order=(1, 2)),
        "request 'a': a plan in flight keeps the order of blocks",
    ),
    "version at commit": (
        "I4",
        sets(version_at_commit=8),
        "request 'b': plan made from another table version (before: 7, after: 8)",
    ),
    "block list at commit": (
        "I4",
        sets(b__blocks=[1, 5, 4], b__physical_len=6),
        "request 'b': plan made from another block list",
    ),
    "released live at commit": (
        "I4",
        lambda s: sets(flights=[FakeFlight(replace(s.flights[0].plan, moves=(Move(2, 8, 18),)))])(
            s
        ),
        "request 'b', token 3, slot 9: released block 4 still holds a live token after the moves",
    ),
    "gone at commit": (
        "I4",
        lambda s: s.flights.append(flight_of("c", (0, 6, 18), aborted=False)),
        "request 'c': commit of a request that is gone",
    ),
    "leak": (
        "L5",
        sets(pool__free=[6]),
        "pool: free 1 + owned 5 + headroom 1 + held 1 = 8, not the 9 blocks",
    ),
    "free twice": ("L5", sets(pool__free=[6, 6]), "block 6 is free and free"),
    "free and owned": ("L5", sets(pool__free=[6, 5]), "block 5 is free and owned"),
    "free and headroom": ("L5", sets(pool__free=[6, 8]), "block 8 is free and headroom"),
    "held and headroom": ("L5", sets(pool__free=[6], pool__held=[8, 9]), "headroom and held"),
    "nowhere and outside": ("L5", sets(pool__free=[6, 10]), "block 10 is free, but outside"),
    "nowhere": ("L5", sets(pool__free=[6, 6]), "block 7 is in no place"),
    "null free": ("L5", sets(pool__free=[6, 0]), "the null block is free"),
    "null owned": (
        "L5",
        lambda s: (s.b.blocks.append(0), s.pool.free.pop()),
        "the null block is owned",
    ),
    "few references": (
        "L5",
        sets(
            pool__refs=[0, 1, 1, 1, 1, 1, 0, 0, 0, 0],
            b__slots=[-1, -1, 8, 9, 10],
            b__live=[False, False, True, True, True],
            chunk=ReadSet("b", [8, 9, 10], [2, 3, 4]),
            overdue={},
        ),
        "block 1 has 1 reference(s) for 2 owner(s)",
    ),
    "free but referred to": (
        "L5",
        sets(pool__refs=[0, 2, 1, 1, 1, 1, 1, 0, 0, 0]),
        "free block 6 has 1 reference(s)",
    ),
    "dead read": (
        "L6",
        sets(read=ReadSet("a", [2, 3, 4, 5, 7], [5])),
        "request 'a', token 2, slot 4: dead token is read",
    ),
    "foreign read": ("L6", sets(read=ReadSet("a", [2, 3, 5, 7, 8], [5])), "slot 8: foreign slot"),
    "not read": ("L6", sets(read=ReadSet("a", [2, 5, 7], [5])), "token 1, slot 3: live token is n"),
    "read twice": ("L6", sets(read=ReadSet("a", [2, 3, 3, 5, 7], [5])), "slot 3: live token is r"),
    "physical query": (
        "L6",
        sets(read=ReadSet("a", [2, 3, 5, 7], [3])),
        "query positions are not the newest logical ids (before: [5], after: [3])",
    ),
    "unknown read": ("L6", sets(read=ReadSet("c", [], [])), "read set of an unknown request"),
    "chunk out of order": (
        "L6",
        sets(chunk=ReadSet("b", [2, 3, 9, 8, 10], [2, 3, 4])),
        "slots of a chunk are not read last and in order (before: [8, 9, 10], after: [9, 8, 10])",
    ),
    "chunk not last": (
        "L6",
        sets(chunk=ReadSet("b", [8, 9, 10, 2, 3], [2, 3, 4])),
        "slots of a chunk are not read last",
    ),
    "onto live": (
        "L7",
        sets(writes=[Write("a", 6, 7)]),
        "request 'a', token 6, slot 7: write onto live token 4 of request 'a'",
    ),
    "onto foreign": ("L7", sets(writes=[Write("a", 6, 11)]), "block 5, which the request does not"),
    "onto null": ("L7", sets(writes=[Write("a", 6, 0)]), "slot 0: write into the null block"),
    "onto shared": (
        "L7",
        sets(
            a__blocks=[1, 2, 3, 7],
            pool__refs=[0, 2, 1, 1, 1, 1, 0, 2, 0, 0],
            pool__free=[6],
            plan=Plan("a", 3, (1, 2, 3, 7), (Move(4, 7, 4),), (3,), "reclaim"),
            writes=[Write("a", 6, 14)],
        ),
        "write into block 7, which is shared or cached",
    ),
    "onto cached": (
        "L7",
        sets(pool__cached={3}, writes=[Write("a", 6, 6)]),
        "token 6, slot 6: write into block 3, which is shared or cached",
    ),
    "written twice": (
        "L7",
        sets(writes=[Write("a", 6, 4), Write("a", 7, 4)]),
        "token 7, slot 4: slot is written twice in one step",
    ),
    "onto a source in flight": (
        "L7",
        sets(flights=[flight_of("c", (0, 6, 18))], writes=[Write("a", 6, 6)]),
        "token 6, slot 6: write onto a slot of request 'c''s plan in flight",
    ),
    "onto a target in flight": (
        "L7",
        lambda s: (
            s.flights.append(flight_of("b", (2, 8, 11))),
            sets(writes=[Write("b", 5, 11)])(s),
        ),
        "token 5, slot 11: write onto a slot of request 'b''s plan in flight",
    ),
    "unknown writer": ("L7", sets(writes=[Write("c", 0, 14)]), "request 'c', token 0, slot 14"),
    "shared bytes": (
        "L8",
        lambda s: s.shared.update({2: b"new"}),
        "slot 2: shared or cached bytes changed (before: b'k0', after: b'new')",
    ),
    "shared bytes gone": ("L8", lambda s: s.shared.pop(12), "slot 12"),
    "sees other bytes": ("L9", lambda s: s.seen["a"].update({0: b"x"}), "request 'a', token 0"),
    "sees more": ("L9", lambda s: s.seen["a"].update({1: b"x"}), "(before: 'absent', after: b'x')"),
    "sees less": ("L9", lambda s: s.seen.clear(), "(before: b'k0', after: 'absent')"),
    "overdue": (
        "L10",
        lambda s: s.overdue.update(a=5),
        "request 'a': 1 block(s) could have come back for 5 steps (before: 4, after: 5)",
    ),
    "free target": (
        "L11",
        sets(pool__free=[6, 7, 9], pool__held=[]),
        "request 'b': block 9 is free while a copy may still touch it",
    ),
    "headroom target": (
        "L11",
        sets(pool__headroom=[8, 9], pool__held=[]),
        "block 9 is headroom while",
    ),
    "free source": (
        "L11",
        lambda s: s.flights.append(flight_of("c", (0, 14, 18))),
        "request 'c': block 7 is free while a copy may still touch it",
    ),
    "another's target": (
        "L11",
        lambda s: (
            s.a.blocks.append(9),
            plans(blocks=(1, 2, 3, 9))(s),
            sets(pool__held=[], pool__refs=[0, 2, 1, 1, 1, 1, 0, 0, 0, 1])(s),
        ),
        "request 'b': block 9 is 'a''s while a copy may still write it",
    ),
}


def test_a_healthy_scene_breaks_no_law() -> None:
    assert [breach.message for breach in breaches(Scene())] == []


@pytest.mark.parametrize(("law", "break_it", "words"), CASES.values(), ids=CASES)
def test_a_fault_trips_its_law_and_no_other(law: str, break_it: Break, words: str) -> None:
    scene = Scene()
    break_it(scene)
    found = list(breaches(scene))
    assert {breach.law for breach in found} == {law}, [breach.message for breach in found]
    assert any(words in breach.message for breach in found), [b.message for b in found]
    for breach in found:
        assert breach.message.startswith(f"{law} {spec.LAWS[law].title}: ")
        for value in (breach.req_id, breach.token_id, breach.slot):
            assert value is None or repr(value) in breach.message


def test_a_slot_of_two_requests_without_a_second_reference_breaks_both_counts() -> None:
    """Sharing without a reference is a fault of the mapping and of the accounting alike."""
    scene = Scene()
    scene.pool.refs[1] = 1
    found = list(breaches(scene))
    assert {breach.law for breach in found} == {"I2", "L5"}
    assert any("held by ['a', 'b'], but block 1 has 1 reference" in b.message for b in found)


def test_a_dense_plan_is_exempt_from_the_gain_gate_only() -> None:
    scene = Scene()
    scene.plan = replace(scene.plan, released=(), purpose="dense")
    assert list(breaches(scene)) == []
    scene.plan = replace(scene.plan, moves=(Move(4, 7, 5),))
    assert {breach.law for breach in breaches(scene)} == {"I4"}


def test_after_the_wait_nothing_is_fenced_or_kept_from_attention() -> None:
    """The controls of I3 and L11: the same scenes, once the compute stream has waited."""
    scene = Scene()
    table_of_b_switched(scene)
    scene.flights[0] = replace(scene.flights[0], waited=True, aborted=True)
    assert list(breaches(scene)) == []
    scene.pool.free, scene.pool.held = [4, 6, 7], []
    assert list(breaches(scene)) == []


def test_a_source_may_be_read_while_it_is_copied() -> None:
    scene = Scene()
    assert {move.src for move in scene.flights[0].plan.moves} <= set(scene.chunk.slots)
    assert list(spec.i3_visibility(scene, scene.chunk)) == []


def test_the_owner_that_shares_a_source_is_nobody_else() -> None:
    """Only the blocks that are written must be the plan's alone."""
    scene = Scene()
    scene.flights.append(flight_of("c", (0, 6, 18)))
    assert list(spec.l11_fence(scene)) == []


def test_a_plan_in_flight_outlives_evictions_and_gained_blocks() -> None:
    scene = Scene()
    scene.b.live[2], scene.chunk = False, ReadSet("b", [2, 3, 9, 10], [4])
    scene.b.blocks.append(7)
    scene.pool.free, scene.pool.refs[7] = [6], 1
    assert list(breaches(scene)) == []


# L10: what could come back ------------------------------------------------------------------------


def table_of(places: int, live: tuple[int, ...], *, blocks: int, size: int) -> FakeRequest:
    """Blocks 1 ..; a live token at each of the positions `live`, all before `places`."""
    slots = [size + position for position in live]
    owned = list(range(1, blocks + 1))
    return FakeRequest("a", owned, slots, [True] * len(slots), places, len(slots))


def subsets(items: range | list[int]) -> Iterator[tuple[int, ...]]:
    """The largest first."""
    return chain.from_iterable(combinations(items, n) for n in range(len(items), -1, -1))


def most_that_a_plan_frees(scene: Scene, private: list[int]) -> int:
    """The most private blocks that any plan without headroom, allowed by I4, empties."""
    request, size = scene.a, scene.pool.block_size
    places = [block * size + offset for block in request.blocks for offset in range(size)]
    unused = [slot for slot in places if slot not in request.slots]
    for released in subsets(private):
        inside = [(t, s) for t, s in enumerate(request.slots) if s // size in released]
        for targets in combinations(unused, len(inside)):
            moves = tuple(Move(*one, to) for one, to in zip(inside, targets, strict=True))
            plan = Plan("a", 0, tuple(request.blocks), moves, released, "reclaim")
            if not released or not any(spec.i4_planning(scene, plan, version=0, in_flight=True)):
                return len(released)
    raise AssertionError("to release nothing is always possible")


@pytest.mark.parametrize(("blocks", "size"), [(5, 1), (2, 2), (4, 2), (2, 3)])
def test_what_could_come_back_is_the_most_that_a_lawful_plan_frees(blocks: int, size: int) -> None:
    """Claim: for every placement of live tokens, physical end and protected blocks of this size,
    `reclaimable_blocks` counts what the best relocation within the request gives back."""
    found: Counter[int] = Counter()
    for protected in subsets(range(1, blocks + 1)):
        pool = FakePool(blocks + 1, size, [], [], [], [1] * (blocks + 1), set(protected))
        private = [block for block in range(1, blocks + 1) if block not in protected]
        for places in range(blocks * size + 1):
            for live in subsets(range(places)):
                request = table_of(places, live, blocks=blocks, size=size)
                scene = Scene(pool=pool, a=request, flights=[])
                scene.b.blocks.clear()
                most = most_that_a_plan_frees(scene, private)
                assert spec.reclaimable_blocks(scene, request) == most, (request, protected)
                found[most] += 1
    assert set(found) == set(range(blocks + 1))


# Registry and prose -------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """The cells of the table of LAWS.md whose header begins with `heading`."""
    text = Path(spec.__file__).with_name("LAWS.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"| {heading} |")
    lines = rest.split("\n\n", maxsplit=1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_law_has_a_case() -> None:
    assert {law for law, _, _ in CASES.values()} == set(spec.LAWS)
    assert list(spec.LAWS) == ["I1", "I2", "I3", "I4", *(f"L{i}" for i in range(5, 12))]


def test_the_prose_and_the_registry_agree() -> None:
    """LAWS.md has one row and one paragraph per law, and names the predicate of each first; what
    else it names there exists."""
    text = Path(spec.__file__).with_name("LAWS.md").read_text(encoding="utf-8")
    table = {cells[0]: cells[1:] for cells in rows("id")}
    assert list(table) == list(spec.LAWS)
    for law, info in spec.LAWS.items():
        statement, kind, predicates = table[law]
        assert statement.startswith(f"{info.title}: ")
        assert kind == info.kind
        named = re.findall(r"`(\w+)\.py:(\w+)`", predicates)
        assert predicates == ", ".join(f"`{module}.py:{name}`" for module, name in named)
        found = [getattr(import_module(f"vtoken_spec.{module}"), name) for module, name in named]
        assert found[0] is info.predicate
        assert text.count(f"\n**{law} {info.title}.** ") == 1
    assert len(re.findall(r"^\*\*[IL]\d+ ", text, re.MULTILINE)) == len(spec.LAWS)
    assert "modelled" not in text


def test_the_words_of_the_field_name_every_event() -> None:
    named = [word for cells in rows("word") for word in re.findall(r"`(\w+)`", cells[1])]
    assert set(named) == {event.__name__ for event in get_args(spec.Event)}


def test_laws_accept_numpy_arrays() -> None:
    """Claim: an array-backed implementation can be judged without conversion."""
    scene = Scene()
    for request in (scene.a, scene.b):
        for name in ("blocks", "slots"):
            setattr(request, name, np.array(getattr(request, name), dtype=np.int32))
        request.live = np.array(request.live)  # type: ignore[assignment]
    scene.pool.free = np.array(scene.pool.free)  # type: ignore[assignment]
    scene.read = ReadSet("a", np.array(scene.read.slots), np.array([5]))  # type: ignore[arg-type]
    assert list(breaches(scene)) == []
    scene.a.slots[0] = 13
    (breach, *_) = spec.i2_unique_mapping(scene)
    assert (breach.token_id, breach.slot) == (0, 13)
    assert type(breach.slot) is int
