"""What can happen to the token tables and the pool.

An event records the choices that were made (which slots, which victims, which blocks); the model
judges whether they were allowed and never predicts them, so policies and planners stay outside.
Nothing here is validated: an event may be wrong in any way, and `model.step` says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from .view import Plan


@dataclass(frozen=True, slots=True)
class Append:
    """A step computes tokens `logical_len ..`, one for each of `slots`, at the physical end.

    `new_blocks` join the end of the block list first. A request that is not known yet begins
    with this event; only then may the first `adopted` tokens be a prefix-cache hit: the first
    `adopted / block_size` new blocks are cached ones, their tokens are not written, and the
    request takes one more reference to each. All other new blocks must be free and not cached.
    """

    req_id: str
    slots: tuple[int, ...]
    new_blocks: tuple[int, ...] = ()
    adopted: int = 0


@dataclass(frozen=True, slots=True)
class Evict:
    """A policy declares tokens dead. Metadata only: each keeps its slot, which becomes a hole."""

    req_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recycle:
    """A one-token step writes its token into the hole `slot` instead of at the physical end."""

    req_id: str
    slot: int
    new_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MoveTokens:
    """A plan is applied: copies done, table switched, emptied blocks returned, end trimmed.

    Trimming: the physical length ends after the last live slot, and the dead tokens behind it
    are reclaimed. A "dense" plan without moves is a trim alone.
    """

    plan: Plan


@dataclass(frozen=True, slots=True)
class Release:
    """Whole blocks without a live token leave the request; nothing is copied or trimmed.

    The dead tokens in them are reclaimed. A block becomes free when its last reference goes.
    """

    req_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ends; its table is dropped and its references are returned."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """The engine takes the request's memory back. The table is dropped: when the request comes
    back it is appended anew, and tokens evicted before are live again."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Cache:
    """Full blocks of requests without evictions become reachable through the prefix cache."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Uncache:
    """Blocks, in use or free, stop being reachable through the prefix cache."""

    blocks: tuple[int, ...]


Event = Append | Evict | Recycle | MoveTokens | Release | Finish | Preempt | Cache | Uncache
