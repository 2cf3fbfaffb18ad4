"""Random histories of calls on a token table: right ones, and wrong ones of every kind.

A history is drawn beside the reference model alone, so that it depends on its seed and on nothing
that an implementation does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from vtoken.testing.conformance_model import (
    ApplyMoves,
    Call,
    Drop,
    EvictMany,
    EvictOne,
    Sync,
    answer,
)
from vtoken_spec import RequestState, State

BLOCK_SIZES = (1, 2, 2, 3, 4, 16)
NUM_BLOCKS = 40
_CALLS = 30
_NAMES = ("a", "b", "c")
_MOST_TOKENS = 48


def initial(block_size: int) -> State:
    return State.initial(num_blocks=NUM_BLOCKS, block_size=block_size)


def drawn_history(seed: int) -> tuple[int, list[Call]]:
    """A block size and a history, the same for the same seed."""
    rng = random.Random(seed)
    size = rng.choice(BLOCK_SIZES)
    state, history = initial(size), list[Call]()
    # Some faults need one operation to be absent for long.
    absent = {kind for kind in (_share, _evict, _move, _drop) if rng.random() < 0.2}
    kinds = [kind for kind in _RIGHT if kind not in absent]
    while len(history) < _CALLS:
        call = None
        if rng.random() < 0.3:
            wrong = list(_wrong(rng, state))
            call = rng.choice(wrong) if wrong else None
        call = call or rng.choice(kinds)(rng, state)
        if call is None:
            continue
        after = answer(state, call)
        if isinstance(after, State):
            state = after
        elif after.verdict == "open":
            continue
        history.append(call)
    return size, history


def simpler(call: Call) -> Iterator[Call]:
    """Calls that do less, the least first."""
    match call:
        case Sync(req_id, blocks, total_len):
            for count in range(1, len(blocks)):
                yield Sync(req_id, blocks[:count], total_len)
            for total in sorted({1, total_len // 2, total_len - 1}):
                if 0 < total < total_len:
                    yield Sync(req_id, blocks, total)
        case EvictMany(req_id, (token,)):
            yield EvictOne(req_id, token)
        case EvictMany(req_id, tokens):
            for index in range(len(tokens)):
                yield EvictMany(req_id, (*tokens[:index], *tokens[index + 1 :]))
        case ApplyMoves(req_id, moves) if len(moves) > 1:
            for index in range(len(moves)):
                yield ApplyMoves(req_id, (*moves[:index], *moves[index + 1 :]))


# Right calls ------------------------------------------------------------------------------------


def _sync(rng: random.Random, state: State) -> Call | None:
    """One to many tokens, sometimes with a block too many, in blocks of any order."""
    req_id = rng.choice(_NAMES)
    table, size = state.requests.get(req_id, RequestState(req_id)), state.pool.block_size
    count = rng.choice([1, 1, rng.randint(1, 2 * size + 1), rng.randint(size, 3 * size)])
    if table.logical_len + count > _MOST_TOKENS:
        return Drop(req_id)
    lacking = -(-(table.physical_len + count) // size) - len(table.blocks)
    fresh = _fresh(rng, state, max(0, lacking) + (rng.random() < 0.15))
    return Sync(req_id, (*table.blocks, *fresh), table.logical_len + count)


def _share(rng: random.Random, state: State) -> Call | None:
    """A new request begins with the first blocks of another one."""
    names, size = [name for name in _NAMES if name not in state.requests], state.pool.block_size
    if not names or not state.tables:
        return None
    owner = rng.choice(state.tables)
    whole = [i for i in range(len(owner.blocks)) if (i + 1) * size <= owner.physical_len]
    if not whole or not all(owner.live):
        return None
    adopted = owner.blocks[: rng.randint(1, len(whole))]
    count = rng.randint(0, size)
    fresh = _fresh(rng, state, 1 if count else 0)
    return Sync(rng.choice(names), (*adopted, *fresh), len(adopted) * size + count)


def _evict(rng: random.Random, state: State) -> Call | None:
    table = _any(rng, state)
    victims = [token for token in _live(table) if token < table.logical_len - 1] if table else []
    if table is None or not victims:
        return None
    if rng.random() < 0.5:
        return EvictOne(table.req_id, rng.choice(victims))
    most = rng.choice([len(victims), max(1, len(victims) // 2), 1])
    return EvictMany(table.req_id, tuple(rng.sample(victims, most)))


def _move(rng: random.Random, state: State) -> Call | None:
    """Live tokens to holes before the physical end, in blocks that nobody shares."""
    table = _any(rng, state)
    if table is None:
        return None
    holes, live = _holes(state, table), _live(table)
    count = rng.randint(1, max(1, min(len(holes), len(live))))
    if not holes or not live:
        return None
    tokens, targets = rng.sample(live, count), rng.sample(holes, count)
    return ApplyMoves(table.req_id, _pairs(state, tokens, targets))


def _drop(rng: random.Random, state: State) -> Call | None:
    table = _any(rng, state)
    return Drop(table.req_id) if table and rng.random() < 0.3 else None


_RIGHT = (_sync, _sync, _share, *(_evict,) * 3, *(_move,) * 4, _drop)

# Wrong calls ------------------------------------------------------------------------------------


def _wrong(rng: random.Random, state: State) -> Iterator[Call]:
    """One call of every wrong kind that there is now, and a few that may be taken for nothing."""
    missing = next((name for name in (*_NAMES, "d") if name not in state.requests), "d")
    yield EvictOne(missing, 0)
    yield EvictMany(missing, (0,))
    yield ApplyMoves(missing, ((0, (1, 0)),))
    yield Drop(missing)
    yield from _wrong_beginnings(rng, state, missing)
    table = _any(rng, state)
    if table is not None:
        yield EvictMany(table.req_id, ())
        yield ApplyMoves(table.req_id, ())
        yield from _wrong_evictions(rng, table)
        yield from _wrong_lists(rng, state, table)
        yield from _wrong_moves(rng, state, table)


def _wrong_beginnings(rng: random.Random, state: State, req_id: str) -> Iterator[Call]:
    """A request that is refused at its first call is not there afterwards."""
    fresh, size = _fresh(rng, state, 1), state.pool.block_size
    if fresh:
        yield Sync(req_id, fresh, size + 1)
        yield Sync(req_id, fresh, 0)
        yield Sync(req_id, fresh * 2, size + 1)
    yield Sync(req_id, (), 1)
    yield Sync(req_id, (0,), 1)


def _wrong_evictions(rng: random.Random, table: RequestState) -> Iterator[Call]:
    newest = table.logical_len - 1
    dead = [token for token in range(newest) if not table.live[token]]
    bad = [-1, newest + 1, newest + 100, newest, *dead[:2]]
    good = [token for token in _live(table) if token < newest]
    for token in bad:
        yield EvictOne(table.req_id, token)
        yield EvictMany(table.req_id, (token,))
        if good:
            some = rng.sample(good, rng.randint(1, len(good)))
            yield EvictMany(table.req_id, tuple(rng.choice([[token, *some], [*some, token]])))
    if good:
        token = rng.choice(good)
        yield EvictMany(table.req_id, (token, token))
        yield EvictMany(table.req_id, (*good, token))


def _wrong_lists(rng: random.Random, state: State, table: RequestState) -> Iterator[Call]:
    blocks, total, size = table.blocks, table.logical_len, state.pool.block_size
    room = len(blocks) * size - table.physical_len
    fresh = _fresh(rng, state, 1)
    yield Sync(table.req_id, blocks, total)
    yield Sync(table.req_id, blocks, total - 1)
    yield Sync(table.req_id, blocks, 0)
    yield Sync(table.req_id, blocks, total + room + 1)
    yield Sync(table.req_id, blocks[:-1], total + 1)
    yield Sync(table.req_id, (), total + 1)
    wrong = [(*blocks, blocks[0]), (*blocks, 0), (*blocks, -1)]
    if len(blocks) > 1:
        wrong += [(*blocks[1:], blocks[0]), (*blocks[:-2], blocks[-1], blocks[-2]), blocks[1:]]
    if fresh:
        wrong += [(*blocks[:-1], *fresh), (*fresh, *blocks), (*blocks[:-1], *fresh, blocks[-1])]
        wrong += [(*blocks, *fresh, *fresh)]
    for listed in wrong:
        yield Sync(table.req_id, listed, total + 1)


def _wrong_moves(rng: random.Random, state: State, table: RequestState) -> Iterator[Call]:
    """Each alone, and behind and before a right one."""
    size, live, holes = state.pool.block_size, _live(table), _holes(state, table)
    token = rng.choice(live)
    taken = _place(state, table.slots[rng.choice(live)])
    bad: list[tuple[int, tuple[int, int]]] = [(token, taken)]
    for block in (-1, 0, *_fresh(rng, state, 1)):
        bad.append((token, (block, rng.randrange(size))))
    # An offset that is out of range, in a sum that is not.
    bad += [(token, (block, size)) for block in table.blocks[:2]]
    bad += [(token, (block, -1)) for block in table.blocks[:2]]
    if holes:
        hole = _place(state, rng.choice(holes))
        dead = [other for other in range(table.logical_len) if not table.live[other]]
        wrong_tokens = [-1, table.logical_len, table.logical_len + 100, *dead[:2]]
        bad += [(other, hole) for other in wrong_tokens]
    right: list[tuple[int, tuple[int, int]]] = []
    if holes and len(live) > 1:
        other = rng.choice([one for one in live if one != token])
        right = [(other, _place(state, rng.choice(holes)))]
    for move in bad:
        yield ApplyMoves(table.req_id, (move,))
        if right and move[1] != right[0][1]:
            yield ApplyMoves(table.req_id, (*right, move))
            yield ApplyMoves(table.req_id, (move, *right))
    if right:
        (one, target) = right[0]
        yield ApplyMoves(table.req_id, (*right, (token, target)))  # one target twice
        # To where the other one has just left.
        yield ApplyMoves(table.req_id, (*right, (token, _place(state, table.slots[one]))))
        for slot in rng.sample(holes, min(2, len(holes))):
            yield ApplyMoves(table.req_id, (*right, (one, _place(state, slot))))  # a token twice


# What can be read off a state -------------------------------------------------------------------


def _any(rng: random.Random, state: State) -> RequestState | None:
    tables = [table for table in state.tables if table.slots]
    return rng.choice(tables) if tables else None


def _fresh(rng: random.Random, state: State, count: int) -> tuple[int, ...]:
    return tuple(rng.sample(sorted(state.pool.free), count))


def _live(table: RequestState) -> list[int]:
    return [token for token, alive in enumerate(table.live) if alive]


def _holes(state: State, table: RequestState) -> list[int]:
    size, live = state.pool.block_size, table.live_slots()
    used = table.places(block_size=size)[: table.physical_len]
    return [s for s in used if s not in live and state.pool.ref_count(s // size) == 1]


def _place(state: State, slot: int) -> tuple[int, int]:
    return divmod(slot, state.pool.block_size)


def _pairs(
    state: State, tokens: Iterable[int], targets: Iterable[int]
) -> tuple[tuple[int, tuple[int, int]], ...]:
    pairs = zip(tokens, targets, strict=True)
    return tuple((token, _place(state, slot)) for token, slot in pairs)
