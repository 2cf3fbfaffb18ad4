"""The token table: its three operations, what they reject, and what they cost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from vtoken.core import NO_SLOT, BlockMeter, RequestTable, TokenTable
from vtoken.errors import InvariantViolation, Rejected


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def full(table: RequestTable) -> dict[str, Any]:
    """Everything observable of a table, so that "changed nothing" means nothing at all."""
    positions = range(table.num_blocks * table.block_size)
    return {
        "logical_len": table.logical_len,
        "physical_len": table.physical_len,
        "num_live": table.num_live,
        "version": table.version,
        "evicted": table.evicted,
        "naive_blocks": table.naive_blocks,
        "blocks": table.blocks.tolist(),
        "block_live": table.block_live.tolist(),
        "num_empty": table.num_empty - table.block_live.tolist().count(0),
        "positions": table.positions.tolist(),
        "live": table.live.tolist(),
        "owners": [table.owner_at(position) for position in positions],
    }


@pytest.fixture
def tables() -> TokenTable:
    """Request "a": 7 tokens in blocks 5, 2, 9, 3 of 2 slots; tokens 1 and 4 dead."""
    tables = TokenTable(2)
    tables.sync_new_tokens("a", [5, 2, 9, 3], 7)
    tables.evict_tokens("a", [1, 4])
    return tables


# The three operations ---------------------------------------------------------------------------


def test_new_tokens_follow_the_block_list() -> None:
    tables = TokenTable(2)
    assert tables.sync_new_tokens("a", [5, 2], 3).tolist() == [10, 11, 4]
    assert tables.sync_new_tokens("a", [5, 2, 9], 6).tolist() == [5, 18, 19]
    assert tables["a"].slots.tolist() == [10, 11, 4, 5, 18, 19]


def test_an_evicted_token_keeps_its_slot_as_a_hole(tables: TokenTable) -> None:
    table = tables["a"]
    assert table.slots.tolist() == [10, 11, 4, 5, 18, 19, 6]
    assert table.live.tolist() == [True, False, True, True, False, True, True]
    assert table.live_slots().tolist() == [10, 4, 5, 19, 6]
    assert table.hole_positions().tolist() == [1, 4]
    assert (table.num_live, table.num_holes, table.physical_len) == (5, 2, 7)
    assert table.evicted


def test_a_move_reclaims_the_dead_token_of_its_target(tables: TokenTable) -> None:
    tables.apply_moves("a", [(6, (5, 1)), (5, (9, 0))])
    table = tables["a"]
    assert table.slots.tolist() == [10, NO_SLOT, 4, 5, NO_SLOT, 18, 11]
    assert table.set_layout(np.arange(3), 5) == [3]
    assert table.live_slots().tolist() == [10, 4, 5, 18, 11]
    assert (table.num_holes, table.reclaimed) == (0, 2)


def test_a_layout_reorders_blocks_without_touching_slots(tables: TokenTable) -> None:
    table = tables["a"]
    table.evict(ids(0))
    before = table.live_slots().tolist()
    assert table.set_layout(np.array([2, 1, 3]), 5) == [5]
    assert table.blocks.tolist() == [9, 2, 3]
    assert table.live_slots().tolist() == before
    assert table.positions[table.live].tolist() == [2, 3, 1, 4]
    assert table.block_live.tolist() == [1, 2, 1]


def test_a_recycled_hole_is_the_new_token_s_slot(tables: TokenTable) -> None:
    table = tables["a"]
    assert table.append([], 8, hole=4).tolist() == [4]
    assert table.slot_of(7) == 18
    assert table.slot_of(4) == NO_SLOT
    assert (table.physical_len, table.num_holes) == (7, 1)


def test_evicting_one_by_one_equals_evicting_in_bulk() -> None:
    one, bulk = (TokenTable(4) for _ in range(2))
    victims = [9, 0, 3, 7, 1, 2]
    for tables in (one, bulk):
        tables.sync_new_tokens("a", [1, 2, 3], 11)
    for token in victims:
        one.evict_token("a", token)
    bulk.evict_tokens("a", victims)
    left, right = full(one["a"]), full(bulk["a"])
    assert (left.pop("version"), right.pop("version")) == (0, 0)  # where tokens lie is the same
    assert left == right


def test_evicting_nothing_is_nothing(tables: TokenTable) -> None:
    before = full(tables["a"])
    tables.evict_tokens("a", [])
    tables["a"].evict(ids())
    tables.apply_moves("a", [])
    assert full(tables["a"]) == before


def test_what_the_preview_says_is_what_append_does() -> None:
    table = RequestTable("a", 4)
    assert table.next_slots([3, 1], 6).tolist() == table.slots_at(table.append([3, 1], 6)).tolist()
    assert table.next_slots([7], 11).tolist() == table.slots_at(table.append([7], 11)).tolist()
    table.evict(ids(2))
    preview = table.next_slots([], 12, hole=2).tolist()
    assert preview == table.slots_at(table.append([], 12, hole=2)).tolist() == [14]


# Rejections -------------------------------------------------------------------------------------

REJECTED: list[tuple[str, str, Callable[[TokenTable], object]]] = [
    ("unknown request", "no token table", lambda t: t.evict_token("b", 0)),
    ("moves of an unknown request", "no token table", lambda t: t.apply_moves("b", [(0, (5, 0))])),
    ("negative id", "unknown or not yet", lambda t: t.evict_token("a", -1)),
    ("id not computed yet", "unknown or not yet", lambda t: t.evict_token("a", 7)),
    ("id beyond 32 bits", "unknown or not yet", lambda t: t.evict_token("a", 2**40)),
    ("id beyond 64 bits", "integers", lambda t: t.evict_token("a", 2**70)),
    ("newest token", "newest", lambda t: t.evict_token("a", 6)),
    ("dead token", "dead already", lambda t: t.evict_token("a", 1)),
    ("dead token among live ones", "dead already", lambda t: t.evict_tokens("a", [0, 2, 4])),
    ("newest among live ones", "newest", lambda t: t.evict_tokens("a", [0, 6])),
    ("token named twice", "twice", lambda t: t.evict_tokens("a", [0, 2, 0])),
    ("mask instead of ids", "integers", lambda t: t.evict_tokens("a", [True, False])),
    ("fractions", "integers", lambda t: t.evict_tokens("a", [0.5])),
    ("shorter list", "does not extend", lambda t: t.sync_new_tokens("a", [5, 2], 8)),
    ("other list", "does not extend", lambda t: t.sync_new_tokens("a", [5, 9, 2, 3], 8)),
    ("no new token", "does not extend", lambda t: t.sync_new_tokens("a", [5, 2, 9, 3], 7)),
    ("fewer tokens", "does not extend", lambda t: t.sync_new_tokens("a", [5, 2, 9, 3], 3)),
    ("too few blocks", "do not fit", lambda t: t.sync_new_tokens("a", [5, 2, 9, 3], 9)),
    ("owned block again", "twice", lambda t: t.sync_new_tokens("a", [5, 2, 9, 3, 2], 8)),
    ("new block twice", "twice", lambda t: t.sync_new_tokens("a", [5, 2, 9, 3, 8, 8], 8)),
    ("first sync too long", "do not fit", lambda t: t.sync_new_tokens("new", [1], 3)),
    ("first sync empty", "does not extend", lambda t: t.sync_new_tokens("new", [1], 0)),
    ("first sync doubled", "twice", lambda t: t.sync_new_tokens("new", [1, 1], 3)),
    ("two tokens into one hole", "one token", lambda t: t["a"].append([], 9, hole=1)),
    ("block of others", "not owned", lambda t: t.apply_moves("a", [(6, (5, 1)), (0, (4, 0))])),
    ("offset too large", "not owned", lambda t: t.apply_moves("a", [(6, (5, 2))])),
    ("offset negative", "not owned", lambda t: t.apply_moves("a", [(6, (9, -1))])),
    ("unknown id's slot", "unknown", lambda t: t["a"].slot_of(7)),
]


@pytest.mark.parametrize(
    ("message", "action"), [case[1:] for case in REJECTED], ids=[case[0] for case in REJECTED]
)
def test_a_rejected_operation_says_why_and_changes_nothing(
    tables: TokenTable, message: str, action: Callable[[TokenTable], object]
) -> None:
    before = full(tables["a"])
    with pytest.raises(Rejected, match=message):
        action(tables)
    assert full(tables["a"]) == before
    assert list(tables) == ["a"]


BROKEN: list[tuple[str, str, Callable[[RequestTable], object]]] = [
    ("onto a live token", "I2", lambda t: t.move(ids(6, 5), ids(1, 2))),
    ("two onto one target", "I2", lambda t: t.move(ids(6, 5), ids(1, 1))),
    ("one token twice", "I2", lambda t: t.move(ids(6, 6), ids(1, 4))),
    ("a dead token", "I2", lambda t: t.move(ids(6, 4), ids(1, 7))),
    ("an unknown token", "I2", lambda t: t.move(ids(6, 7), ids(1, 4))),
    ("a negative token", "I2", lambda t: t.move(ids(-1), ids(1))),
    ("out of the list", "I2", lambda t: t.move(ids(6), ids(8))),
    ("to a negative place", "I2", lambda t: t.move(ids(6), ids(-1))),
    ("dropping a live token", "I1", lambda t: t.set_layout(ids(0, 1, 2), 6)),
    ("cutting off a live token", "I1", lambda t: t.set_layout(ids(0, 1, 2, 3), 6)),
    ("keeping a block twice", "I2", lambda t: t.set_layout(ids(0, 0, 1, 2), 7)),
    ("keeping a block that is not there", "I2", lambda t: t.set_layout(ids(0, 1, 2, 4), 7)),
    ("longer than its blocks", "I2", lambda t: t.set_layout(ids(0, 1, 2, 3), 9)),
    ("recycling a live slot", "L7", lambda t: t.append([], 8, hole=0)),
    ("recycling beyond the end", "L7", lambda t: t.append([], 8, hole=7)),
    ("recycling nowhere", "L7", lambda t: t.append([], 8, hole=-1)),
]


@pytest.mark.parametrize(
    ("law", "action"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_a_layout_that_would_break_a_law_is_stopped_before_it_is_made(
    tables: TokenTable, law: str, action: Callable[[RequestTable], object]
) -> None:
    """Claim: all or nothing, also where only the last of several moves is wrong."""
    before = full(tables["a"])
    with pytest.raises(InvariantViolation) as caught:
        action(tables["a"])
    assert caught.value.law == law
    assert caught.value.req_id == "a"
    assert full(tables["a"]) == before


def test_a_pool_of_no_block_size_is_rejected() -> None:
    with pytest.raises(Rejected, match="block_size"):
        TokenTable(0)


def test_dropping_forgets_the_request_and_a_new_life_is_told_apart() -> None:
    tables = TokenTable(2)
    tables.sync_new_tokens("a", [1], 2)
    old = tables["a"]
    assert tables.drop("a") is old
    assert tables.drop("a") is None
    assert "a" not in tables
    assert tables.get("a") is None
    tables.sync_new_tokens("a", [1], 2)
    assert tables["a"].life != old.life


# Against a slow definition ----------------------------------------------------------------------


class SlowTable:
    """The same operations on a dict from token to slot, one token at a time."""

    def __init__(self, size: int) -> None:
        self.size, self.blocks = size, list[int]()
        self.slot: dict[int, int] = {}
        self.dead: set[int] = set()
        self.length = self.end = 0

    def append(self, blocks: Iterable[int], total: int) -> None:
        self.blocks += blocks
        for token in range(self.length, total):
            self.slot[token] = self.blocks[self.end // self.size] * self.size + self.end % self.size
            self.end += 1
        self.length = total

    def live(self) -> list[int]:
        return [token for token in range(self.length) if token not in self.dead]

    def naive(self) -> int:
        return len({token // self.size for token in self.live()})


@pytest.mark.parametrize("size", [1, 3, 16])
def test_random_appends_and_evictions_follow_the_slow_definition(size: int) -> None:
    rng = np.random.default_rng(size)
    table, slow, meter = RequestTable("a", size), SlowTable(size), BlockMeter()
    peaks = [0, 0, 0, 0]
    for step in range(300):
        total = slow.length + int(rng.integers(1, 2 * size + 2))
        lacking = -(-(slow.end + total - slow.length) // size) - len(slow.blocks)
        fresh = list(range(len(slow.blocks) + 1, len(slow.blocks) + 1 + lacking))
        table.append(fresh, total)
        slow.append(fresh, total)
        choice = slow.live()[:-1]
        # Above 16 victims the table takes another path than below.
        count = min(len(choice), int(rng.choice([0, 1, 2, 16, 17, 40])))
        victims = rng.choice(choice, size=count, replace=False) if count else ids()
        table.evict(victims.astype(np.int32))
        slow.dead.update(victims.tolist())
        live = slow.live()
        assert table.live_slots().tolist() == [slow.slot[token] for token in live]
        assert table.num_live == len(live)
        assert table.naive_blocks == slow.naive()
        per_block = [sum(slow.slot[t] // size == b for t in live) for b in slow.blocks]
        assert step % 20 or table.block_live.tolist() == per_block
        assert table.num_empty == per_block.count(0)
        meter.update(table)
        meter.end_step()
        share = [-(-slow.length // size), slow.naive(), len(slow.blocks), -(-len(live) // size)]
        assert list(meter.now.as_dict().values()) == share
        peaks = [max(old, new) for old, new in zip(peaks, share, strict=True)]
        assert list(meter.peak.as_dict().values()) == peaks


def test_meters_sum_over_requests_and_forget_the_ones_that_leave() -> None:
    meter = BlockMeter()
    one, two = RequestTable("a", 2), RequestTable("b", 2)
    one.append([1, 2], 4)
    two.append([3], 1)
    for table in (one, two, one):
        meter.update(table)
    meter.end_step()
    assert meter.now.as_dict() == {"native": 3, "naive": 3, "vtoken": 3, "ideal": 3}
    one.evict(ids(0, 1))  # metered when the request is scheduled next
    assert meter.now.naive == 3
    meter.update(one)
    assert meter.now.as_dict() == {"native": 3, "naive": 2, "vtoken": 3, "ideal": 2}
    meter.drop("a")
    meter.drop("a")
    meter.end_step()
    assert meter.now.as_dict() == {"native": 1, "naive": 1, "vtoken": 1, "ideal": 1}
    assert meter.peak.as_dict() == {"native": 3, "naive": 3, "vtoken": 3, "ideal": 3}


# Memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "by"),
    [(1024, "prefill"), (8192, "prefill"), (32768, "prefill"), (1024, "decode"), (8192, "decode")],
)
def test_a_table_costs_at_most_16_bytes_per_token(length: int, by: str) -> None:
    table = RequestTable("a", 16)
    if by == "prefill":
        table.append(range(1, length // 16 + 1), length)
    else:
        for token in range(length):
            table.append([token // 16 + 1] if token % 16 == 0 else [], token + 1)
    assert table.nbytes <= 16 * length


def test_a_table_holds_no_python_object_per_token() -> None:
    """Claim: what a table holds are a fixed number of objects, however long the request is."""

    def held(length: int) -> int:
        table = RequestTable("a", 16)
        table.append(range(1, length // 16 + 1), length)
        table.evict(np.arange(0, length // 2, 2, dtype=np.int32))
        table.evict(np.arange(1, 16, 2, dtype=np.int32))
        return sum(
            len(part) if isinstance(part, (list, dict, tuple, set)) else 1
            for part in gc.get_referents(table)
        )

    assert max(held(64), held(32768)) < 40  # at most 16 of them are holes it remembers


def test_every_array_is_counted() -> None:
    """Claim: `nbytes` leaves no array of the table out."""
    table = RequestTable("a", 16)
    table.append(range(1, 65), 1024)
    arrays = [part for part in gc.get_referents(table) if isinstance(part, np.ndarray)]
    assert table.nbytes == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("block", [0, -1])
def test_the_null_block_and_no_block_cannot_be_owned(block: int) -> None:
    tables = TokenTable(4)
    with pytest.raises(Rejected, match="cannot be owned"):
        tables.sync_new_tokens("a", [3, block], 6)
    assert "a" not in tables
