"""A plan in flight: prepared, its copies running beside the steps, not committed yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import vtoken_spec as spec
from vtoken.core.arrays import IntArray
from vtoken.core.layout import CopyOrder


@dataclass(frozen=True)
class EvacuationPlan:
    """Live tokens of a request's emptiest blocks move into holes of its others, or into headroom.

    Attributes:
        version: table version the plan was made from (I4).
        token_ids: tokens that move, int32 `[n]`.
        sources, targets: slots, int32 `[n]`.
        released: block ids that are empty once the plan is committed.
        drawn: headroom blocks among the targets. They join the block list in front, so that the
            block with the physical end stays last.
        written: owned block ids among the targets; they leave the prefix cache first (L8).
    """

    version: int
    token_ids: IntArray
    sources: IntArray
    targets: IntArray
    released: list[int]
    drawn: list[int]
    written: list[int]


@dataclass(eq=False)
class Flight:
    """Implements `vtoken_spec.FlightView`.

    Attributes:
        number: identifies it to the worker; never used twice.
        req_id: its request.
        moves: the plan.
        blocks: the block list it was made from.
        step: the step in which it was prepared.
        waited: whether what the compute stream is given from now on comes after the copies.
        aborted: whether it will not be committed.
    """

    number: int
    req_id: str
    moves: EvacuationPlan
    blocks: list[int]
    step: int
    waited: bool = False
    aborted: bool = False

    @cached_property
    def plan(self) -> spec.Plan:
        """The plan as the laws see it."""
        made = self.moves
        columns = (made.token_ids, made.sources, made.targets)
        moves = zip(*(column.tolist() for column in columns), strict=True)
        return spec.Plan(
            req_id=self.req_id,
            version=made.version,
            blocks=tuple(self.blocks),
            moves=tuple(spec.Move(*move) for move in moves),
            released=tuple(made.released),
            purpose="reclaim",
        )

    @property
    def copies(self) -> CopyOrder:
        made = self.moves
        return CopyOrder(self.number, self.req_id, made.token_ids, made.sources, made.targets)
