"""What can happen to the token tables, the pool and the copies in flight.

An event records the choices that were made (which slots, which victims, which blocks); the model
judges whether they were allowed and never predicts them, so policies and planners stay outside.
Nothing here is validated: an event may be wrong in any way, and `model.step` says why.

The order of events is the order of the compute stream: what a step scheduled later does on the
device comes later, however far the host is ahead. Only copies of a plan in flight run beside it,
and `Copy` is the moment at which one of them happens.
"""

from __future__ import annotations

from dataclasses import dataclass

from .view import Plan, ReadSet

# Blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allocate:
    """Free blocks that are not cached join the end of a request's block list. A request that is
    not known yet begins here, or with a hit."""

    req_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """A request without tokens or blocks shares a prefix from the prefix cache: it takes one more
    reference to each of the cached `blocks`, and has their tokens without writing them."""

    req_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Whole blocks without a live token leave the request; nothing is copied or trimmed.

    The dead tokens in them are reclaimed. A block becomes free when its last reference goes and
    no copy can touch it any more.
    """

    req_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cache:
    """Full blocks of requests without evictions become reachable through the prefix cache."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Uncache:
    """Blocks, in use or free, stop being reachable through the prefix cache."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reserve:
    """Free blocks that are not cached are set aside as headroom."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Headroom blocks are free again."""

    blocks: tuple[int, ...]


# Tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """A step writes tokens `logical_len ..`, one to each of `slots`, at the physical end."""

    req_id: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recycle:
    """A one-token step writes its token into the hole `slot` instead of at the physical end."""

    req_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Attend:
    """A step's attention reads the slots it is given. Changes nothing; it is the moment at which
    I3 and L6 are judged."""

    read: ReadSet


@dataclass(frozen=True, slots=True)
class Evict:
    """A policy declares tokens dead. Metadata only: each keeps its slot, which becomes a hole."""

    req_id: str
    token_ids: tuple[int, ...]


# Relocation -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoveTokens:
    """A plan is applied in step order: copies done, table switched, emptied blocks returned, end
    trimmed.

    Trimming: the physical length ends after the last live slot, and the dead tokens behind it
    are reclaimed. A "dense" plan without moves is a trim alone.
    """

    plan: Plan


@dataclass(frozen=True, slots=True)
class Prepare:
    """A plan goes into flight: its copies are given to the copy stream, behind everything the
    compute stream has been given so far. The table stays; headroom that it draws is held."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Copy:
    """One move of the plan in flight happens, at whatever moment the copy stream likes."""

    req_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream waits for the plan's copies: whatever it does from now on comes after
    them. Of an aborted plan nothing is left then, and what it held is returned."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The table switches to the plan in flight. Tokens evicted since are dropped from it, blocks
    gained since stay at the end, the emptied blocks leave the request, headroom that was drawn
    comes first; the physical end stays in its block."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The plan in flight will not be committed. Its copies may still be running, so it keeps what
    it holds until the compute stream has waited for them."""

    req_id: str


# Requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ends; its table is dropped, its references are returned, its plan aborted."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """The engine takes the request's memory back, as if it finished. Evicted tokens are forgotten
    with the table: they are live again when the request comes back and is computed anew."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """A preempted request comes back with an empty table: no token, no block, none reclaimed."""

    req_id: str


Event = (
    Allocate
    | Hit
    | Release
    | Cache
    | Uncache
    | Reserve
    | Unreserve
    | Append
    | Recycle
    | Attend
    | Evict
    | MoveTokens
    | Prepare
    | Copy
    | Wait
    | Commit
    | Abort
    | Finish
    | Preempt
    | Resume
)
