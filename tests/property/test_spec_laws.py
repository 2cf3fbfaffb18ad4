"""Each law can fail, alone, and its message says what is wrong.

A healthy scene satisfies every law. Each case breaks one thing in it by hand; exactly the named
law must report it, in words that name the law, the request, the token, the slot, before and
after. The scene is made of plain fakes, so that laws are tested against views the model would
never produce. Blocks of 2 slots, 9 blocks; block 1 is shared by a and b, block 6 is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

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
    num_blocks: int = 9
    block_size: int = 2
    free: list[int] = field(default_factory=lambda: [6, 7])
    headroom: list[int] = field(default_factory=lambda: [8])
    held: list[int] = field(default_factory=list)
    refs: list[int] = field(default_factory=lambda: [0, 2, 1, 1, 1, 1, 0, 0, 0])
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
    kept: dict[int, bytes] = field(default_factory=lambda: {0: b"k0", 1: b"k1"})
    shared: dict[int, bytes] = field(default_factory=lambda: {2: b"k0", 12: b"z"})
    seen: dict[str, dict[int, bytes]] = field(default_factory=lambda: {"a": {0: b"k0"}})

    @property
    def requests(self) -> dict[str, FakeRequest]:
        return {"a": self.a, "b": self.b}


def breaches(scene: Scene) -> Iterator[spec.Breach]:
    """Every law that has a predicate, over the whole scene."""
    yield from spec.i1_conservation({0: b"k0", 1: b"k1"}, scene.kept, req_id="a")
    yield from spec.i2_unique_mapping(scene)
    yield from spec.i4_planning(scene, scene.plan, version=scene.version)
    yield from spec.l5_accounting(scene)
    yield from spec.l6_read_set(scene, scene.read)
    yield from spec.l6_read_set(scene, scene.chunk)
    yield from spec.l7_write_safety(scene, scene.writes)
    yield from spec.l8_sharing({2: b"k0", 12: b"z"}, scene.shared)
    yield from spec.l9_neutrality({"a": {0: b"k0"}}, scene.seen)


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
    "leak": (
        "L5",
        sets(pool__free=[6]),
        "pool: free 1 + owned 5 + headroom 1 + held 0 = 7, not the 8 blocks",
    ),
    "free twice": ("L5", sets(pool__free=[6, 6]), "block 6 is free and free"),
    "free and owned": ("L5", sets(pool__free=[6, 5]), "block 5 is free and owned"),
    "free and headroom": ("L5", sets(pool__free=[6, 8]), "block 8 is free and headroom"),
    "held and headroom": ("L5", sets(pool__free=[6], pool__held=[8]), "headroom and held"),
    "nowhere and outside": ("L5", sets(pool__free=[6, 9]), "block 9 is free, but outside"),
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
            pool__refs=[0, 1, 1, 1, 1, 1, 0, 0, 0],
            b__slots=[-1, -1, 8, 9, 10],
            b__live=[False, False, True, True, True],
            chunk=ReadSet("b", [8, 9, 10], [2, 3, 4]),
        ),
        "block 1 has 1 reference(s) for 2 owner(s)",
    ),
    "free but referred to": (
        "L5",
        sets(pool__refs=[0, 2, 1, 1, 1, 1, 1, 0, 0]),
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
            pool__refs=[0, 2, 1, 1, 1, 1, 0, 2, 0],
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


def test_every_law_with_a_predicate_has_a_case_and_the_others_say_why() -> None:
    assert {law for law, _, _ in CASES.values()} == {
        info.id for info in spec.LAWS.values() if info.predicate is not None
    }
    assert list(spec.LAWS) == ["I1", "I2", "I3", "I4", *(f"L{i}" for i in range(5, 12))]


def test_the_prose_and_the_registry_agree() -> None:
    """LAWS.md names each law's predicate, or says what is missing to model it."""
    text = Path(spec.__file__).with_name("LAWS.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(): cells
        for cells in (line.split("|") for line in text.splitlines())
        if len(cells) == 6
    }
    for law, info in spec.LAWS.items():
        _, _, statement, kind, predicate, _ = rows[law]
        assert statement.strip().startswith(info.title)
        assert kind.strip() == info.kind
        if info.predicate is None:
            assert predicate.strip().startswith("not yet modelled: needs")
        else:
            module = info.predicate.__module__.rsplit(".", maxsplit=1)[-1]
            assert f"{module}.py:{info.predicate.__name__}" in predicate
        assert f"**{law} {info.title}.**" in text


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
