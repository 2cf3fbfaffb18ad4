"""The laws, each defined once, as pure functions over the read-only view (I4 is in planning.py,
L10 in progress.py, and what I3, L7 and L11 say about recorded streams in order.py).

A predicate yields one `Breach` per fault and yields nothing when the law holds. It is the slow,
obvious form; it does not raise on a broken view, because its job is to describe one. Compound
laws are chains of small parts, so that a message names the part that failed. `LAWS.md` states
each law in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from .breach import (
    TITLES,
    Breach,
    all_live_slots,
    breach,
    ints,
    is_protected,
    live_slots,
    slots_in_flight,
)
from .planning import i4_planning
from .progress import l10_progress
from .view import NO_SLOT, NULL_BLOCK, PoolView, ReadSet, RequestView, StateView, Write

_ABSENT = "absent"


# I1 -------------------------------------------------------------------------------------------


def i1_conservation(
    before: Mapping[int, Hashable], after: Mapping[int, Hashable], *, req_id: str
) -> Iterator[Breach]:
    """Live logical id -> payload of one request, before and after a relocation, are equal."""
    for token in sorted(before.keys() | after.keys()):
        old, new = before.get(token, _ABSENT), after.get(token, _ABSENT)
        if token not in after:
            what = "live token lost by a relocation"
        elif token not in before:
            what = "live token invented by a relocation"
        elif old != new:
            what = "payload changed by a relocation"
        else:
            continue
        yield breach("I1", what, req_id=req_id, token_id=token, before=old, after=new)


# I2 -------------------------------------------------------------------------------------------


def i2_unique_mapping(view: StateView) -> Iterator[Breach]:
    """State law: every part below, for every request, and slots across requests."""
    for request in view.requests.values():
        yield from i2_lengths(view.pool, request)
        yield from i2_block_list(view.pool, request)
        yield from i2_slots_in_range(view.pool, request)
        yield from i2_live_has_slot(request)
        yield from i2_slots_distinct(request)
    yield from i2_across_requests(view)


def i2_lengths(pool: PoolView, request: RequestView) -> Iterator[Breach]:
    """One slot and one liveness per logical id; the physical length fits the block list."""
    lengths = (request.logical_len, len(request.slots), len(request.live))
    if len(set(lengths)) != 1:
        what = "logical length, slots and liveness count {}, {} and {} tokens".format(*lengths)
        yield breach("I2", what, req_id=request.req_id)
    capacity = len(request.blocks) * pool.block_size
    if not 0 <= request.physical_len <= capacity:
        what = f"physical length {request.physical_len} does not fit {capacity} owned slots"
        yield breach("I2", what, req_id=request.req_id)


def i2_block_list(pool: PoolView, request: RequestView) -> Iterator[Breach]:
    """Blocks exist, and none is listed twice."""
    for block, times in Counter(ints(request.blocks)).items():
        if times > 1:
            yield breach("I2", f"block {block} listed {times} times", req_id=request.req_id)
        if not 0 <= block < pool.num_blocks:
            yield breach("I2", f"block {block} is outside the pool", req_id=request.req_id)


def i2_slots_in_range(pool: PoolView, request: RequestView) -> Iterator[Breach]:
    """A slot lies in an owned block, before the physical end; holes too."""
    size = pool.block_size
    start = {block: index * size for index, block in enumerate(ints(request.blocks))}
    for token, slot in enumerate(ints(request.slots)):
        if slot == NO_SLOT:
            continue
        block, offset = divmod(slot, size)
        if not 0 <= slot < pool.num_blocks * size:
            what = "slot is outside the pool"
        elif block not in start:
            what = f"block {block} is not owned by the request"
        elif start[block] + offset >= request.physical_len:
            what = (
                f"position {start[block] + offset} is not before the physical length"
                f" {request.physical_len}"
            )
        else:
            continue
        yield breach("I2", what, req_id=request.req_id, token_id=token, slot=slot)


def i2_live_has_slot(request: RequestView) -> Iterator[Breach]:
    """Only a dead token may be without a slot."""
    for token, (slot, live) in enumerate(zip(request.slots, request.live, strict=False)):
        if live and int(slot) == NO_SLOT:
            yield breach("I2", "live token has no slot", req_id=request.req_id, token_id=token)


def i2_slots_distinct(request: RequestView) -> Iterator[Breach]:
    """A slot belongs to at most one token of the request, dead or live."""
    first: dict[int, int] = {}
    for token, slot in enumerate(ints(request.slots)):
        if slot == NO_SLOT:
            continue
        if slot in first:
            what = f"slot already belongs to token {first[slot]}"
            yield breach("I2", what, req_id=request.req_id, token_id=token, slot=slot)
        first.setdefault(slot, token)


def i2_across_requests(view: StateView) -> Iterator[Breach]:
    """Requests hold the same slot only as the same logical id of a shared prefix block."""
    holders: dict[int, dict[str, int]] = {}
    for req_id, request in view.requests.items():
        for token, slot in enumerate(ints(request.slots)):
            if 0 <= slot < view.pool.num_blocks * view.pool.block_size:
                holders.setdefault(slot, {}).setdefault(req_id, token)
    for slot, tokens in holders.items():
        if len(tokens) == 1:
            continue
        block = slot // view.pool.block_size
        refs = view.pool.ref_count(block)
        req_id, token = next(iter(tokens.items()))
        if refs < len(tokens):
            what = f"held by {sorted(tokens)}, but block {block} has {refs} reference(s)"
            yield breach("I2", what, req_id=req_id, token_id=token, slot=slot)
        if len(set(tokens.values())) > 1:
            what = f"shared under different logical ids {dict(sorted(tokens.items()))}"
            yield breach("I2", what, req_id=req_id, token_id=token, slot=slot)


# I3 -------------------------------------------------------------------------------------------


def i3_visibility(view: StateView, read: ReadSet) -> Iterator[Breach]:
    """Attention reads no slot that a copy may still be writing: one that the compute stream has
    not waited for."""
    written = {
        move.dst: flight.req_id
        for flight in view.flights
        if not flight.waited
        for move in flight.plan.moves
    }
    for slot in ints(read.slots):
        if slot in written:
            what = f"slot is read while a copy of request {written[slot]!r} may still write it"
            yield breach("I3", what, req_id=read.req_id, slot=slot)


# L5 -------------------------------------------------------------------------------------------


def l5_accounting(view: StateView) -> Iterator[Breach]:
    """State law: each block but the null block is in exactly one place, and counted there."""
    owners = Counter(
        block for request in view.requests.values() for block in set(ints(request.blocks))
    )
    places = {
        "free": ints(view.pool.free),
        "owned": sorted(owners),
        "headroom": ints(view.pool.headroom),
        "held": ints(view.pool.held),
    }
    yield from l5_equation(view.pool, places)
    yield from l5_one_place(view.pool, places)
    yield from l5_references(view, owners)


def l5_equation(pool: PoolView, places: Mapping[str, Sequence[int]]) -> Iterator[Breach]:
    """free + owned + headroom + held = pool without the null block."""
    total = sum(len(blocks) for blocks in places.values())
    if total != pool.num_blocks - 1:
        terms = " + ".join(f"{name} {len(blocks)}" for name, blocks in places.items())
        what = f"{terms} = {total}, not the {pool.num_blocks - 1} blocks besides the null block"
        yield breach("L5", what)


def l5_one_place(pool: PoolView, places: Mapping[str, Sequence[int]]) -> Iterator[Breach]:
    """No block is in two places, twice in one, or in none; the null block is in none."""
    found: dict[int, list[str]] = {}
    for name, blocks in places.items():
        for block in blocks:
            found.setdefault(block, []).append(name)
    for block, names in found.items():
        if block == NULL_BLOCK:
            yield breach("L5", f"the null block is {' and '.join(names)}")
        elif not 0 < block < pool.num_blocks:
            yield breach("L5", f"block {block} is {' and '.join(names)}, but outside the pool")
        elif len(names) > 1:
            yield breach("L5", f"block {block} is {' and '.join(names)}")
    for block in range(1, pool.num_blocks):
        if block not in found:
            yield breach("L5", f"block {block} is in no place")


def l5_references(view: StateView, owners: Mapping[int, int]) -> Iterator[Breach]:
    """An owned block has a reference for each owner, a free block has none."""
    pool = view.pool
    for block, count in owners.items():
        if 0 <= block < pool.num_blocks and pool.ref_count(block) < count:
            what = f"block {block} has {pool.ref_count(block)} reference(s) for {count} owner(s)"
            yield breach("L5", what)
    for block in ints(pool.free):
        if 0 <= block < pool.num_blocks and block not in owners and pool.ref_count(block) != 0:
            yield breach("L5", f"free block {block} has {pool.ref_count(block)} reference(s)")


# L6 -------------------------------------------------------------------------------------------


def l6_read_set(view: StateView, read: ReadSet) -> Iterator[Breach]:
    """`read` against the table that already holds this step's new tokens."""
    if read.req_id not in view.requests:
        yield breach("L6", "read set of an unknown request", req_id=read.req_id)
        return
    request = view.requests[read.req_id]
    yield from l6_live_once(request, read)
    yield from l6_positions(request, read)


def l6_live_once(request: RequestView, read: ReadSet) -> Iterator[Breach]:
    """The slots read are those of the live tokens, each exactly once."""
    live, times = live_slots(request), Counter(ints(read.slots))
    holes = {slot: token for token, slot in enumerate(ints(request.slots)) if slot not in live}
    for slot, count in times.items():
        token = live.get(slot)
        if token is None and slot in holes:
            what, token = "dead token is read", holes[slot]
        elif token is None:
            what = "foreign slot is read"
        elif count > 1:
            what = f"live token is read {count} times"
        else:
            continue
        yield breach("L6", what, req_id=read.req_id, token_id=token, slot=slot)
    for slot, token in live.items():
        if slot not in times:
            what = "live token is not read"
            yield breach("L6", what, req_id=read.req_id, token_id=token, slot=slot)


def l6_positions(request: RequestView, read: ReadSet) -> Iterator[Breach]:
    """Queries are the newest logical ids. When there are several, their slots are read last and
    in order, because the causal mask of a chunk goes by place and not by id."""
    queries, count = ints(read.query_positions), len(read.query_positions)
    newest = list(range(request.logical_len - count, request.logical_len))
    if queries != newest:
        what = "query positions are not the newest logical ids"
        yield breach("L6", what, req_id=read.req_id, before=newest, after=queries)
    elif count > 1:
        expected, last = ints(request.slots)[-count:], ints(read.slots)[-count:]
        if expected != last:
            what = "slots of a chunk are not read last and in order"
            yield breach("L6", what, req_id=read.req_id, before=expected, after=last)


# L7 -------------------------------------------------------------------------------------------


def l7_write_safety(view: StateView, writes: Sequence[Write]) -> Iterator[Breach]:
    """`writes` of a step against the state in which the step's blocks are already allotted, but
    its new tokens are not in the table and its filled blocks not in the prefix cache yet."""
    live, flying, pool = all_live_slots(view), slots_in_flight(view), view.pool
    seen: set[int] = set()
    for write in writes:
        block = write.slot // pool.block_size
        request = view.requests.get(write.req_id)
        if block == NULL_BLOCK:
            what = "write into the null block"
        elif request is None or block not in ints(request.blocks):
            what = f"write into block {block}, which the request does not own"
        elif write.slot in live:
            what = "write onto live token {1} of request {0!r}".format(*live[write.slot])
        elif write.slot in flying:
            what = f"write onto a slot of request {flying[write.slot]!r}'s plan in flight"
        elif is_protected(pool, block):
            what = f"write into block {block}, which is shared or cached"
        elif write.slot in seen:
            what = "slot is written twice in one step"
        else:
            seen.add(write.slot)
            continue
        yield breach("L7", what, req_id=write.req_id, token_id=write.token_id, slot=write.slot)


# L8, L9 ---------------------------------------------------------------------------------------


def l8_sharing(before: Mapping[int, Hashable], after: Mapping[int, Hashable]) -> Iterator[Breach]:
    """Slot -> payload over a transition, for slots in blocks that are shared or cached on both
    sides of it. A slot missing from `after` is a breach: the caller leaves out of `before` what
    is no longer shared or cached."""
    for slot, old in before.items():
        new = after.get(slot, _ABSENT)
        if slot not in after or new != old:
            yield breach("L8", "shared or cached bytes changed", slot=slot, before=old, after=new)


def l9_neutrality(
    one: Mapping[str, Mapping[int, Hashable]], other: Mapping[str, Mapping[int, Hashable]]
) -> Iterator[Breach]:
    """Request -> live id -> payload of two runs that made the same eviction decisions."""
    for req_id in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(req_id, {}), other.get(req_id, {})
        for token in sorted(mine.keys() | theirs.keys()):
            left, right = mine.get(token, _ABSENT), theirs.get(token, _ABSENT)
            if left != right:
                what = "two runs with the same evictions see different payloads"
                yield breach("L9", what, req_id=req_id, token_id=token, before=left, after=right)


# L11 ------------------------------------------------------------------------------------------


def l11_fence(view: StateView) -> Iterator[Breach]:
    """State law: a block that a copy may still touch is handed to nobody: it is not free or
    headroom, and nobody but the request of the plan owns the blocks that are written."""
    size = view.pool.block_size
    loose = dict.fromkeys(ints(view.pool.headroom), "headroom")
    loose |= dict.fromkeys(ints(view.pool.free), "free")
    for flight in view.flights:
        if flight.waited:
            continue
        for block in sorted({s // size for m in flight.plan.moves for s in (m.src, m.dst)}):
            if block in loose:
                what = f"block {block} is {loose[block]} while a copy may still touch it"
                yield breach("L11", what, req_id=flight.req_id)
        for block in sorted({move.dst // size for move in flight.plan.moves}):
            for req_id, request in view.requests.items():
                if req_id != flight.req_id and block in ints(request.blocks):
                    what = f"block {block} is {req_id!r}'s while a copy may still write it"
                    yield breach("L11", what, req_id=flight.req_id)


# Registry -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LawInfo:
    """A law's name, when it is evaluated, and its predicate."""

    id: str
    title: str
    kind: Literal["state", "transition", "step"]
    predicate: Callable[..., Iterator[Breach]]


def _law(
    law: str,
    kind: Literal["state", "transition", "step"],
    predicate: Callable[..., Iterator[Breach]],
) -> tuple[str, LawInfo]:
    return law, LawInfo(law, TITLES[law], kind, predicate)


LAWS: Mapping[str, LawInfo] = MappingProxyType(
    dict(
        (
            _law("I1", "transition", i1_conservation),
            _law("I2", "state", i2_unique_mapping),
            _law("I3", "step", i3_visibility),
            _law("I4", "transition", i4_planning),
            _law("L5", "state", l5_accounting),
            _law("L6", "step", l6_read_set),
            _law("L7", "step", l7_write_safety),
            _law("L8", "transition", l8_sharing),
            _law("L9", "step", l9_neutrality),
            _law("L10", "step", l10_progress),
            _law("L11", "state", l11_fence),
        )
    )
)
