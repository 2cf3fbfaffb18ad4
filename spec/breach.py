"""What a law reports, and the small readings of the view that several laws share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .view import PoolView, RequestView, StateView

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "I1": "conservation",
        "I2": "unique mapping",
        "I3": "visibility",
        "I4": "planning",
        "L5": "accounting",
        "L6": "read set",
        "L7": "write safety",
        "L8": "sharing",
        "L9": "neutrality",
        "L10": "progress",
        "L11": "fence",
    }
)
"""The permanent law ids and their short names."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One fault against one law. `message` says everything the other fields say, in words."""

    law: str
    message: str
    req_id: str | None = None
    token_id: int | None = None
    slot: int | None = None
    before: object = None
    after: object = None


def breach(
    law: str,
    what: str,
    *,
    req_id: str | None = None,
    token_id: int | None = None,
    slot: int | None = None,
    before: object = None,
    after: object = None,
) -> Breach:
    token_id = None if token_id is None else int(token_id)
    slot = None if slot is None else int(slot)
    where = [
        f"{name} {value!r}"
        for name, value in (("request", req_id), ("token", token_id), ("slot", slot))
        if value is not None
    ]
    message = f"{law} {TITLES[law]}: {', '.join(where) or 'pool'}: {what}"
    if before is not None or after is not None:
        message += f" (before: {before!r}, after: {after!r})"
    return Breach(law, message, req_id, token_id, slot, before, after)


def ints(items: Iterable[int]) -> list[int]:
    return [int(item) for item in items]


def live_slots(request: RequestView) -> dict[int, int]:
    """Slot -> token id of the request's live tokens."""
    pairs = zip(request.slots, request.live, strict=False)
    return {int(slot): token for token, (slot, live) in enumerate(pairs) if live}


def all_live_slots(view: StateView) -> dict[int, tuple[str, int]]:
    """Slot -> (request, token id) of every live token; of a shared slot, one of its tokens."""
    return {
        slot: (req_id, token)
        for req_id, request in view.requests.items()
        for slot, token in live_slots(request).items()
    }


def is_protected(pool: PoolView, block: int) -> bool:
    """Whether `block` must not be written: shared, or reachable through the prefix cache."""
    return pool.ref_count(block) > 1 or pool.is_cached(block)


def slots_in_flight(view: StateView) -> dict[int, str]:
    """Slot -> request of every source and target of a plan in flight."""
    return {
        slot: flight.req_id
        for flight in view.flights
        for move in flight.plan.moves
        for slot in (int(move.src), int(move.dst))
    }
