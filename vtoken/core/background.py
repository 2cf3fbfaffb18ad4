"""The `background` mode's decisions: who is planned for, when a plan is committed, what is kept
as headroom. The four stages:

- eligibility: fragmentation at or above the threshold, no plan in flight, a block to gain;
- headroom-aware admission: at most `headroom` blocks are set aside at the start of a step, and
  at most `copy_budget` tokens are given to the copy stream in one step;
- relocation planning: `evacuation.py`;
- copy: the plan flies for `commit_delay` steps, then the table switches.

Who was left out for want of copy budget goes first in the next steps, those who have waited longest
before all others: everybody's turn comes within as many steps as there are requests (L10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtoken.core.arrays import BoolArray
from vtoken.core.evacuation import plan_evacuation
from vtoken.core.flight import EvacuationPlan, Flight
from vtoken.core.request_table import RequestTable
from vtoken.errors import Rejected

UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class BackgroundParams:
    """Parameters of the background mode.

    Attributes:
        threshold: share of a request's physical slots that are holes, in (0, 1], from which on it
            is planned for; not asked while an allocation fails for want of a block.
        headroom: blocks set aside as targets, for plans that need some.
        copy_budget: most tokens given to the copy stream in one step; at least one block's.
        moves_per_plan: most tokens that one plan moves; at least one block's.
        commit_delay: steps between a plan's copies and its commit; 0 waits in the same step.
        copy_out: whether a request's tokens in shared or cached blocks may be copied out of them.
    """

    threshold: float = 0.25
    headroom: int = 0
    copy_budget: int = UNBOUNDED
    moves_per_plan: int = UNBOUNDED
    commit_delay: int = 2
    copy_out: bool = False

    def check(self, *, block_size: int) -> None:
        """Raises Rejected for a value that cannot work."""
        if not 0 < self.threshold <= 1:
            raise Rejected(f"threshold {self.threshold} is not in (0, 1]")
        if self.headroom < 0:
            raise Rejected(f"headroom {self.headroom} is negative")
        if self.commit_delay < 0:
            raise Rejected(f"commit delay {self.commit_delay} is negative")
        for name in ("copy_budget", "moves_per_plan"):
            if getattr(self, name) < block_size:
                raise Rejected(
                    f"{name} {getattr(self, name)} is less than one block's {block_size} tokens; "
                    "raise it, or leave it out for no bound"
                )


class Background:
    """The plans in flight of all requests, and the shares of a step.

    Args:
        params: see `BackgroundParams`.
        block_size: tokens per block.

    Raises:
        Rejected: a parameter cannot work.

    Attributes:
        flights: by request.
        headroom: blocks that are set aside and in no plan.
        pressure: whether an allocation failed in the step before.
    """

    def __init__(self, params: BackgroundParams, *, block_size: int) -> None:
        params.check(block_size=block_size)
        self.params = params
        self.flights: dict[str, Flight] = {}
        self.headroom: list[int] = []
        self.pressure = False
        self._size = block_size
        self._numbers = 0
        self._step = 0
        self._budget = params.copy_budget
        self._first: set[str] = set()
        self._left_out: dict[str, int] = {}
        self._asked: set[str] = set()

    @property
    def held(self) -> list[int]:
        """Blocks that the plans in flight draw."""
        return [block for flight in self.flights.values() for block in flight.moves.drawn]

    def begin_step(self) -> int:
        """Open a step; returns how many blocks to set aside (negative: how many to give back).

        While an allocation fails, headroom helps nobody and goes back.
        """
        self._budget = self.params.copy_budget
        wanted = 0 if self.pressure else self.params.headroom
        return wanted - len(self.headroom) - len(self.held) if wanted else -len(self.headroom)

    def end_step(self, *, pressure: bool) -> None:
        """Close a step in which an allocation failed, or none did."""
        # Who did not ask again needs no turn any more.
        waiting = {
            req_id: since for req_id, since in self._left_out.items() if req_id in self._asked
        }
        longest = min(waiting.values(), default=0)
        self._first = {req_id for req_id, since in waiting.items() if since == longest}
        self._left_out, self._asked = waiting, set()
        self.pressure = pressure
        self._step += 1

    def is_eligible(self, table: RequestTable) -> bool:
        """Whether the request's fragmentation calls for a plan."""
        holes = table.num_holes
        return holes > 0 and (self.pressure or holes >= self.params.threshold * table.physical_len)

    def is_due(self, flight: Flight) -> bool:
        return self._step - flight.step >= self.params.commit_delay

    def plan(self, table: RequestTable, writable: BoolArray) -> EvacuationPlan | None:
        """A plan for an eligible request within this step's shares, or None."""
        params = self.params
        self._asked.add(table.req_id)
        spare: Sequence[int] = self.headroom
        most = params.moves_per_plan
        plan = plan_evacuation(
            table, writable, max_moves=most, spare=spare, copy_out=params.copy_out
        )
        if plan is None:
            self._had_turn(table.req_id)
            return None
        waits = bool(self._first) and table.req_id not in self._first
        if len(plan.token_ids) > self._budget and not waits:
            most = min(most, self._budget)
            plan = plan_evacuation(
                table, writable, max_moves=most, spare=spare, copy_out=params.copy_out
            )
        if waits or plan is None:
            self._left_out.setdefault(table.req_id, self._step)
            return None
        self._had_turn(table.req_id)
        return plan

    def _had_turn(self, req_id: str) -> None:
        self._first.discard(req_id)
        self._left_out.pop(req_id, None)

    def flight_of(self, table: RequestTable, plan: EvacuationPlan) -> Flight:
        """The plan as it is about to go into flight."""
        self._numbers += 1
        return Flight(self._numbers, table.req_id, plan, table.blocks.tolist(), self._step)

    def launch(self, flight: Flight) -> None:
        """Put a plan into flight: it takes its share of the step and the headroom it draws."""
        self._budget -= len(flight.moves.token_ids)
        drawn = set(flight.moves.drawn)
        self.headroom = [block for block in self.headroom if block not in drawn]
        self.flights[flight.req_id] = flight

    def land(self, req_id: str) -> Flight | None:
        """Take the request's plan out of flight; the headroom it drew is the caller's concern."""
        self._had_turn(req_id)
        return self.flights.pop(req_id, None)
