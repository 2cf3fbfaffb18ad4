"""The small read-only view over which every law is written.

The reference model (`model.py`) and a real implementation both provide these protocols, so one
predicate judges both. Sequences may be tuples, lists or numpy arrays: a law converts each item
with `int()` or `bool()` and never takes the truth value of a sequence.

Address arithmetic: `slot = block * block_size + offset`. A *position* counts slots along a
request's own block list: position p lies in `blocks[p // block_size]` at offset
`p % block_size`. Positions order memory; logical token ids order meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

NO_SLOT = -1
"""The slot of a reclaimed token: dead, and its memory has been given up."""

NULL_BLOCK = 0
"""The block that stands for "nothing"; never owned, never free, never read or written."""


class RequestView(Protocol):
    """The token table of one request."""

    @property
    def req_id(self) -> str: ...

    @property
    def logical_len(self) -> int:
        """Tokens ever known; their logical ids are 0 .. logical_len - 1."""

    @property
    def physical_len(self) -> int:
        """Slots that attention or the writer may use, holes included: positions
        [0, physical_len) along `blocks`. Later positions of owned blocks are unused."""

    @property
    def blocks(self) -> Sequence[int]:
        """Owned blocks in physical order; there may be more than `physical_len` needs."""

    @property
    def slots(self) -> Sequence[int]:
        """Slot per logical id, or NO_SLOT once reclaimed. A dead token that still has its slot
        is a hole."""

    @property
    def live(self) -> Sequence[bool]:
        """Liveness per logical id."""


class PoolView(Protocol):
    """The pool of blocks. Every block but the null block is in exactly one of: `free`, owned by
    one or more requests, `headroom`, `held`."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""

    @property
    def block_size(self) -> int:
        """Slots per block."""

    @property
    def free(self) -> Collection[int]: ...

    @property
    def headroom(self) -> Collection[int]:
        """Blocks set aside as targets of evacuation."""

    @property
    def held(self) -> Collection[int]:
        """Blocks that a plan in flight keeps from everybody else: headroom that it draws, and
        blocks without an owner that its copies may still touch."""

    def ref_count(self, block: int) -> int:
        """References to `block`, 0 when free; more than 1 means shared."""

    def is_cached(self, block: int) -> bool:
        """Whether `block` can be hit through the prefix cache (it is hashed)."""


@dataclass(frozen=True, slots=True)
class Move:
    """The copy of one live token's K and V, in every layer, from slot `src` to slot `dst`."""

    token_id: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves of one request, to be applied all or nothing.

    `version` and `blocks` are the table version and the block list the plan was made from.
    `released` are the blocks that hold no live token once the moves are done; they leave the
    request. Purpose "reclaim" must lower the block count; "dense" closes holes for a dense view
    and is exempt from that gate. `order` is the block list afterwards, where the plan also
    reorders it (no copy: positions follow the list); empty means the order stays as it is.
    """

    req_id: str
    version: int
    blocks: tuple[int, ...]
    moves: tuple[Move, ...]
    released: tuple[int, ...]
    purpose: Literal["dense", "reclaim"]
    order: tuple[int, ...] = ()


class FlightView(Protocol):
    """A plan whose copies have been given to the copy stream and that is not committed yet, or
    that was aborted and whose copies may still be running."""

    @property
    def req_id(self) -> str: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def waited(self) -> bool:
        """Whether everything the compute stream does from now on comes after the copies."""

    @property
    def aborted(self) -> bool: ...


class StateView(Protocol):
    """Everything the laws may look at."""

    @property
    def pool(self) -> PoolView: ...

    @property
    def requests(self) -> Mapping[str, RequestView]: ...

    @property
    def flights(self) -> Sequence[FlightView]: ...


@dataclass(frozen=True, slots=True)
class ReadSet:
    """What attention is given for one request in one step.

    `slots` are in the order attention is given them; `query_positions` are the logical
    positions of the tokens computed in this step.
    """

    req_id: str
    slots: Sequence[int]
    query_positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Write:
    """One new K/V entry written by a step (a copy made by a plan is a `Move`)."""

    req_id: str
    token_id: int
    slot: int
