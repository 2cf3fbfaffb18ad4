"""Predicates on states of the reference model that a search must reach: without such states, the
laws would hold for want of anything to break."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import vtoken_spec as spec
from vtoken_spec import Flight, RequestState, State


def holes(state: State) -> Iterator[int]:
    """The blocks in which some request has a hole of its own, each once per hole."""
    for table in state.tables:
        for slot, alive in zip(table.slots, table.live, strict=True):
            if not alive and slot != spec.NO_SLOT:
                yield slot // state.pool.block_size


def used_blocks(state: State, table: RequestState) -> set[int]:
    return {slot // state.pool.block_size for slot in table.live_slots()}


def read(state: State, table: RequestState) -> list[tuple[int, spec.Payload]]:
    return [(token, p) for token, p in spec.reads(state, table.req_id) if p is not None]


# Holes, sharing, the prefix cache -----------------------------------------------------------------


def shared_block_with_a_hole(state: State) -> bool:
    return any(state.pool.refs[block] > 1 for block in holes(state))


def cached_block_with_a_hole(state: State) -> bool:
    return any(block in state.pool.cached for block in holes(state))


def emptied_middle_block(state: State) -> bool:
    return any(
        len(table.blocks) > 2
        and table.blocks[1] not in used_blocks(state, table)
        and {table.blocks[0], table.blocks[2]} <= used_blocks(state, table)
        for table in state.tables
    )


def tokens_out_of_logical_order(state: State) -> bool:
    size = state.pool.block_size
    for table in state.tables:
        places, live = table.places(block_size=size), table.live_slots()
        order = [places.index(slot) for slot in table.slots if slot in live]
        if order != sorted(order):
            return True
    return False


def hit_of_a_writer_that_is_gone(state: State) -> bool:
    writers = {payload.writer for table in state.tables for _, payload in read(state, table)}
    return bool(writers - set(state.requests))


def writer_back_beside_its_reader(state: State) -> bool:
    """Preempted and begun anew in other blocks, while its old tokens are read by another."""
    return any(
        payload.writer != table.req_id
        and payload.writer in state.requests
        and payload not in dict(spec.reads(state, payload.writer)).values()
        for table in state.tables
        for _, payload in read(state, table)
    )


def exhausted_pool_with_a_hole(state: State) -> bool:
    return not state.pool.free and any(True for _ in holes(state))


def free_block_in_the_prefix_cache(state: State) -> bool:
    return bool(state.pool.free & state.pool.cached)


# Plans in flight ----------------------------------------------------------------------------------


def running(state: State) -> list[Flight]:
    """Plans whose copies may be running: the compute stream has not waited for them."""
    return [flight for flight in state.flights if not flight.waited]


def sources(state: State, flight: Flight) -> set[int]:
    return {move.src // state.pool.block_size for move in flight.plan.moves}


def token_appended_while_half_of_the_copies_are_done(state: State) -> bool:
    """Its newest token lies in a block that was gained since the plan was made."""
    return any(
        0 < len(flight.copied) < len(flight.plan.moves)
        and state.requests[flight.req_id].slots[-1] // state.pool.block_size
        not in flight.plan.blocks
        for flight in running(state)
        if not flight.aborted
    )


def token_evicted_whose_copy_is_in_flight(state: State) -> bool:
    return any(
        not state.requests[flight.req_id].live[move.token_id]
        for flight in running(state)
        if not flight.aborted
        for move in flight.plan.moves
    )


def commit_that_drops_a_dead_token(state: State) -> bool:
    """It is what comes next, if anybody likes."""
    return any(
        not state.requests[flight.req_id].live[move.token_id]
        for flight in state.flights
        if flight.waited
        for move in flight.plan.moves
    )


def headroom_drawn_and_held(state: State) -> bool:
    drawn = [flight.drawn(block_size=state.pool.block_size) for flight in state.flights]
    return any(blocks and blocks <= state.pool.held for blocks in drawn)


def block_held_for_a_request_that_is_gone(state: State) -> bool:
    return any(
        flight.req_id not in state.requests and sources(state, flight) & state.pool.held
        for flight in running(state)
    )


def request_back_beside_its_former_copies(state: State) -> bool:
    """Its plan was aborted with copies running, and it has begun anew in other blocks."""
    return any(
        flight.aborted
        and (table := state.requests.get(flight.req_id)) is not None
        and table.slots != ()
        and not sources(state, flight) & set(table.blocks)
        for flight in running(state)
    )


def copy_out_of_a_shared_block(state: State) -> bool:
    return any(
        state.pool.refs[block] > 1 for flight in running(state) for block in sources(state, flight)
    )


def hole_of_the_last_owner_that_a_copy_still_reads(state: State) -> bool:
    """The race: a copy out of a shared block is running, its request is gone, and the one that is
    left has a hole there."""
    return any(
        state.pool.refs[block] == 1 and block in holes(state)
        for flight in running(state)
        if flight.req_id not in state.requests
        for block in sources(state, flight)
    )


def two_plans_in_flight(state: State) -> bool:
    return len(running(state)) > 1


Control = Callable[[State], bool]
_IN_PLACE: tuple[Control, ...] = (
    shared_block_with_a_hole,
    cached_block_with_a_hole,
    emptied_middle_block,
    tokens_out_of_logical_order,
    hit_of_a_writer_that_is_gone,
    writer_back_beside_its_reader,
    exhausted_pool_with_a_hole,
    free_block_in_the_prefix_cache,
)
_IN_FLIGHT: tuple[Control, ...] = (
    token_appended_while_half_of_the_copies_are_done,
    token_evicted_whose_copy_is_in_flight,
    commit_that_drops_a_dead_token,
    headroom_drawn_and_held,
    block_held_for_a_request_that_is_gone,
    request_back_beside_its_former_copies,
    copy_out_of_a_shared_block,
    hole_of_the_last_owner_that_a_copy_still_reads,
    two_plans_in_flight,
)
ALL: dict[str, Control] = {control.__name__: control for control in (*_IN_PLACE, *_IN_FLIGHT)}
