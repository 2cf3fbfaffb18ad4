"""KV caches of random bits for the mover's conformance suite, and where their elements lie.

Addresses are computed from the formats' descriptions (`vtoken/kv/layouts.py`), without the
adapters' code, so that a mover and an adapter cannot be wrong together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Literal

import torch

from vtoken.kv import KVLayout, TokenRowLayout, TransposedKeyLayout, stack_layers

Format = Literal["token rows", "transposed keys"]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_LEAD = 7
"""Elements of an allocation before the first block."""


@dataclass(frozen=True, slots=True)
class Move:
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    in_pieces: bool = False

    def __str__(self) -> str:
        name = "copies" if self.in_pieces else "move"
        return f"mover.{name}({list(self.sources)}, {list(self.targets)})"


@dataclass(frozen=True)
class Case:
    """A cache and what is moved in it.

    `order` names the nesting of the allocation, outermost first: L layers, B blocks, H heads, N
    tokens, C content. `gap` elements lie between two outermost entries; `separate` gives each
    layer an allocation of its own. `workspace` is in tokens, None for the mover's own choice.
    """

    moves: tuple[Move, ...]
    fmt: Format = "token rows"
    dtype: torch.dtype = torch.float32
    layers: int = 1
    blocks: int = 2
    heads: int = 1
    block_size: int = 1
    head_dim: int = 1
    order: str = "LBHNC"
    gap: int = 0
    separate: bool = False
    workspace: int | None = None
    bits: int = 0

    @property
    def num_slots(self) -> int:
        return self.blocks * self.block_size

    def __str__(self) -> str:
        names = [field.name for field in fields(self) if field.name not in ("moves", "bits")]
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)


def drawn_case(rng: random.Random, *, bounded: bool) -> Case:
    fmt = rng.choice(("token rows", "transposed keys"))
    nestings = ["".join(order) for order in permutations("LBHNC")]
    if fmt == "transposed keys":
        nestings = ["".join(order) + "NC" for order in permutations("LBH")]
    case = Case(
        moves=(),
        fmt=fmt,  # type: ignore[arg-type]
        dtype=rng.choice(_DTYPES),
        layers=rng.randint(1, 4),
        blocks=rng.randint(2, 4),
        heads=rng.randint(1, 3),
        block_size=rng.choice([1, 2, 3, 16, 32, 128]),
        head_dim=rng.choice([1, 2, 4]),
        order=rng.choice(["LBHNC", rng.choice(nestings)]),
        gap=rng.choice([0, 0, 64]),
        separate=rng.random() < 0.4,
        bits=rng.getrandbits(32),
    )
    moves = []
    for _ in range(rng.randint(1, 3)):
        count = min(rng.choice([0, 1, 2, 3, 8, 24]), case.num_slots // 2)
        slots = rng.sample(range(case.num_slots), 2 * count)
        moves.append(Move(tuple(slots[:count]), tuple(slots[count:]), rng.random() < 0.4))
    largest = max(len(move.sources) for move in moves)
    workspace = rng.choice([1, rng.randint(1, largest + 2)]) if bounded else None
    return replace(case, moves=tuple(moves), workspace=workspace)


class Memory:
    """The cache of a case, filled with random bits: NaNs of every payload, infinities, all."""

    def __init__(self, case: Case, device: torch.device | str) -> None:
        extent = {
            "L": 1 if case.separate else case.layers,
            "B": case.blocks,
            "H": case.heads,
            "N": case.block_size,
            "C": 2 * case.head_dim,
        }
        self.stride: dict[str, int] = {}
        step = 1
        for axis in reversed(case.order):
            self.stride[axis] = step + (case.gap if axis == case.order[0] else 0)
            step *= extent[axis]
        self.length = _LEAD + self.stride[case.order[0]] * extent[case.order[0]]
        count = case.layers if case.separate else 1
        kind = _BITS[case.dtype.itemsize]
        limits, generator = torch.iinfo(kind), torch.Generator().manual_seed(case.bits)
        shape = (count, self.length)
        values = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=kind)
        flats = [row.clone().to(device).view(case.dtype) for row in values]
        self._flats, self._kind = flats, kind
        size = [extent[axis] for axis in "BHNC"]
        strides = [self.stride[axis] for axis in "BHNC"]
        layers = []
        for layer in range(case.layers):
            flat = flats[layer] if case.separate else flats[0]
            start = _LEAD + (0 if case.separate else layer * self.stride["L"])
            layers.append(flat.as_strided(size, strides, start))
        stacked = stack_layers(layers)
        rows = case.fmt == "token rows"
        self.layout: KVLayout = TokenRowLayout(stacked) if rows else TransposedKeyLayout(stacked)
        self.addresses = self._addresses(case)

    def bits(self) -> torch.Tensor:
        """All allocations, end to end, as integers."""
        return torch.cat([flat.view(self._kind).cpu() for flat in self._flats])

    def _addresses(self, case: Case) -> torch.Tensor:
        """Where in `bits` each element lies: `[slots, layers, K|V, heads, head_dim]`, int64."""
        size, dim = case.block_size, case.head_dim
        slot = torch.arange(case.num_slots).reshape(-1, 1, 1, 1, 1)
        layer = torch.arange(case.layers).reshape(1, -1, 1, 1, 1)
        half = torch.arange(2).reshape(1, 1, -1, 1, 1)
        head = torch.arange(case.heads).reshape(1, 1, 1, -1, 1)
        d = torch.arange(dim)
        block, offset = slot // size, slot % size
        start = layer * (self.length if case.separate else self.stride["L"])
        run = _LEAD + start + block * self.stride["B"] + head * self.stride["H"]
        if case.fmt == "token rows":
            place = offset * self.stride["N"] + (half * dim + d) * self.stride["C"]
        else:
            key, value = d * size + offset, size * dim + offset * dim + d
            place = torch.where(half == 0, key, value)
        return run + place


def simpler(move: Move) -> Iterator[Move]:
    if move.in_pieces:
        yield replace(move, in_pieces=False)
    count = len(move.sources)
    for first, last in ((0, count // 2), (count // 2, count), (1, count), (0, count - 1)):
        if 0 < last - first < count:
            yield replace(move, sources=move.sources[first:last], targets=move.targets[first:last])


def plainer(case: Case) -> Iterator[Case]:
    """The case with one thing as plain as it can be."""
    highest = max(
        (slot for move in case.moves for slot in (*move.sources, *move.targets)), default=0
    )
    if case.workspace is not None:
        yield replace(case, workspace=None)
    plain = Case(case.moves)
    for name in ("fmt", "dtype", "layers", "heads", "head_dim", "order", "gap", "separate"):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    for block_size in (1, 2, 3, 16, 32):
        if block_size < case.block_size:
            yield replace(case, block_size=block_size, blocks=highest // block_size + 1)
