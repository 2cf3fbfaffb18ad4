"""Why the model refuses an event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why an event was rejected. Rejection is normal and changes nothing."""

    UNKNOWN_REQUEST = "the request has no table"
    NOTHING_TO_DO = "the event would change nothing"
    DUPLICATE = "a token or a block is named twice"
    UNKNOWN_TOKEN = "a negative id is no token"
    NOT_COMPUTED = "the token has not been computed yet"
    DEAD_TOKEN = "the token is dead already"
    LAST_TOKEN = "the last computed token cannot be evicted"
    BAD_SLOTS = "the slots are not the next ones at the physical end"
    BAD_HIT = "the blocks are not a cached prefix of a request without tokens"
    BAD_READ = "the read set is not each live token once"
    NOT_A_HOLE = "the slot is not a hole"
    PROTECTED_BLOCK = "the block is shared or cached and must not be written"
    NOT_FREE = "the block is not free"
    NOT_OWNED = "the block is not owned"
    NOT_RESERVED = "the block is not headroom"
    LIVE_BLOCK = "the block still holds a live token"
    CACHED_BLOCK = "the block is reachable through the prefix cache"
    NOT_CACHED = "the block is not reachable through the prefix cache"
    NOT_CACHEABLE = "the block is not a full, unmoved part of a request without evictions"
    STALE_PLAN = "the plan was made from another table"
    BAD_SOURCE = "a source is not the slot of the live token it names"
    BAD_TARGET = "a target is not an unused slot of an owned or headroom block"
    BAD_RELEASE = "the plan releases a block that it does not empty"
    BAD_ORDER = "the new order is not a permutation of the blocks that stay"
    NO_GAIN = "the plan does not lower the block count"
    AT_THE_END = "the plan touches the physical end, where new tokens go while it is in flight"
    IN_FLIGHT = "a plan of the request is in flight"
    NOT_IN_FLIGHT = "no plan of the request is in flight"
    ABORTED = "the plan has been aborted"
    BAD_COPY = "the plan has no such move left to copy"
    COPY_PENDING = "a copy of the plan has not happened yet"
    NOT_WAITED = "the compute stream has not waited for the plan's copies"
    PREEMPTED = "the request is preempted and has to resume first"
    NOT_PREEMPTED = "the request is not preempted"


@dataclass(frozen=True, slots=True)
class Rejected:
    """The answer to an event that was not allowed. `detail` names the offender."""

    reason: Reason
    detail: str


def no(reason: Reason, detail: str) -> Rejected:
    return Rejected(reason, f"{reason.value}: {detail}")


def twice(
    items: tuple[int, ...], *, named: str = "blocks", none_is_wrong: bool = True
) -> Rejected | None:
    """A list of tokens or blocks that is empty or names one of them twice."""
    if none_is_wrong and not items:
        return no(Reason.NOTHING_TO_DO, f"no {named} named")
    if len(set(items)) != len(items):
        return no(Reason.DUPLICATE, f"{named} {items}")
    return None
