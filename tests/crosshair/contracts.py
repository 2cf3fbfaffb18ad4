"""Contracts for symbolic execution: one step of the reference model from every table of one shape,
and the arithmetic of addresses. Steps with a plan in flight are in `flying.py`.

Shape of the steps: blocks of two slots; request "a" owns blocks 1 and 2 and has four tokens, whose
liveness is symbolic, as are the arguments of the event (numbers from -2 to 8, since a message with
an unbounded number in it has unboundedly many paths); block 3 is free. Every function calls the
model's own `step` and the laws' own predicates, and returns whether the step was accepted exactly
when it should be and broke no law, for which the answer must be yes. `expectations.json` says
which contracts are confirmed.
"""

from __future__ import annotations

from dataclasses import replace

import vtoken_spec as spec
from vtoken_spec import Move, Payload, Plan, PoolState, RequestState, State
from vtoken_spec.explore import state_faults, transition_faults

SIZE = 2


def state_of(
    live: tuple[bool, bool, bool, bool], *, cached: tuple[int, ...] = (), used: int = 4
) -> State:
    """The shape above; the first `used` tokens have been computed."""
    none: frozenset[int] = frozenset()
    pool = PoolState(4, SIZE, frozenset({3}), none, none, frozenset(cached), (0, 1, 1, 0))
    table = RequestState("a", (1, 2), (2, 3, 4, 5)[:used], live[:used], used)
    memory = (None, None, *(Payload("a", i) if i < used else None for i in range(4)), None, None)
    return State(pool, (table,), memory)


def is_right(before: State, event: spec.Event, *, allowed: bool) -> bool:
    after = spec.step(before, event)
    if isinstance(after, spec.Rejected) or not allowed:
        return isinstance(after, spec.Rejected) and not allowed
    faults = [*transition_faults(before, event, after), *state_faults(after)]
    return not faults


# One step -----------------------------------------------------------------------------------------


def append(l0: bool, l1: bool, slot: int) -> bool:
    """
    Three tokens, the newest live: the fourth goes to the physical end and nowhere else.
    pre: -2 <= slot <= 8
    post: _
    """
    before = state_of((l0, l1, True, True), used=3)
    return is_right(before, spec.Append("a", (slot,)), allowed=slot == 5)


def evict(l0: bool, l1: bool, l2: bool, token: int) -> bool:
    """
    A live token dies, except the last one; nothing else can be evicted.
    pre: -2 <= token <= 8
    post: _
    """
    before = state_of((l0, l1, l2, True))
    allowed = (token == 0 and l0) or (token == 1 and l1) or (token == 2 and l2)
    return is_right(before, spec.Evict("a", (token,)), allowed=allowed)


def recycle(l0: bool, l1: bool, l2: bool, slot: int) -> bool:
    """
    A new token takes a hole, and only a hole.
    pre: -2 <= slot <= 8
    post: _
    """
    before = state_of((l0, l1, l2, True))
    allowed = (slot == 2 and not l0) or (slot == 3 and not l1) or (slot == 4 and not l2)
    return is_right(before, spec.Recycle("a", slot), allowed=allowed)


def recycle_beside_cached(l2: bool, slot: int) -> bool:
    """
    A hole in a cached block is not recycled; one in a private block is.
    pre: -2 <= slot <= 8
    post: _
    """
    before = state_of((False, True, l2, True), cached=(1,))
    return is_right(before, spec.Recycle("a", slot), allowed=slot == 4 and not l2)


def move(l0: bool, l1: bool, l2: bool, target: int) -> bool:
    """
    The newest token moves into a hole of an owned block, and nowhere else.
    pre: -2 <= target <= 8
    post: _
    """
    before = state_of((l0, l1, l2, True))
    plan = Plan("a", 0, (1, 2), (Move(3, 5, target),), (), "dense")
    allowed = (target == 2 and not l0) or (target == 3 and not l1) or (target == 4 and not l2)
    return is_right(before, spec.MoveTokens(plan), allowed=allowed)


def move_from(l1: bool, l2: bool, token: int, source: int) -> bool:
    """
    A move names a live token and the slot where it is.
    pre: -2 <= token <= 8
    pre: -2 <= source <= 8
    post: _
    """
    before = state_of((False, l1, l2, True))
    plan = Plan("a", 0, (1, 2), (Move(token, source, 2),), (), "dense")
    named = (token == 1 and l1) or (token == 2 and l2) or token == 3
    return is_right(before, spec.MoveTokens(plan), allowed=named and source == token + 2)


def move_of_version(version: int) -> bool:
    """
    A plan made from another version of the table is rejected.
    pre: -2 <= version <= 8
    post: _
    """
    before = state_of((False, True, True, True))
    plan = Plan("a", version, (1, 2), (Move(3, 5, 2),), (), "dense")
    return is_right(before, spec.MoveTokens(plan), allowed=version == 0)


def evacuate(l0: bool, l1: bool, released: int) -> bool:
    """
    A plan that moves a block's only live token away releases that block and no other.
    pre: -2 <= released <= 8
    post: _
    """
    before = state_of((l0, l1, False, True))
    plan = Plan("a", 0, (1, 2), (Move(3, 5, 3),), (released,), "reclaim")
    return is_right(before, spec.MoveTokens(plan), allowed=released == 2 and not l1)


def release(l0: bool, l1: bool, block: int) -> bool:
    """
    An owned block without a live token is released, and only such a block.
    pre: -2 <= block <= 8
    post: _
    """
    before = state_of((l0, l1, True, True))
    allowed = block == 1 and not l0 and not l1
    return is_right(before, spec.Release("a", (block,)), allowed=allowed)


def finish(l0: bool, l1: bool, l2: bool, l3: bool) -> bool:
    """
    A request can end whatever is live.
    post: _
    """
    return is_right(state_of((l0, l1, l2, l3)), spec.Finish("a"), allowed=True)


def preempt(l0: bool, l1: bool, l2: bool, l3: bool) -> bool:
    """
    A request can be preempted whatever is live.
    post: _
    """
    return is_right(state_of((l0, l1, l2, l3)), spec.Preempt("a"), allowed=True)


def cache(l0: bool, l1: bool, l2: bool, block: int) -> bool:
    """
    A block is cached while its request has evicted nothing, and never after.
    pre: -2 <= block <= 8
    post: _
    """
    before = state_of((l0, l1, l2, True))
    allowed = (block == 1 or block == 2) and l0 and l1 and l2
    return is_right(before, spec.Cache((block,)), allowed=allowed)


def uncache(l0: bool, block: int) -> bool:
    """
    Only a cached block is taken out of the prefix cache.
    pre: -2 <= block <= 8
    post: _
    """
    before = state_of((l0, True, True, True), cached=(1,))
    return is_right(before, spec.Uncache((block,)), allowed=block == 1)


def allocate(l0: bool, block: int) -> bool:
    """
    A free block joins a request, and no other.
    pre: -2 <= block <= 8
    post: _
    """
    before = state_of((l0, True, True, True))
    return is_right(before, spec.Allocate("a", (block,)), allowed=block == 3)


def hit(l0: bool, block: int) -> bool:
    """
    A request without tokens takes a cached block that holds the tokens of that place, whoever else
    evicted one; not the second block of a prompt.
    pre: -2 <= block <= 8
    post: _
    """
    before = state_of((l0, True, True, True), cached=(1, 2))
    return is_right(before, spec.Hit("b", (block,)), allowed=block == 1)


def reserve(l0: bool, block: int) -> bool:
    """
    A free block is set aside, and no other.
    pre: -2 <= block <= 8
    post: _
    """
    before = state_of((l0, True, True, True))
    return is_right(before, spec.Reserve((block,)), allowed=block == 3)


def unreserve(l0: bool, block: int) -> bool:
    """
    Only headroom is given back.
    pre: -2 <= block <= 8
    post: _
    """
    before = state_of((l0, True, True, True))
    pool = replace(before.pool, free=frozenset(), headroom=frozenset({3}))
    before = replace(before, pool=pool)
    return is_right(before, spec.Unreserve((block,)), allowed=block == 3)


def attend(l0: bool, l1: bool, slot: int) -> bool:
    """
    Attention reads each live token once: the newest two, and whichever of the others is live.
    pre: -2 <= slot <= 8
    post: _
    """
    before = state_of((l0, l1, True, True))
    read = spec.ReadSet("a", (slot, 4, 5), (3,))
    allowed = (slot == 2 and l0 and not l1) or (slot == 3 and l1 and not l0)
    return is_right(before, spec.Attend(read), allowed=allowed)


def resume(gone: bool, l0: bool) -> bool:
    """
    A request comes back if it was preempted, whatever another one holds.
    post: _
    """
    before = replace(state_of((l0, True, True, True)), preempted=frozenset("b" if gone else ""))
    return is_right(before, spec.Resume("b"), allowed=gone)


def recycling_keeps_slots_distinct(s0: int, s1: int, s2: int, s3: int) -> tuple[int, ...]:
    """
    Whatever the slots are: whoever takes the hole of token 1 leaves no slot named twice.
    pre: s0 >= 0 and s1 >= 0 and s2 >= 0 and s3 >= 0
    pre: s0 != s1 and s0 != s2 and s0 != s3 and s1 != s2 and s1 != s3 and s2 != s3
    post: all(_[i] != _[j] for i in range(5) for j in range(i))
    """
    table = RequestState("a", (), (s0, s1, s2, s3), (True, False, True, True))
    return (*table.reclaimed([s1]).slots, s1)


# Arithmetic of addresses --------------------------------------------------------------------------


def join_then_split(block: int, offset: int, size: int) -> tuple[int, int]:
    """
    pre: block >= 0
    pre: 0 <= offset < size
    post: _ == (block, offset)
    """
    slot = block * size + offset
    return slot // size, slot % size


def split_then_join(slot: int, size: int) -> tuple[int, int]:
    """
    pre: slot >= 0
    pre: size >= 1
    post: _[0] * size + _[1] == slot
    post: 0 <= _[1] < size
    """
    return slot // size, slot % size


def blocks_for(tokens: int, size: int) -> int:
    """
    The fewest blocks that hold so many tokens.
    pre: tokens >= 0
    pre: size >= 1
    post: _ * size >= tokens
    post: (_ - 1) * size < tokens
    """
    return -(-tokens // size)


def places_are_distinct(b0: int, b1: int) -> tuple[int, ...]:
    """
    Two blocks of three slots: six different places, each in the block of its position.
    pre: b0 >= 0
    pre: b1 >= 0
    pre: b0 != b1
    post: len(set(_)) == 6
    post: all(s // 3 == (b0, b0, b0, b1, b1, b1)[p] for p, s in enumerate(_))
    """
    return RequestState("a", (b0, b1)).places(block_size=3)


def runs(s0: int, s1: int, s2: int) -> list[tuple[int, int]]:
    """
    Slots in order, as (first, count) of neighbours: nothing is lost, and runs do not touch.
    pre: 0 <= s0 < s1 < s2
    post: [first + i for first, count in _ for i in range(count)] == [s0, s1, s2]
    post: all(a + n < b for (a, n), (b, _n) in zip(_, _[1:]))
    """
    found: list[tuple[int, int]] = []
    for slot in (s0, s1, s2):
        if found and sum(found[-1]) == slot:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found
