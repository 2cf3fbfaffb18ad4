"""Faults that this kind of code really has had: each must be caught, by a check that says so.

Grouped by the room they live in. `laws` names what may catch a fault: a law's id for an
`InvariantViolation`, "bytes" for the harness that reads the cache itself, "pool" for an operation
that no allocator can carry out (also where L5 is named), "contract" for a
`Rejected` out of an operation that must not be refused, "crash" for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mutants.pages import PAGES
from mutants.scores import CHOOSING, TAP
from support.mutation import Mutant, mutant

_TABLE = "vtoken.core.request_table:RequestTable"
_PLACES = "vtoken.core.token_places:TokenPlaces"
_RECLAIMER = "vtoken.core.reclaimer:Reclaimer"
_FLIGHTS = "vtoken.core.in_flight:PlansInFlight"
_PLANNER = "vtoken.core.planner"
_LAYOUTS = "vtoken.kv.layouts"
_RELOCATOR = "vtoken.kv.relocator:Relocator"
_EVACUATION = "vtoken.core.evacuation"
_BACKGROUND = "vtoken.core.background:Background"

TABLE: tuple[Mutant, ...] = (
    mutant("append one position too late", f"{_TABLE}.append",
           "positions = np.arange(self.physical_len, end,",
           "positions = np.arange(self.physical_len, end,) + 1 if count == 1 else np.arange("
           "self.physical_len, end,", "I1 I2 L6 L7 bytes crash"),
    mutant("appended token is not live", f"{_TABLE}.append",
           "self._live[first] = True", "self._live[first] = False", "I1 I2 L6 bytes"),
    mutant("live count grows by one too many", f"{_TABLE}.append",
           "self.num_live += count", "self.num_live += count + (count > 1)",
           "I1 I2 L6 bytes crash"),
    mutant("recycled hole keeps its dead token", f"{_TABLE}.append",
           "self._drop_owner(hole)", "pass", "I2 L6 L7 bytes"),
    mutant("physical length forgotten after an append", f"{_TABLE}.append",
           "self.physical_len = end", "self.physical_len = end - (count > 2)", "I2 L6 L7 bytes"),
    mutant("eviction forgets the block usage index", f"{_TABLE}.evict",
           "self._block_live[position // size] -= 1", "pass", "I1 I2 L5 L6 bytes crash contract"),
    mutant("bulk eviction forgets the block usage index", f"{_TABLE}.evict",
           "self._block_live[index] -= counts.astype(np.int32)", "pass",
           "I1 I2 L5 L6 bytes crash contract"),
    mutant("eviction does not count", f"{_TABLE}.evict",
           "self.num_live -= count", "pass", "I2 L6 bytes crash"),
    mutant("evicted request still counts as never evicted", f"{_TABLE}.evict",
           "self.evicted = True", "pass", "L8 I2 L6 L7 bytes"),
    mutant("move forgets to clear its sources", f"{_TABLE}.move",
           "self._owner[sources] = FREE", "pass", "I1 I2 L6 bytes"),
    mutant("move leaves the replaced dead token in place", f"{_TABLE}.move",
           "self._position[replaced[replaced >= 0]] = NO_SLOT", "pass", "I2 L6 bytes"),
    mutant("move swaps its last two tokens", f"{_TABLE}.move",
           "self._owner[targets] = token_ids",
           "self._owner[targets] = np.append(token_ids[:-2], token_ids[-2:][::-1])",
           "I1 I2 L6 bytes"),
    mutant("move does not update the index of its sources", f"{_TABLE}.move",
           "np.subtract.at(self._block_live, sources // size, 1)", "pass",
           "I1 I2 L5 L6 bytes crash contract"),
    mutant("layout keeps the old physical length", f"{_TABLE}.set_layout",
           "self.physical_len = physical_len", "pass", "I2 L5 L6 L7 bytes contract crash"),
    mutant("layout does not renumber positions", f"{_TABLE}.set_layout",
           "self._position[owner[held]] = held", "pass", "I1 I2 L6 bytes crash contract"),
    mutant("layout does not reclaim what it cuts off", f"{_TABLE}.set_layout",
           "self._position[gone] = NO_SLOT", "pass", "I2 L6 bytes crash"),
    mutant("layout reports one dropped block too few", f"{_TABLE}.set_layout",
           "dropped = [int(b) for b in self._block_ids[dropped_index]]",
           "dropped = [int(b) for b in self._block_ids[dropped_index]][1:]", "L5 I2 bytes crash"),
    mutant("layout forgets to reorder the usage index", f"{_TABLE}.set_layout",
           "self._block_live[: len(keep)] = self._block_live[keep]", "pass",
           "I1 I2 L5 L6 bytes crash contract"),
    mutant("slot arithmetic with the next block", f"{_PLACES}.slot_at",
           "index, offset = divmod(position, self.block_size)",
           "index, offset = divmod(position, self.block_size)\n    "
           "index = min(index + (offset == 1), self._num_blocks - 1)",
           "I2 L6 L7 L8 bytes crash"),
)  # fmt: skip

PLANNER: tuple[Mutant, ...] = (
    mutant("shared blocks count as writable", f"{_PLANNER}:plan_dense",
           "usable = np.flatnonzero(alive & writable)", "usable = np.flatnonzero(alive)",
           "I4 I2 L6 L8 bytes crash pool"),
    mutant("a block too few is kept", f"{_PLANNER}:plan_dense",
           "num_kept = -(-filled // size)", "num_kept = max(1, filled // size)",
           "I1 I2 I4 L6 bytes crash contract"),
    mutant("plan does not shrink", f"{_PLANNER}:plan_dense",
           "num_kept = -(-filled // size)", "num_kept = len(usable)", "I1 I2 L6 bytes crash"),
    mutant("holes of the partial block stay", f"{_PLANNER}:plan_dense",
           "targets = base[~mask & ~beyond]", "targets = base[:-1][~mask[:-1]]",
           "I1 I2 I4 L6 bytes crash"),
    mutant("tokens beyond the end of the partial block stay", f"{_PLANNER}:plan_dense",
           "sources = base[mask & beyond]", "sources = base[:0][mask[:0]]",
           "I1 I2 I4 L6 bytes crash"),
    mutant("blocks to write are not named", f"{_PLANNER}:plan_dense",
           "written=written.astype(np.int32),", "written=_NONE,", "I4 L8 L7 bytes"),
    mutant("hole named one position off", f"{_PLANNER}:plan_dense",
           "hole = int(targets[-1])", "hole = int(targets[-1]) - 1", "L6 L7 I2 bytes crash pool"),
    mutant("recycled hole is filled as well", f"{_PLANNER}:plan_dense",
           "targets = targets[:-1]", "targets = targets[1:] if len(targets) > 1 else targets[:-1]",
           "I1 L7 I2 I4 L6 bytes crash"),
    mutant("stale version in the plan", f"{_PLANNER}:plan_dense",
           "version=table.version,", "version=table.version - 1,", "I4"),
    mutant("physical length counts the recycled hole twice", f"{_PLANNER}:plan_dense",
           "physical_len=len(frozen) * size + filled,",
           "physical_len=min(len(frozen) * size + filled + int(hole_wanted), "
           "(len(frozen) + len(kept)) * size),", "I2 L6 L7 bytes"),
    mutant("release drops the last block", f"{_PLANNER}:plan_release",
           "return keep, int(used[keep].sum())", "return keep[:-1], int(used[keep[:-1]].sum())",
           "I1 I2 L5 bytes"),
)  # fmt: skip

RECLAIMER: tuple[Mutant, ...] = (
    mutant("written before it leaves the prefix cache", f"{_RECLAIMER}._make_dense",
           "self._pool.uncache(table.blocks[plan.written])", "pass", "I4 L8 L7 bytes"),
    mutant("steady recycling forgets the prefix cache", f"{_RECLAIMER}._recycle_only_hole",
           "self._pool.uncache(block)", "pass", "L7 L8 bytes"),
    mutant("steady recycling writes a shared block", f"{_RECLAIMER}._recycle_only_hole",
           "if not self._pool.private(block)[0]:", "if False:", "L7 L8 bytes pool"),
    mutant("worker is told sources after the move", f"{_RECLAIMER}._make_dense",
           "sources = table.slots_at(table.positions[plan.token_ids])\n        "
           "targets = table.slots_at(plan.targets)",
           "targets = table.slots_at(plan.targets)\n        sources = targets", "I1 I4 bytes"),
    mutant("hole keeps its place though blocks were reordered", f"{_RECLAIMER}._make_dense",
           "plan.hole if steady else table.position_of_slot(hole_slot)", "plan.hole",
           "L6 L7 I2 bytes crash"),
    mutant("moves are not told to the worker", f"{_RECLAIMER}._commit",
           "self._changes[table.req_id] = (table, change)", "pass", "I1 L6 bytes crash"),
    mutant("block list goes back without the references", f"{_RECLAIMER}._commit",
           "self._pool.set_blocks(table.req_id, blocks, dropped, joined)",
           "self._pool.set_blocks(table.req_id, blocks, [], joined)", "L5 bytes crash"),
    mutant("a block is given back twice", f"{_RECLAIMER}._commit",
           "self._pool.set_blocks(table.req_id, blocks, dropped, joined)",
           "self._pool.set_blocks(table.req_id, blocks, dropped + dropped[:1], joined)",
           "L5 bytes crash"),
    mutant("needs too little", f"{_RECLAIMER}.physical_need",
           "return table.physical_len + max(new, 0)", "return table.physical_len",
           "contract crash"),
    mutant("lag told from before the step", f"{_RECLAIMER}.schedule",
           "layout = StepLayout(table.reclaimed, table.num_live, slots)",
           "layout = StepLayout(table.reclaimed - (table.reclaimed > 0), table.num_live, slots)",
           "L6 L7 bytes crash"),
    mutant("rows with holes are given as dense", f"{_RECLAIMER}.schedule",
           "self.views.tell(table, layout)", "pass", "L6 bytes crash"),
    mutant("a dropped request's table stays", f"{_RECLAIMER}.drop",
           "table = self.tables.drop(req_id)", "table = self.tables.get(req_id)",
           "I2 L5 contract crash bytes"),
)  # fmt: skip

BYTES: tuple[Mutant, ...] = (
    mutant("mover writes one slot further", "vtoken.kv.mover:Mover.move",
           "self.layout.copy_slots(batch_from, batch_to)",
           "self.layout.copy_slots(batch_from, batch_to ^ 1)", "I1 bytes crash"),
    mutant("mover drops the last token of a plan", "vtoken.kv.mover:Mover.move",
           "batch_to = targets[first : first + self.batch_tokens]",
           "batch_to = targets[first : first + self.batch_tokens]\n        "
           "batch_from, batch_to = batch_from[:-1], batch_to[:-1]", "I1 bytes"),
    mutant("row layout moves K without V", f"{_LAYOUTS}:TokenRowLayout.parts",
           "cache.transpose(2, 3)", "cache.transpose(2, 3)[..., : self.head_dim]", "I1 bytes"),
    mutant("transposed layout moves V without K", f"{_LAYOUTS}:TransposedKeyLayout.parts",
           "return keys + [", "return [", "I1 bytes"),
    mutant("one layer is left behind", f"{_LAYOUTS}:TransposedKeyLayout.parts",
           "[values.transpose(2, 3) ", "[values[:-1].transpose(2, 3) ", "I1 bytes"),
    mutant("copies go from target to source", "vtoken.kv.host_copy:HostPart.copy",
           "self._places(sources), self._places(targets)",
           "self._places(targets), self._places(sources)", "I1 bytes"),
    mutant("only the first head is copied", "vtoken.kv.host_copy:PartShape.of",
           "np.arange(heads) * head", "np.arange(heads) * 0", "I1 bytes"),
)  # fmt: skip

CHECKS: tuple[Mutant, ...] = (
    mutant("digest ignores V", "vtoken.kv.digests:payload_digests",
           "payload.contiguous()", "payload[:, :, :1].contiguous()", "digest"),
    mutant("digest ignores all layers but the first", "vtoken.kv.digests:payload_digests",
           "payload.contiguous()", "payload[:, :1].contiguous()", "digest"),
)  # fmt: skip

_HOLES = ("off", "background", "eager")

VIEWS: tuple[Mutant, ...] = (
    mutant("an eviction is no news", "vtoken.core.views:ViewNews.evicted",
           "gone.append(table.slots_at(table.positions[token_ids]))", "pass", "L6 bytes",
           modes=_HOLES),
    mutant("news are told again", "vtoken.core.views:ViewNews.tell",
           "self._gone[table.req_id] = []", "self._gone.setdefault(table.req_id, [])",
           "L6 bytes", modes=_HOLES),
    mutant("restructured row is told as news", f"{_RECLAIMER}._commit",
           "self.views.forget(table.req_id)", "pass", "L6 bytes crash", modes=_HOLES),
    mutant("slots of the dead stay in the view", "vtoken.kv.translation:TranslationCache.take",
           "known = without(known, dead, kept)", "pass", "L6 bytes", modes=_HOLES),
    mutant("the view loses its newest slots in place of the dead", "vtoken.kv.translation:without",
           "kept.scatter_(0, places, slots)[:count]", "slots[:count]", "L6 bytes", modes=_HOLES),
)  # fmt: skip

FLIGHT: tuple[Mutant, ...] = tuple(
    replace(fault, modes=("background",))
    for fault in (
        # Streams and the worker.
        mutant("launch does not wait for the compute stream",
               "vtoken.testing.device:AdversarialCopyStream._follow_compute",
               "self.device.wait(COPY, self.device.record(COMPUTE))", "pass", "I3 L11 I1 bytes"),
        mutant("nothing waits for the copies", f"{_RELOCATOR}._wait",
               "self._stream.wait(event)", "pass", "I3 L7 L11 I1 bytes"),
        mutant("last of a step's waits is forgotten", f"{_RELOCATOR}.apply",
               "for number in orders.waits:\n        self._wait(",
               "for number in orders.waits[:-1]:\n        self._wait(", "I3 L7 L11 I1 bytes"),
        mutant("wait comes behind the look at what landed", f"{_RELOCATOR}.apply",
               "for number in orders.waits:\n        self._wait(number, committed.get(number))\n"
               "    self._move(",
               "waits, orders.waits = orders.waits, []\n    self._move(", "I3 L7 L11 I1 bytes"),
        mutant("launch is not remembered", f"{_RELOCATOR}._launch",
               "self._events[order.flight] = self._stream.launch(copies)",
               "self._stream.launch(copies)", "I3"),
        mutant("copies told in another order than their tokens",
               "vtoken.core.flight:Flight.copies",
               "made.sources, made.targets)", "made.sources, made.targets[::-1])", "I1 bytes"),
        mutant("copies told one slot further", "vtoken.core.flight:Flight.copies",
               "made.sources, made.targets)", "made.sources, made.targets ^ 1)",
               "I1 L7 L11 bytes"),
        # Planning.
        mutant("target off by one", f"{_EVACUATION}:_moves",
               "targets=targets.astype(np.int32),", "targets=targets.astype(np.int32) + 1,",
               "I4 crash"),
        mutant("release of an emptied block is forgotten", f"{_EVACUATION}:_moves",
               "released=table.blocks[chosen].tolist(),",
               "released=table.blocks[chosen].tolist()[1:],", "I4"),
        mutant("emptied block still holds a token", f"{_EVACUATION}:_moves",
               "leaving = base[table.live_mask(chosen)]",
               "leaving = base[table.live_mask(chosen)][:-1]", "I4"),
        mutant("shared blocks are evacuated into", f"{_EVACUATION}:_moves",
               "others = np.setdiff1d(np.flatnonzero(writable), chosen).astype(np.int32)",
               "others = np.setdiff1d(np.arange(table.num_blocks), chosen).astype(np.int32)",
               "I4 L8 pool"),
        mutant("targets behind the physical end", f"{_EVACUATION}:_moves",
               "free = ~table.live_mask(others) & (positions < table.physical_len)",
               "free = ~table.live_mask(others)", "I4"),
        mutant("block with the physical end is emptied", f"{_EVACUATION}:plan_evacuation",
               "end, tail = divmod(table.physical_len, size)",
               "end, tail = -(-table.physical_len // size), 0", "I4"),
        mutant("headroom costs nothing", f"{_EVACUATION}:plan_evacuation",
               "counts + beside - drawn)", "counts + beside)", "I4"),
        mutant("stale version in a plan in flight", f"{_EVACUATION}:_moves",
               "version=table.version,", "version=table.version - 1,", "I4"),
        # Decisions.
        mutant("drawn headroom stays in the list", f"{_BACKGROUND}.launch",
               "self.headroom = [block for block in self.headroom if block not in drawn]", "pass",
               "I4 L5 pool bytes", hunt="copy-out"),
        mutant("held blocks count as headroom", f"{_BACKGROUND}.held",
               "for block in flight.moves.drawn]", "for block in flight.moves.drawn[1:]]",
               "L5 L11 I4", hunt="copy-out"),
        mutant("nobody is eligible", f"{_BACKGROUND}.is_eligible",
               "return holes > 0 and", "return False and", "L10", hunt="crowd"),
        mutant("turns are not kept", f"{_BACKGROUND}.plan",
               "waits = bool(self._first) and table.req_id not in self._first",
               "waits = False", "L10", hunt="crowd"),
        mutant("who was left out is forgotten", f"{_BACKGROUND}.plan",
               "self._left_out.setdefault(table.req_id, self._step)", "pass", "L10",
               hunt="crowd"),
        mutant("plan in flight is never due", f"{_BACKGROUND}.is_due",
               "return self._step", "return False and self._step", "L10", hunt="crowd"),
        # The reclaimer.
        mutant("second plan while one is in flight", f"{_FLIGHTS}._reclaim_beside",
               "flight = flying.flights.get(table.req_id)", "flight = None", "I4"),
        mutant("released in flight", f"{_FLIGHTS}._reclaim_beside",
               "if flying.is_due(flight):",
               "self._release_only(table)\n        if flying.is_due(flight):", "I4"),
        mutant("recycled in flight", f"{_FLIGHTS}._reclaim_beside",
               "self._land(table, flight)\n        return\n    if table",
               "self._land(table, flight)\n        elif recycle and table.num_holes:\n"
               "            self._recycle_any_hole(table)\n        return\n    if table",
               "I4 L7 L11 bytes"),
        mutant("evacuated into before it leaves the prefix cache",
               f"{_FLIGHTS}._reclaim_beside",
               "self._pool.uncache(np.array(plan.written, dtype=np.int32))", "pass", "I4 L8"),
        mutant("recycled before it leaves the prefix cache", f"{_FLIGHTS}._recycle_any_hole",
               "self._pool.uncache(table.blocks[hole // size : hole // size + 1])", "pass",
               "L7 L8 bytes"),
        mutant("commit is not waited for", f"{_FLIGHTS}._land",
               "self._waits.append(flight.number)", "pass", "I3 L7 L11 I1 bytes"),
        mutant("token evicted in flight is moved", f"{_FLIGHTS}._land",
               "still = table.live[plan.token_ids]", "still = plan.token_ids >= 0", "I2"),
        mutant("drawn blocks join at the end", f"{_FLIGHTS}._land",
               "keep = np.concatenate([np.arange(count, table.num_blocks), kept]).astype(np.int32)",
               "keep = np.concatenate([kept, np.arange(count, table.num_blocks)]).astype(np.int32)",
               "I1 I2 L6 bytes", hunt="copy-out"),
        mutant("blocks gained in flight are lost", f"{_FLIGHTS}._land",
               "kept = np.flatnonzero(~np.isin(table.blocks[:count], plan.released))",
               "kept = np.flatnonzero(~np.isin(table.blocks[: len(flight.blocks)], plan.released))",
               "I1 I2 L5 bytes"),
        mutant("emptied blocks stay at the commit", f"{_FLIGHTS}._land",
               "kept = np.flatnonzero(~np.isin(table.blocks[:count], plan.released))",
               "kept = np.arange(count)", "I1 I2 L5"),
        mutant("physical end counts the emptied blocks", f"{_FLIGHTS}._land",
               "end = table.physical_len + (len(plan.drawn) - len(plan.released)) * size",
               "end = table.physical_len + len(plan.drawn) * size", "I2"),
        mutant("worker is told the targets in another order", f"{_FLIGHTS}._land",
               "self._commit(table, ids, sources, targets, keep,",
               "self._commit(table, ids, sources, targets[::-1], keep,", "I1"),
        mutant("drawn block is owned and still reserved", f"{_RECLAIMER}._commit",
               "joined = [] if flight is None else flight.moves.drawn", "joined = []", "L5",
               hunt="copy-out"),
        mutant("abort is not waited for", f"{_FLIGHTS}._abort",
               "self._waits.append(flight.number)", "pass", "I3 L7 L11 I1 bytes"),
        mutant("plan that was never told is waited for", f"{_FLIGHTS}._abort",
               "if len(started) == len(self._launches):", "if True:", "I3"),
        mutant("plan of a request that is gone is launched", f"{_FLIGHTS}._abort",
               "self._launches = started", "pass", "L7 L11 I1 bytes"),
        mutant("headroom of an aborted plan is lost", f"{_FLIGHTS}._abort",
               "self.background.headroom += flight.moves.drawn", "pass", "L5 bytes",
               hunt="copy-out"),
        mutant("headroom of an aborted plan comes back twice", f"{_FLIGHTS}._abort",
               "self.background.headroom += flight.moves.drawn",
               "self.background.headroom += flight.moves.drawn * 2", "I4 L5 bytes",
               hunt="copy-out"),
        mutant("headroom of an aborted plan is free before the wait", f"{_FLIGHTS}._abort",
               "self.background.headroom += flight.moves.drawn",
               "self._unreserve(flight.moves.drawn)", "L5 L11", hunt="copy-out"),
        mutant("a request that ends leaves its plan in flight", f"{_RECLAIMER}.drop",
               "self._abort(req_id)", "pass", "I4 L5 L11 crash"),
        mutant("headroom given back is not returned to the pool", f"{_FLIGHTS}._unreserve",
               "self._pool.unreserve(blocks)", "self._pool.unreserve(blocks[1:])", "L5"),
        mutant("waits are told again in every step", f"{_RECLAIMER}.take_orders",
               "self._launches, self._waits = [], []", "self._launches = []", "I3"),
        mutant("launches are told again in every step", f"{_RECLAIMER}.take_orders",
               "self._launches, self._waits = [], []", "self._waits = []", "I1 I3 L7 L11 bytes"),
        mutant("evictions in flight are forgotten", f"{_RECLAIMER}.evict",
               "table.evict(token_ids)",
               "if self.background and req_id in self.background.flights:\n        return\n    "
               "table.evict(token_ids)", "L9", hunt="pairs"),
    )
)  # fmt: skip

WALKED: tuple[Mutant, ...] = (
    TABLE + PLANNER + RECLAIMER + BYTES + VIEWS + FLIGHT + CHOOSING + TAP + PAGES
)
ALL: tuple[Mutant, ...] = WALKED + CHECKS

TRIPS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "I1": ("mover drops the last token of a plan", "walk"),
        "I2": ("recycled hole keeps its dead token", "walk"),
        "I3": ("plan that was never told is waited for", "walk"),
        "I4": ("stale version in the plan", "walk"),
        "L5": ("headroom given back is not returned to the pool", "walk"),
        "L6": ("rows with holes are given as dense", "walk"),
        "L7": ("steady recycling forgets the prefix cache", "walk"),
        "L8": ("steady recycling forgets the prefix cache", "sharing"),
        "L9": ("evictions in flight are forgotten", "pairs"),
        "L10": ("turns are not kept", "crowd"),
        "L11": ("plan of a request that is gone is launched", "walk"),
    }
)
"""Law -> a fault that it catches by its own name, and the hunt in which it does."""
