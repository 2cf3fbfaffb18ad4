"""L9 in the model: reclamation never changes what attention sees.

Three runs get the same tokens and the same evictions. One does nothing else (mode off: a block is
returned only when all its tokens are dead); one recycles holes and moves tokens whenever it can
(eager); one has plans in flight, which are copied, waited for, committed or aborted at any moment
(background). After every step all see the same map.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

import vtoken_spec as spec
from vtoken_spec import (
    Abort,
    Allocate,
    Append,
    Evict,
    Move,
    MoveTokens,
    Plan,
    Recycle,
    Release,
    State,
)
from vtoken_spec.alphabet import ALLOWED, Bounds

SIZE, BLOCKS = 3, 24
BOUNDS = Bounds(requests=("a", "b"))
RELOCATION = ("preparations", "copies", "settlements")


def apply(state: State, event: spec.Event) -> State:
    after = spec.step(state, event)
    assert isinstance(after, State), f"{event}: {after}"
    return after


def appended(state: State, req_id: str, count: int) -> State:
    table = state.requests.get(req_id, spec.RequestState(req_id))
    lacking = table.physical_len + count - len(table.blocks) * SIZE
    fresh = tuple(sorted(state.pool.free)[: max(0, -(-lacking // SIZE))])
    if fresh:
        state = apply(state, Allocate(req_id, fresh))
    places = [b * SIZE + offset for b in table.blocks + fresh for offset in range(SIZE)]
    return apply(state, Append(req_id, tuple(places[table.physical_len :][:count])))


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


def flown(state: State, choose: random.Random, done: Counter[str]) -> State:
    """Background mode: plans go into flight, and what is in flight gets on; an abort is rare."""
    for kind in choose.choices(RELOCATION, weights=(1, 4, 2), k=choose.randint(0, 12)):
        events = list(ALLOWED[kind](state, BOUNDS))
        if choose.random() < 0.9:
            events = [event for event in events if not isinstance(event, Abort)]
        if events:
            event = choose.choice(events)
            state = apply(state, event)
            done[type(event).__name__] += 1
    return state


def agree(off: State, *others: State) -> bool:
    seen = spec.visible(off)
    return not [b for other in others for b in spec.l9_neutrality(seen, spec.visible(other))]


@pytest.mark.parametrize("seed", range(40))
def test_reclamation_leaves_the_visible_map_alone(seed: int) -> None:
    choose = random.Random(seed)
    off = eager = State.initial(num_blocks=BLOCKS, block_size=SIZE)
    background = State.initial(num_blocks=BLOCKS + 2, block_size=SIZE, headroom=(1, 2))
    moved, done = 0, Counter[str]()
    for _ in range(25):
        req_id = choose.choice("ab")
        count = choose.choice((1, 1, 1, 4)) if req_id in off.requests else 5
        if count == 1 and (free := holes(eager, req_id)):
            eager = apply(eager, Recycle(req_id, choose.choice(free)))
        else:
            eager = appended(eager, req_id, count)
        off, background = appended(off, req_id, count), appended(background, req_id, count)
        assert agree(off, eager, background)

        victims = [token for token, _ in spec.reads(off, req_id)][:-1]
        chosen = tuple(choose.sample(victims, k=min(len(victims), choose.choice((0, 1, 3, 5)))))
        if chosen:
            off = naive(apply(off, Evict(req_id, chosen)), req_id)
            eager, background = (apply(s, Evict(req_id, chosen)) for s in (eager, background))
        if choose.random() < 0.5:
            before = eager
            eager = packed(eager, req_id)
            moved += eager != before
            assert holes(eager, req_id) == [] or eager == before
        background = flown(background, choose, done)
        assert agree(off, eager, background)
    assert moved, "the second run never moved anything"
    assert done["Commit"], "the third run never committed a plan"
    for req_id in eager.requests:
        eager = packed(eager, req_id)
        live = len(spec.reads(eager, req_id))
        assert len(eager.requests[req_id].blocks) == -(-live // SIZE)
    assert agree(off, eager, background)


def test_a_run_with_another_eviction_is_told_apart() -> None:
    """The control: L9 is able to fail."""
    start = appended(State.initial(num_blocks=BLOCKS, block_size=SIZE), "a", 5)
    one, other = apply(start, Evict("a", (1,))), apply(start, Evict("a", (2,)))
    tokens = {b.token_id for b in spec.l9_neutrality(spec.visible(one), spec.visible(other))}
    assert tokens == {1, 2}
