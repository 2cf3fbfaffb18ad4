"""The worker's half of relocation: what is given to which stream, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import torch

from vtoken.core import CopyOrder, LayoutChange, StepOrders
from vtoken.core.layout import NO_FLIGHT
from vtoken.errors import InvariantViolation
from vtoken.kv import Mover, TokenRowLayout
from vtoken.kv.relocator import Relocator
from vtoken.kv.streams import Copy, CopyEvent, SynchronousCopyStream

Journal = list[tuple[object, ...]]


class Stream(SynchronousCopyStream):
    """Writes down what it is given; `failing` launches, counted from 0, copy nothing."""

    def __init__(self, journal: Journal, *, failing: Iterable[int] = ()) -> None:
        super().__init__()
        self.journal, self.failing = journal, set(failing)
        self.launches: list[CopyEvent] = []

    def launch(self, copies: Sequence[Copy]) -> CopyEvent:
        self.journal.append(("launch", copies[0].owner, len(copies)))
        fails = len(self.launches) in self.failing
        event = super().launch([] if fails else copies)
        if fails:
            event.error = RuntimeError("no such device")
        self.launches.append(event)
        return event

    def wait(self, event: CopyEvent) -> None:
        self.journal.append(("wait", self.launches.index(event)))
        super().wait(event)


class Watch:
    """Writes down when it looks."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def before_moves(self, changes: Sequence[LayoutChange]) -> None:
        self.journal.append(("before", *(change.req_id for change in changes)))

    def after_moves(self, changes: Sequence[LayoutChange]) -> None:
        self.journal.append(("after", *(change.req_id for change in changes)))

    def launching(self, order: CopyOrder) -> None:
        self.journal.append(("launching", order.flight))

    def landed(self, change: LayoutChange) -> None:
        self.journal.append(("landed", change.flight))

    def dropped_flight(self, flight: int) -> None:
        self.journal.append(("dropped", flight))


class Rig:
    """A relocator over 4 blocks of 4 tokens, each value another one.

    Attributes:
        journal: what the stream and the watch saw, and what went to the compute stream.
    """

    def __init__(self, *, watched: bool = True, failing: Iterable[int] = ()) -> None:
        shape = (2, 4, 2, 4, 6)  # layers, blocks, heads, tokens, content
        memory = torch.arange(2 * 4 * 2 * 4 * 6, dtype=torch.float32).reshape(shape)
        self.layout = TokenRowLayout([memory])
        self.journal: Journal = []
        self.relocator = Relocator(
            Mover(self.layout, workspace_bytes=2 * self.layout.token_bytes),
            Stream(self.journal, failing=failing),
            watch=Watch(self.journal) if watched else None,
            run=self._run,
        )
        self.before = self.bytes()

    def _run(
        self,
        action: Callable[[], None],
        *,
        kind: str,
        owner: str | None,
        reads: object,
        writes: object,
    ) -> None:
        self.journal.append((kind, owner, list(reads), list(writes)))  # type: ignore[call-overload]
        action()

    def bytes(self) -> torch.Tensor:
        """K and V of each of the 16 slots."""
        return self.layout.read(torch.arange(16))


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def order(flight: int, moves: dict[int, int], req_id: str = "a") -> CopyOrder:
    return CopyOrder(flight, req_id, ids(*range(len(moves))), ids(*moves), ids(*moves.values()))


def change(moves: dict[int, int], req_id: str = "a", flight: int = NO_FLIGHT) -> LayoutChange:
    tokens = ids(*range(len(moves)))
    return LayoutChange(
        req_id, tokens, ids(*moves), ids(*moves.values()), [1], [], trimmed=True, flight=flight
    )


def test_a_step_launches_first_then_waits_then_moves_then_looks_at_what_landed() -> None:
    """Claim: launches come before waits, so that what is committed does not hold up what starts;
    waits come before anything that the compute stream does, in step order or to look."""
    rig = Rig()
    rig.relocator.apply(StepOrders(launches=[order(1, {1: 9}), order(2, {2: 10}, "b")]))
    rig.journal.clear()
    rig.relocator.apply(
        StepOrders(
            launches=[order(3, {3: 11}, "c")],
            waits=[2, 1],
            changes=[change({1: 9}, flight=1), change({5: 13}, "d"), change({2: 10}, "b", 2)],
        )
    )
    assert rig.journal == [
        ("attend", "c", [3], []),
        ("launching", 3),
        ("launch", "c", 1),
        ("wait", 1),
        ("wait", 0),
        ("attend", None, [5], []),
        ("before", "d"),
        ("write", None, [5], [13]),
        ("attend", None, [13], []),
        ("after", "d"),
        ("attend", "a", [9], []),
        ("landed", 1),
        ("attend", "b", [10], []),
        ("landed", 2),
    ]


def test_a_plan_is_copied_once_in_pieces_of_the_workspace() -> None:
    """Claim: the launch copies it; its commit copies nothing again."""
    rig = Rig(watched=False)
    moves = {0: 8, 1: 9, 2: 10, 3: 11, 4: 12}
    rig.relocator.apply(StepOrders(launches=[order(1, moves)]))
    assert torch.equal(rig.bytes()[8:13], rig.before[:5])
    rig.relocator.apply(StepOrders(waits=[1], changes=[change(moves, flight=1)]))
    assert rig.journal == [("launch", "a", 3), ("wait", 0)]
    assert rig.relocator.mover.moved_tokens == 5


def test_changes_in_step_order_are_moved_together_and_a_release_moves_nothing() -> None:
    rig = Rig(watched=False)
    rig.relocator.apply(StepOrders(changes=[change({}, "a")]))
    assert rig.journal == []
    rig.relocator.apply(StepOrders(changes=[change({0: 8}), change({}, "b"), change({5: 13}, "c")]))
    assert rig.journal == [("write", None, [0, 5], [8, 13])]
    assert torch.equal(rig.bytes()[[8, 13]], rig.before[[0, 5]])


def test_nothing_to_do_does_nothing() -> None:
    rig = Rig()
    assert StepOrders().empty
    rig.relocator.apply(StepOrders())
    assert rig.journal == []


def test_a_plan_that_is_waited_for_and_not_committed_was_aborted() -> None:
    """Claim: its copies are waited for all the same, and nobody looks at their targets."""
    rig = Rig()
    rig.relocator.apply(StepOrders(launches=[order(1, {1: 9})]))
    rig.journal.clear()
    rig.relocator.apply(StepOrders(waits=[1]))
    assert rig.journal == [("wait", 0), ("attend", None, [], []), ("dropped", 1)]


def test_a_plan_may_be_launched_and_committed_in_one_step() -> None:
    rig = Rig()
    rig.relocator.apply(StepOrders([order(1, {1: 9})], [1], [change({1: 9}, flight=1)]))
    whats = [entry[0] for entry in rig.journal]
    assert whats == ["attend", "launching", "launch", "wait", "attend", "landed"]


@pytest.mark.parametrize("known", [False, True])
def test_a_wait_for_a_plan_that_is_not_in_flight_breaks_i3(known: bool) -> None:
    """Claim: whether it was never launched, or has been waited for already; nothing is switched
    or looked at then."""
    rig = Rig()
    if known:
        rig.relocator.apply(StepOrders([order(7, {1: 9})], [7], [change({1: 9}, flight=7)]))
        rig.journal.clear()
    with pytest.raises(InvariantViolation, match="plan 7 is waited for") as caught:
        rig.relocator.apply(StepOrders(waits=[7], changes=[change({1: 9}, flight=7)]))
    assert caught.value.law == "I3"
    assert rig.journal == []


def test_a_committed_plan_whose_copies_failed_is_copied_in_step_order() -> None:
    """Claim: behind the wait and before anybody looks; other plans are unharmed, and it is
    counted."""
    rig = Rig(failing=[0])
    rig.relocator.apply(StepOrders(launches=[order(1, {1: 9}), order(2, {2: 10}, "b")]))
    assert torch.equal(rig.bytes()[9], rig.before[9])
    rig.journal.clear()
    changes = [change({1: 9}, flight=1), change({2: 10}, "b", 2)]
    rig.relocator.apply(StepOrders(waits=[1, 2], changes=changes))
    assert [entry for entry in rig.journal if entry[0] != "attend"] == [
        ("wait", 0),
        ("write", None, [1], [9]),
        ("wait", 1),
        ("landed", 1),
        ("landed", 2),
    ]
    assert torch.equal(rig.bytes()[[9, 10]], rig.before[[1, 2]])
    assert rig.relocator.failed_copies == 1


def test_of_an_aborted_plan_whose_copies_failed_nothing_is_copied() -> None:
    rig = Rig(failing=[0])
    rig.relocator.apply(StepOrders(launches=[order(1, {1: 9})]))
    rig.journal.clear()
    rig.relocator.apply(StepOrders(waits=[1]))
    assert rig.journal == [("wait", 0), ("attend", None, [], []), ("dropped", 1)]
    assert torch.equal(rig.bytes(), rig.before)
    assert rig.relocator.failed_copies == 1


def test_a_failure_is_reported_once_while_its_plan_is_in_flight() -> None:
    """Claim: so that the scheduler can abort the plan; not once it has been waited for."""
    rig = Rig(failing=[1, 2])
    orders = [order(number, {number: 8 + number}) for number in range(4)]
    rig.relocator.apply(StepOrders(launches=orders))
    assert rig.relocator.take_failed() == [1, 2]
    assert rig.relocator.take_failed() == []
    rig.relocator.apply(StepOrders(waits=[0, 1, 2, 3]))
    assert rig.relocator.take_failed() == []
