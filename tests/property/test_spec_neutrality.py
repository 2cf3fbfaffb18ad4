"""L9 in the model: reclamation never changes what attention sees.

Two runs get the same tokens and the same evictions. One does nothing else (mode off: a block is
returned only when all its tokens are dead); the other recycles holes and moves tokens whenever
it can. After every step both see the same map.
"""

from __future__ import annotations

import random

import pytest

import vtoken_spec as spec
from vtoken_spec import Append, Evict, Move, MoveTokens, Plan, Recycle, Release, State

SIZE, BLOCKS = 3, 24


def apply(state: State, event: spec.Event) -> State:
    after = spec.step(state, event)
    assert isinstance(after, State), f"{event}: {after}"
    return after


def appended(state: State, req_id: str, count: int) -> State:
    table = state.requests.get(req_id, spec.RequestState(req_id))
    lacking = table.physical_len + count - len(table.blocks) * SIZE
    fresh = tuple(sorted(state.pool.free)[: max(0, -(-lacking // SIZE))])
    places = [b * SIZE + offset for b in table.blocks + fresh for offset in range(SIZE)]
    return apply(state, Append(req_id, tuple(places[table.physical_len :][:count]), fresh))


def holes(state: State, req_id: str) -> list[int]:
    read = spec.read_set(state, req_id, queries=0).slots
    table = state.requests[req_id]
    places = [b * SIZE + offset for b in table.blocks for offset in range(SIZE)]
    return [slot for slot in places[: table.physical_len] if slot not in read]


def naive(state: State, req_id: str) -> State:
    """Mode off: return the blocks that died as a whole."""
    table, live = state.requests[req_id], spec.read_set(state, req_id, queries=0).slots
    dead = tuple(b for b in table.blocks if not any(slot // SIZE == b for slot in live))
    return apply(state, Release(req_id, dead)) if dead else state


def packed(state: State, req_id: str) -> State:
    """Eager mode: move the last live tokens into the holes before them, return what empties."""
    table = state.requests[req_id]
    read = spec.read_set(state, req_id, queries=0).slots
    places = [b * SIZE + offset for b in table.blocks for offset in range(SIZE)]
    front, back = places[: len(read)], places[len(read) :]
    targets = [slot for slot in front if slot not in read]
    sources = [slot for slot in back if slot in read]
    token = {table.slots[i]: i for i in range(table.logical_len) if table.live[i]}
    moves = tuple(Move(token[s], s, d) for s, d in zip(sources, targets, strict=True))
    needed = -(-len(read) // SIZE)
    plan = Plan(req_id, table.version, table.blocks, moves, table.blocks[needed:], "dense")
    if table.physical_len == len(read) and needed == len(table.blocks):
        return state
    return apply(state, MoveTokens(plan))


@pytest.mark.parametrize("seed", range(40))
def test_moving_and_recycling_leave_the_visible_map_alone(seed: int) -> None:
    choose = random.Random(seed)
    off = eager = State.initial(num_blocks=BLOCKS, block_size=SIZE)
    moved = 0
    for _ in range(25):
        req_id = choose.choice("ab")
        count = choose.choice((1, 1, 1, 4)) if req_id in off.requests else 5
        if count == 1 and (free := holes(eager, req_id)):
            eager = apply(eager, Recycle(req_id, choose.choice(free)))
        else:
            eager = appended(eager, req_id, count)
        off = appended(off, req_id, count)
        assert list(spec.l9_neutrality(spec.visible(off), spec.visible(eager))) == []

        victims = [token for token, _ in spec.reads(off, req_id)][:-1]
        chosen = tuple(choose.sample(victims, k=min(len(victims), choose.choice((0, 1, 3, 5)))))
        if chosen:
            off = naive(apply(off, Evict(req_id, chosen)), req_id)
            eager = apply(eager, Evict(req_id, chosen))
        if choose.random() < 0.5:
            before = eager
            eager = packed(eager, req_id)
            moved += eager != before
            assert holes(eager, req_id) == [] or eager == before
        assert list(spec.l9_neutrality(spec.visible(off), spec.visible(eager))) == []
    assert moved, "the second run never moved anything"
    for req_id in eager.requests:
        eager = packed(eager, req_id)
        live = len(spec.reads(eager, req_id))
        assert len(eager.requests[req_id].blocks) == -(-live // SIZE)
    assert list(spec.l9_neutrality(spec.visible(off), spec.visible(eager))) == []


def test_a_run_with_another_eviction_is_told_apart() -> None:
    """The control: L9 is able to fail."""
    start = appended(State.initial(num_blocks=BLOCKS, block_size=SIZE), "a", 5)
    one, other = apply(start, Evict("a", (1,))), apply(start, Evict("a", (2,)))
    tokens = {b.token_id for b in spec.l9_neutrality(spec.visible(one), spec.visible(other))}
    assert tokens == {1, 2}
