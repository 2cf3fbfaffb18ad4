"""A batch that decodes by a captured step while tokens are evicted and relocated outside of it.

The batch's bookkeeping is as plain as it can be, and knows nothing of vToken's tables: each row is
a list of blocks and a map from token to slot. What every token's K and V are is kept apart from the
cache, so that the reference does not depend on what becomes of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from support.captured import Graph, capture
from support.paged_attention import Launch, PagedAttention, pages_of, reference, store
from vtoken.core import CopyOrder, LayoutChange, StepOrders
from vtoken.kv import KVLayout, Mover, TokenRowLayout, stack_layers
from vtoken.kv.relocator import Relocator
from vtoken.kv.streams import CopyStream

#: steps between a plan's copies and its commit
DELAY = 2

View = Literal["pages of one", "dense"]


@dataclass(frozen=True)
class Shape:
    """Of a batch.

    Attributes:
        size: tokens of a block.
        group: query heads for each KV head.
        enough: live tokens of a row, beyond which some are evicted in each step.
    """

    layers: int
    rows: int
    heads: int
    group: int
    dim: int
    size: int
    enough: int
    dtype: torch.dtype

    @property
    def longest(self) -> int:
        """Places of a row, with as many holes as there can be."""
        return 4 * self.enough

    @property
    def blocks(self) -> int:
        return self.rows * self.longest // self.size + 1


@dataclass(frozen=True)
class Flight:
    """A plan whose copies were started in step `launched`: `block` is to be released, and `targets`
    says where each of its live tokens goes."""

    number: int
    launched: int
    block: int
    targets: dict[int, int]


@dataclass
class Row:
    """One request.

    Attributes:
        blocks: its block list.
        end: positions that have been used, of all those that its blocks have.
        live: slot by token.
        flight: the plan whose copies were started and which is not committed.
    """

    blocks: list[int] = field(default_factory=list)
    end: int = 0
    tokens: int = 0
    live: dict[int, int] = field(default_factory=dict)
    flight: Flight | None = None


@dataclass
class Counts:
    """What happened, so that a test can say that something did."""

    evicted: int = 0
    moved: int = 0
    commits: int = 0
    reads_beside_copies: int = 0


class Decoding:
    """See the module's docstring.

    Args:
        view: "pages of one": holes stay, and plans are copied beside the steps. "dense": holes are
            closed before attention, by moves in step order.
        stream: the copy stream.
        forgetful: the control: in steps in which tokens were relocated, the page tables and
            lengths are not brought up to date.
    """

    def __init__(
        self,
        device: torch.device,
        stream: CopyStream,
        view: View,
        shape: Shape,
        *,
        seed: int = 0,
        forgetful: bool = False,
    ) -> None:
        self.counts = Counts()
        self._device, self._view, self._forgetful = device, view, forgetful
        self.shape = shape
        self._rng = np.random.default_rng(seed)
        self._random = torch.Generator().manual_seed(seed)
        content = 2 * shape.dim
        self._cache = torch.zeros(
            (shape.layers, shape.blocks, shape.heads, shape.size, content),
            dtype=shape.dtype,
            device=device,
        )
        self._layout: KVLayout = TokenRowLayout(stack_layers(list(self._cache)))
        self._relocator = Relocator(Mover(self._layout), stream)
        self._asked = torch.empty(0)
        self._rows = [Row() for _ in range(shape.rows)]
        self._free = list(range(1, shape.blocks))
        self._known: list[dict[int, torch.Tensor]] = [{} for _ in range(shape.rows)]
        self._step = 0
        self._flights = 0
        # What the captured step reads and writes, for good.
        places = shape.longest if view == "pages of one" else shape.longest // shape.size
        self.tables = torch.zeros(shape.rows, places, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self.slots = torch.full((shape.rows,), -1, dtype=torch.int64, device=device)
        asked = (shape.layers, shape.rows, shape.heads * shape.group, shape.dim)
        self.query = torch.zeros(asked, dtype=shape.dtype, device=device)
        self.new = torch.zeros(
            (shape.layers, shape.rows, shape.heads, content), dtype=shape.dtype, device=device
        )
        self.out = torch.zeros(asked, dtype=torch.float32, device=device)
        self._attention = PagedAttention(
            rows=shape.rows,
            heads=shape.heads,
            group=shape.group,
            dim=shape.dim,
            device=device,
            splits=2,
            tile=16,
        )
        self._prefill()
        self._graph: Graph = capture(self._captured, device)

    def _prefill(self) -> None:
        """A prompt with as many tokens as a row may keep, and some more, different for each row."""
        for index, row in enumerate(self._rows):
            for _ in range(self.shape.enough + 3 * index + 2):
                shape = (self.shape.layers, self.shape.heads, 2 * self.shape.dim)
                self._known[index][row.tokens] = self._drawn(torch.Size(shape))
                self._append(row)
            values = torch.stack(list(self._known[index].values()))
            places = torch.tensor(list(row.live.values()), device=self._device)
            both = values.unflatten(-1, (2, self.shape.dim)).transpose(2, 3)
            self._layout.write(places, both.to(self._device))

    def _captured(self, launch: Launch) -> None:
        for layer in range(self.shape.layers):
            cache = self._cache[layer]
            store(self.new[layer], cache, self.slots, launch=launch)
            pages = cache if self._view == "dense" else pages_of(cache)[0]
            self._attention(
                self.query[layer], pages, self.tables, self.lengths, self.out[layer], launch=launch
            )

    def run(self, steps: int) -> list[float]:
        """Decode, and give the largest error of each step against plain torch. What a step gave is
        kept on the device and looked at in the end, so that no step waits for the one before."""
        outputs, expected = [], []
        for _ in range(steps):
            expected.append(self._one_step())
            outputs.append(self.out.clone())
        return [
            float((found.cpu() - wanted).abs().max())
            for found, wanted in zip(outputs, expected, strict=True)
        ]

    def _one_step(self) -> torch.Tensor:
        self._step += 1
        orders, scribble = StepOrders(), list[int]()
        for index, row in enumerate(self._rows):
            # Committed before more tokens die, as their slots are those of the plan.
            if row.flight is not None and self._step >= row.flight.launched + DELAY:
                scribble += self._commit(index, row, orders)
            self._evict(row)
            if self._view == "dense":
                scribble += self._close_holes(index, row, orders)
            elif row.flight is None:
                self._plan(index, row, orders)
        relocated = bool(orders.changes)
        self._relocator.apply(orders)
        self._give_away(scribble)
        slots = [self._append(row) for row in self._rows]
        self.counts.reads_beside_copies += any(row.flight is not None for row in self._rows)
        self._fill_buffers(slots, places=not (relocated and self._forgetful))
        self._graph.replay()
        return self._expected()

    # ---- what a scheduler decides

    def _evict(self, row: Row) -> None:
        if len(row.live) <= self.shape.enough:
            return
        ids = self._rng.choice(sorted(row.live)[:-1], self._rng.integers(1, 5), replace=False)
        for token in ids.tolist():
            del row.live[token]
            self.counts.evicted += 1

    def _plan(self, index: int, row: Row, orders: StepOrders) -> None:
        """Empty the block with the fewest live tokens into holes of the others, if they fit. The
        last block is left alone, since new tokens go there."""
        closed = row.blocks[:-1]
        holes = dict.fromkeys(closed, self.shape.size)
        for slot in row.live.values():
            if slot // self.shape.size in holes:
                holes[slot // self.shape.size] -= 1
        if len(closed) < 2:
            return
        victim = max(closed, key=lambda block: holes[block])
        if self.shape.size - holes[victim] > sum(holes.values()) - holes[victim]:
            return
        taken = set(row.live.values())
        targets = [
            slot
            for block in closed
            if block != victim
            for slot in range(block * self.shape.size, (block + 1) * self.shape.size)
            if slot not in taken
        ]
        moved = [token for token, slot in row.live.items() if slot // self.shape.size == victim]
        plan = dict(zip(moved, targets, strict=False))
        self._flights += 1
        row.flight = Flight(self._flights, self._step, victim, plan)
        orders.launches.append(
            CopyOrder(
                row.flight.number,
                str(index),
                _ints(moved),
                _ints([row.live[token] for token in moved]),
                _ints(plan.values()),
            )
        )
        self.counts.moved += len(moved)

    def _commit(self, index: int, row: Row, orders: StepOrders) -> list[int]:
        """Switch the row to a plan's targets; gives the block that nobody reads any more."""
        assert row.flight is not None
        flight, row.flight = row.flight, None
        victim, plan = flight.block, flight.targets
        sources = [slot for slot in row.live.values() if slot // self.shape.size == victim]
        alive = {token: target for token, target in plan.items() if token in row.live}
        assert len(sources) == len(alive)
        row.live.update(alive)
        row.blocks.remove(victim)
        row.end -= self.shape.size
        orders.waits.append(flight.number)
        ids, targets = _ints(alive), _ints(alive.values())
        orders.changes.append(
            LayoutChange(
                str(index),
                ids,
                _ints(sources),
                targets,
                list(row.blocks),
                [victim],
                False,
                flight.number,
            )
        )
        self.counts.commits += 1
        return [victim]

    def _close_holes(self, index: int, row: Row, orders: StepOrders) -> list[int]:
        """Move the last tokens into the holes, so that the live ones lie at the first positions."""
        count = len(row.live)
        first = [self._slot(row, place) for place in range(count)]
        taken = set(row.live.values())
        holes = [slot for slot in first if slot not in taken]
        behind = [token for token, slot in row.live.items() if slot not in set(first)]
        moves = dict(zip(behind, holes, strict=True))
        sources = [row.live[token] for token in behind]
        row.live.update(moves)
        row.end = count
        kept = -(-count // self.shape.size)
        dropped, row.blocks = row.blocks[kept:], row.blocks[:kept]
        if moves:
            targets = _ints(moves.values())
            blocks = list(row.blocks)
            orders.changes.append(
                LayoutChange(
                    str(index), _ints(moves), _ints(sources), targets, blocks, dropped, True
                )
            )
            self.counts.moved += len(moves)
            self.counts.commits += 1
        return dropped

    def _append(self, row: Row) -> int:
        if row.end == len(row.blocks) * self.shape.size:
            row.blocks.append(self._free.pop(0))
        slot = self._slot(row, row.end)
        row.live[row.tokens] = slot
        row.end += 1
        row.tokens += 1
        return slot

    def _slot(self, row: Row, place: int) -> int:
        return row.blocks[place // self.shape.size] * self.shape.size + place % self.shape.size

    # ---- what a worker does

    def _give_away(self, blocks: list[int]) -> None:
        """Somebody else gets them and writes them at once, in step order."""
        for block in blocks:
            self._cache[:, block].fill_(9.0)
        self._free += blocks

    def _fill_buffers(self, slots: list[int], *, places: bool) -> None:
        """New contents for what the captured step reads; no tensor is exchanged."""
        self._asked = self._drawn(self.query.shape)
        self.query.copy_(self._asked)
        new = self._drawn(self.new.shape)
        self.new.copy_(new)
        self.slots.copy_(torch.tensor(slots))
        between = pages_of(self._cache[0])[1]
        lengths = []
        for index, row in enumerate(self._rows):
            self._known[index][row.tokens - 1] = new[:, index]
            lengths.append(len(row.live))
            if self._view == "dense":
                entries = row.blocks
            else:
                live = row.live.values()
                entries = [
                    slot // self.shape.size * between + slot % self.shape.size for slot in live
                ]
            if places:
                found = torch.tensor(entries, dtype=torch.int32)
                self.tables[index, : len(entries)].copy_(found)
        if places:
            self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))

    def _drawn(self, shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self.shape.dtype)

    def _expected(self) -> torch.Tensor:
        out = torch.zeros(self.out.shape)
        for index, row in enumerate(self._rows):
            # [layers, tokens, heads, content]
            known = torch.stack([self._known[index][token] for token in row.live], dim=1)
            for layer in range(self.shape.layers):
                out[layer, index] = reference(self._asked[layer, index], known[layer])
        return out


def _ints(values: object) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)  # type: ignore[call-overload,no-any-return]
