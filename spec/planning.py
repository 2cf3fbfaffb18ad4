"""I4 planning: a plan against the state that it is about to change.

Split into parts, because the model gives each part its own reason for a rejection. A plan that
goes into flight is judged twice: as a whole when it is prepared, and for its snapshot when it is
committed (`i4_commit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .breach import Breach, breach, ints, is_protected, live_slots, slots_in_flight
from .view import NULL_BLOCK, FlightView, Plan, StateView


def i4_planning(
    view: StateView, plan: Plan, *, version: int, in_flight: bool = False
) -> Iterator[Breach]:
    """`plan` against the state it is about to change; `version` is the table's version now,
    `in_flight` whether it will be committed later."""
    yield from i4_snapshot(view, plan, version=version)
    yield from i4_apart(view, plan)
    if plan.req_id in view.requests:
        yield from i4_sources(view, plan)
        yield from i4_targets(view, plan)
        yield from i4_writable(view, plan)
        yield from i4_released(view, plan)
        yield from i4_order(view, plan)
        yield from i4_gain(view, plan)
        if in_flight:
            yield from i4_end(view, plan)


def i4_commit(view: StateView, flight: FlightView, *, version: int) -> Iterator[Breach]:
    """The snapshot of a plan in flight is still that of its table: same version, blocks gained
    since only at the end, and the released blocks are empty once its live tokens have moved."""
    plan = flight.plan
    if plan.req_id not in view.requests:
        yield breach("I4", "commit of a request that is gone", req_id=plan.req_id)
        return
    request = view.requests[plan.req_id]
    seen = ints(request.blocks)[: len(plan.blocks)]
    yield from _same_table(plan, version=version, blocks=seen)
    live = {token: slot for slot, token in live_slots(request).items()}
    moves = tuple(move for move in plan.moves if live.get(move.token_id) == move.src)
    yield from i4_released(view, replace(plan, moves=moves))


def i4_snapshot(view: StateView, plan: Plan, *, version: int) -> Iterator[Breach]:
    """The plan was made from this table: same request, same version, same block list."""
    if plan.req_id not in view.requests:
        yield breach("I4", "plan for an unknown request", req_id=plan.req_id)
        return
    yield from _same_table(plan, version=version, blocks=ints(view.requests[plan.req_id].blocks))


def _same_table(plan: Plan, *, version: int, blocks: list[int]) -> Iterator[Breach]:
    if plan.version != version:
        what = "plan made from another table version"
        yield breach("I4", what, req_id=plan.req_id, before=plan.version, after=version)
    if ints(plan.blocks) != blocks:
        what = "plan made from another block list"
        yield breach("I4", what, req_id=plan.req_id, before=ints(plan.blocks), after=blocks)


def i4_apart(view: StateView, plan: Plan) -> Iterator[Breach]:
    """No plan of the same request is in flight, be it only for copies that nobody waits for."""
    if any(flight.req_id == plan.req_id for flight in view.flights):
        yield breach("I4", "a plan of the request is in flight already", req_id=plan.req_id)


def i4_end(view: StateView, plan: Plan) -> Iterator[Breach]:
    """While the plan is in flight, tokens are appended at the physical end: its targets in owned
    blocks lie before that end, the blocks it releases before the block that the end is in, and the
    block list keeps its order."""
    request, size = view.requests[plan.req_id], view.pool.block_size
    if plan.order:
        yield breach("I4", "a plan in flight keeps the order of blocks", req_id=plan.req_id)
    index = {block: i for i, block in enumerate(ints(request.blocks))}
    for move in plan.moves:
        block, offset = divmod(move.dst, size)
        if block in index and index[block] * size + offset >= request.physical_len:
            what = "target lies at or behind the physical end"
            yield breach("I4", what, req_id=plan.req_id, token_id=move.token_id, slot=move.dst)
    for block in ints(plan.released):
        if block in index and index[block] >= request.physical_len // size:
            what = f"released block {block} is where new tokens go"
            yield breach("I4", what, req_id=plan.req_id)


def i4_sources(view: StateView, plan: Plan) -> Iterator[Breach]:
    """Each source is the slot of the live token it names, outside the null block, once."""
    live = live_slots(view.requests[plan.req_id])
    seen: set[int] = set()
    for move in plan.moves:
        if live.get(move.src) != move.token_id:
            what = "source is not the slot of this live token"
        elif move.src // view.pool.block_size == NULL_BLOCK:
            what = "source lies in the null block"
        elif move.src in seen:
            what = "source is moved twice"
        else:
            seen.add(move.src)
            continue
        yield breach("I4", what, req_id=plan.req_id, token_id=move.token_id, slot=move.src)


def i4_targets(view: StateView, plan: Plan) -> Iterator[Breach]:
    """Each target is a slot without a live token, in an owned or a headroom block, once, and no
    plan in flight copies from or to it."""
    live = live_slots(view.requests[plan.req_id])
    allowed = {*ints(view.requests[plan.req_id].blocks), *ints(view.pool.headroom)}
    flying = slots_in_flight(view)
    seen: set[int] = set()
    for move in plan.moves:
        block = move.dst // view.pool.block_size
        if block == NULL_BLOCK:
            what = "target lies in the null block"
        elif block not in allowed:
            what = f"target block {block} is neither owned nor headroom"
        elif move.dst in live:
            what = f"target is the slot of live token {live[move.dst]}"
        elif move.dst in flying:
            what = f"target is a slot of request {flying[move.dst]!r}'s plan in flight"
        elif move.dst in seen:
            what = "target is used twice"
        else:
            seen.add(move.dst)
            continue
        yield breach("I4", what, req_id=plan.req_id, token_id=move.token_id, slot=move.dst)


def i4_writable(view: StateView, plan: Plan) -> Iterator[Breach]:
    """No target lies in a block that is shared or reachable through the prefix cache."""
    for move in plan.moves:
        block = move.dst // view.pool.block_size
        if 0 <= block < view.pool.num_blocks and is_protected(view.pool, block):
            what = f"target block {block} is shared or cached"
            yield breach("I4", what, req_id=plan.req_id, token_id=move.token_id, slot=move.dst)


def i4_released(view: StateView, plan: Plan) -> Iterator[Breach]:
    """Released blocks are owned, listed once, and hold no live token after the moves."""
    request, size = view.requests[plan.req_id], view.pool.block_size
    slots = {token: slot for slot, token in live_slots(request).items()}
    slots.update({move.token_id: move.dst for move in plan.moves})
    owned = ints(request.blocks)
    for block, times in Counter(ints(plan.released)).items():
        if times > 1:
            yield breach("I4", f"block {block} released {times} times", req_id=plan.req_id)
        if block not in owned:
            what = f"released block {block} is not owned by the request"
            yield breach("I4", what, req_id=plan.req_id)
        for token, slot in slots.items():
            if slot // size == block:
                what = f"released block {block} still holds a live token after the moves"
                yield breach("I4", what, req_id=plan.req_id, token_id=token, slot=slot)


def i4_order(view: StateView, plan: Plan) -> Iterator[Breach]:
    """A new order holds exactly the blocks that the request has after the plan, each once."""
    if not plan.order:
        return
    kept = Counter(blocks_after(view, plan))
    if Counter(ints(plan.order)) != kept:
        what = "new order is not a permutation of the blocks that stay"
        yield breach("I4", what, req_id=plan.req_id, before=sorted(kept), after=plan.order)


def blocks_after(view: StateView, plan: Plan) -> list[int]:
    """The block list after `plan`: drawn headroom, then the blocks that stay, in the old order. So
    the block with the physical end stays last."""
    size = view.pool.block_size
    owned, released = ints(plan.blocks), set(ints(plan.released))
    drawn = dict.fromkeys(move.dst // size for move in plan.moves)
    joined = [block for block in drawn if block not in owned]
    return [*joined, *(block for block in owned if block not in released)]


def i4_gain(view: StateView, plan: Plan) -> Iterator[Breach]:
    """A plan lowers the request's block count, unless it only serves a dense view."""
    owned = set(ints(view.requests[plan.req_id].blocks))
    targets = {move.dst // view.pool.block_size for move in plan.moves}
    after = (owned | targets) - set(ints(plan.released))
    if plan.purpose != "dense" and len(after) >= len(owned):
        what = "plan does not lower the block count"
        yield breach("I4", what, req_id=plan.req_id, before=len(owned), after=len(after))
