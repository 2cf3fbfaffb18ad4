"""What can be read off a state of the model: what attention must see, what a step writes, and
which bytes may not change."""

from __future__ import annotations

from .breach import is_protected
from .events import Append, Recycle
from .state import Payload, RequestState, State
from .view import ReadSet, Write


def reads(state: State, req_id: str) -> list[tuple[int, Payload | None]]:
    """What attention must see of a request: (token id, payload) of its live tokens, in logical
    order. Raises KeyError for an unknown request."""
    table = state.requests[req_id]
    pairs = enumerate(zip(table.slots, table.live, strict=True))
    return [(token, state.memory[slot]) for token, (slot, alive) in pairs if alive]


def visible(state: State) -> dict[str, dict[int, Payload | None]]:
    """`reads` of every request: the map that L9 compares."""
    return {req_id: dict(reads(state, req_id)) for req_id in state.requests}


def read_set(state: State, req_id: str, *, queries: int) -> ReadSet:
    """What attention is given when the newest `queries` tokens are computed: the live slots in
    physical order. Raises KeyError for an unknown request."""
    table = state.requests[req_id]
    live, end = table.live_slots(), table.logical_len
    used = table.places(block_size=state.pool.block_size)[: table.physical_len]
    return ReadSet(req_id, tuple(s for s in used if s in live), tuple(range(end - queries, end)))


def writes(state: State, event: Append | Recycle) -> tuple[Write, ...]:
    """The K/V entries that the step behind an allowed `event` writes to `state`; tokens of a hit
    and moves are not writes."""
    first = state.requests[event.req_id].logical_len
    slots = (event.slot,) if isinstance(event, Recycle) else event.slots
    return tuple(Write(event.req_id, token, s) for token, s in enumerate(slots, start=first))


def guarded(
    before: State, after: State
) -> tuple[dict[int, Payload | None], dict[int, Payload | None]]:
    """The two maps that L8 compares: payloads, before and after, of the slots whose block is
    shared or cached in both states."""
    blocks = [
        block
        for block in range(before.pool.num_blocks)
        if is_protected(before.pool, block) and is_protected(after.pool, block)
    ]
    slots = RequestState("", tuple(blocks)).places(block_size=before.pool.block_size)
    return {s: before.memory[s] for s in slots}, {s: after.memory[s] for s in slots}
