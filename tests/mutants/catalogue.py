"""Faults that this kind of code really has had: each must be caught, by a check that says so.

Grouped by the room they live in. `laws` names what may catch a fault: a law's id for an
`InvariantViolation`, "bytes" for the harness that reads the cache itself, "pool" for an operation
that no allocator can carry out (also where L5 is named), "contract" for a
`Rejected` out of an operation that must not be refused, "crash" for anything else.
"""

from __future__ import annotations

from support.mutation import Mutant, mutant

_TABLE = "vtoken.core.request_table:RequestTable"
_RECLAIMER = "vtoken.core.reclaimer:Reclaimer"
_PLANNER = "vtoken.core.planner"
_LAYOUTS = "vtoken.kv.layouts"

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
    mutant("slot arithmetic with the next block", f"{_TABLE}.slot_at",
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
           "num_kept = -(-filled // size)", "num_kept = len(usable)", "I2 L6 bytes crash"),
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
           "layout.live_slots = table.live_slots()", "pass", "L6 bytes crash"),
    mutant("a dropped request's table stays", f"{_RECLAIMER}.drop",
           "table = self.tables.drop(req_id)", "table = self.tables.get(req_id)",
           "I2 L5 contract crash bytes"),
)  # fmt: skip

BYTES: tuple[Mutant, ...] = (
    mutant("mover writes one slot further", "vtoken.kv.mover:Mover.move",
           "self.layout.write(batch_to, self.layout.read(batch_from))",
           "self.layout.write(batch_to ^ 1, self.layout.read(batch_from))", "I1 bytes crash"),
    mutant("mover drops the last token of a plan", "vtoken.kv.mover:Mover.move",
           "batch_to = targets[first : first + self.batch_tokens]",
           "batch_to = targets[first : first + self.batch_tokens]\n        "
           "batch_from, batch_to = batch_from[:-1], batch_to[:-1]", "I1 bytes"),
    mutant("row layout moves K without V", f"{_LAYOUTS}:TokenRowLayout._write",
           "cache[:, block, :, offset] = values.transpose(2, 3).flatten(-2)",
           "half = self.head_dim\n    cache[:, block, :, offset, :half] = "
           "values.transpose(2, 3).flatten(-2)[..., :half]", "I1 bytes"),
    mutant("transposed layout moves V without K", f"{_LAYOUTS}:TransposedKeyLayout._write",
           "self._keys[which][:, block, :, :, offset] = values[:, :, 0]", "pass", "I1 bytes"),
    mutant("one layer is left behind", f"{_LAYOUTS}:TransposedKeyLayout._write",
           "self._values[which][:, block, :, offset] = values[:, :, 1]",
           "self._values[which][:-1, block, :, offset] = values[:, :-1, 1]", "I1 bytes"),
)  # fmt: skip

CHECKS: tuple[Mutant, ...] = (
    mutant("digest ignores V", "vtoken.kv.digests:payload_digests",
           "payload.contiguous()", "payload[:, :, :1].contiguous()", "digest"),
    mutant("digest ignores all layers but the first", "vtoken.kv.digests:payload_digests",
           "payload.contiguous()", "payload[:, :1].contiguous()", "digest"),
)  # fmt: skip

WALKED: tuple[Mutant, ...] = TABLE + PLANNER + RECLAIMER + BYTES
ALL: tuple[Mutant, ...] = WALKED + CHECKS
