"""The exhaustive search visits one state of each class under renaming, and no fewer.

The scopes are small enough to try every renaming of requests and blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest

import vtoken_spec as spec
from vtoken_spec import Flight, State
from vtoken_spec.alphabet import ALLOWED, Bounds
from vtoken_spec.explore import Scope, canonical, explore

FLIGHT = ("allocations", "appends", "evictions", "preparations", "copies", "settlements")


def scope(name: str, *, blocks: int, requests: str, tokens: int, kinds: tuple[str, ...]) -> Scope:
    """Blocks of one slot."""
    bounds = Bounds(tuple(requests), tokens, appended=2, evicted=(1,), moved=3, headroom=1)
    return Scope(name=name, num_blocks=blocks + 1, block_size=1, bounds=bounds, kinds=kinds)


SCOPES = (
    scope(
        "one request and headroom",
        blocks=4,
        requests="a",
        tokens=3,
        kinds=(*FLIGHT, "endings", "returns", "reservations"),
    ),
    scope(
        "two requests that come and go",
        blocks=3,
        requests="ab",
        tokens=3,
        kinds=(*FLIGHT, "endings", "returns"),
    ),
    scope(
        "two requests that share blocks",
        blocks=3,
        requests="ab",
        tokens=3,
        kinds=(*FLIGHT, "hits", "cachings"),
    ),
    scope(
        "two requests in place",
        blocks=2,
        requests="ab",
        tokens=2,
        kinds=tuple(kind for kind in ALLOWED if kind not in ("attends", "reservations")),
    ),
)


def renamed(state: State, requests: Mapping[str, str], blocks: Sequence[int]) -> str:
    """Everything that counts of a state, after a renaming."""
    pool, size = state.pool, state.pool.block_size
    moved = {
        b * size + i: blocks[b] * size + i for b in range(pool.num_blocks) for i in range(size)
    }
    moved[spec.NO_SLOT] = spec.NO_SLOT
    kept = {slot for table in state.tables for slot in table.live_slots()}
    kept |= {slot for slot in range(len(state.memory)) if slot // size in pool.cached}
    kept |= {slot for flight in state.flights for slot in landed(state, flight)}
    memory = {moved[s]: (requests[p[0]], p[1]) for s in kept if (p := state.memory[s]) is not None}
    tables = [
        (
            requests[table.req_id],
            [blocks[block] for block in table.blocks],
            [moved[slot] for slot in table.slots],
            table.live,
            table.physical_len,
        )
        for table in state.tables
    ]
    flights = [
        (
            requests[flight.req_id],
            [(moved[move.src], moved[move.dst]) for move in flight.plan.moves],
            sorted(blocks[block] for block in flight.drawn(block_size=size)),
            sorted(flight.copied),
            flight.waited,
            () if flight.aborted else [move.token_id for move in flight.plan.moves],
            () if flight.aborted else [blocks[block] for block in flight.plan.released],
            () if flight.aborted else len(flight.plan.blocks),
        )
        for flight in state.flights
    ]
    parts = (pool.free, pool.headroom, pool.held, pool.cached)
    places = [sorted(blocks[b] for b in part) for part in parts]
    refs = sorted((blocks[block], count) for block, count in enumerate(pool.refs))
    preempted = sorted(requests[req_id] for req_id in state.preempted)
    return repr((sorted(tables), sorted(flights), sorted(memory.items()), places, refs, preempted))


def landed(state: State, flight: Flight) -> set[int]:
    """Where copies lie that a commit would make visible."""
    if flight.aborted:
        return set()
    live, moves = state.requests[flight.req_id].live, flight.plan.moves
    return {moves[index].dst for index in flight.copied if live[moves[index].token_id]}


def every_state(scope: Scope) -> dict[str, State]:
    """Reached without any symmetry; by name."""
    start = State.initial(num_blocks=scope.num_blocks, block_size=scope.block_size)
    same = {req_id: req_id for req_id in scope.bounds.requests}
    known, frontier = {renamed(start, same, range(scope.num_blocks)): start}, [start]
    while frontier:
        state = frontier.pop()
        for kind in scope.kinds:
            for event in ALLOWED[kind](state, scope.bounds):
                after = spec.step(state, event)
                assert isinstance(after, State)
                name = renamed(after, same, range(scope.num_blocks))
                if name not in known:
                    known[name] = after
                    frontier.append(after)
    return known


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.name)
def test_the_search_visits_one_state_of_each_class_under_renaming(scope: Scope) -> None:
    """Claim: states have the same canonical code exactly when some renaming maps one onto the
    other, and the search finds each class."""
    known, requests = every_state(scope), scope.bounds.requests
    renamings = [
        (dict(zip(requests, ids, strict=True)), (0, *blocks))
        for ids in permutations(requests)
        for blocks in permutations(range(1, scope.num_blocks))
    ]
    classes = {
        (canonical(state, requests), min(renamed(state, *renaming) for renaming in renamings))
        for state in known.values()
    }
    assert len({code for code, _ in classes}) == len({name for _, name in classes}) == len(classes)
    assert explore(scope).states == len(classes) < len(known)
    assert "preparations" not in scope.kinds or any(state.flights for state in known.values())
    assert "endings" not in scope.kinds or any(state.preempted for state in known.values())
