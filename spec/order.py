"""Happens-before over recorded stream operations, as laws: I3, and the halves of L7 and L11 that
speak of copies in flight.

A log is the sequence of operations in the order in which the host issued them. A stream runs its
own operations in that order; different streams run at the same time, and only events order them:
a `wait` puts every later operation of its stream behind the `record` of that event and behind
everything that was ordered before the record. A wait for an event that nobody has recorded yet
orders nothing, so it is reported by itself.

Two accesses to one slot conflict unless both are reads. The laws ask that conflicting accesses
are ordered by the log, whatever the speed of the streams in one run: a dependency that is missing
is a breach even where the bytes came out right.

| the later access | an unordered earlier access | law |
| --- | --- | --- |
| reads (attention, or a copy's source) | wrote the slot | I3 |
| writes as the target of a copy | read or wrote the slot | L11: handed out too early |
| writes as new KV or as zeroes | same request's | L7 |
| writes as new KV or as zeroes | another request's, or of none | L11 |

That the host has waited for a stream is no operation and orders nothing here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from .breach import Breach, breach

NO_EVENT = -1
"""The event of an operation that neither records nor waits."""

OpKind = Literal["write", "attend", "copy", "zero", "record", "wait"]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, as the host put it into a stream.

    Attributes:
        stream: name of the stream that runs it.
        kind: "write" stores new KV entries, "attend" reads for attention, "copy" relocates,
            "zero" clears; "record" and "wait" concern `event`.
        owner: the request it works for, or None where it works for none or for several.
        reads, writes: slots.
        event: identifies the event of a record or a wait; a later record of the same event
            counts for later waits.
    """

    stream: str
    kind: OpKind
    owner: str | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    event: int = NO_EVENT


def races(ops: Iterable[Op]) -> Iterator[Breach]:
    """One breach for each pair of conflicting accesses to a slot that nothing orders, and one for
    each wait that orders nothing.

    An access is compared with the slot's last write and, if it writes, with the reads since. No
    breach means that no conflicting accesses at all are unordered, since order is transitive. The
    work is linear in the number of accesses: a read is looked at by one write only. `before` and
    `after` of a breach describe the earlier and the later operation, with its place in the log.
    """
    order = _Order()
    slots: defaultdict[int, _Slot] = defaultdict(_Slot)
    for place, op in enumerate(ops):
        if op.kind == "wait" and not order.recorded(op.event):
            yield _lost_wait(op, place)
        issued = _Issued(op, place, order.take(op))
        yield from _read(issued, slots, order)
        yield from _write(issued, slots, order)


# ---- accesses


@dataclass(frozen=True, slots=True)
class _Issued:
    """An operation with its place in the log and its place in its own stream."""

    op: Op
    place: int
    nth: int

    def __str__(self) -> str:
        owner = "no single request" if self.op.owner is None else f"request {self.op.owner!r}"
        return f"#{self.place} {self.op.kind} of {owner} in stream {self.op.stream!r}"


@dataclass(slots=True)
class _Slot:
    """The accesses to one slot that a later one has to be compared with."""

    writer: _Issued | None = None
    readers: list[_Issued] = field(default_factory=list)


def _read(later: _Issued, slots: defaultdict[int, _Slot], order: _Order) -> Iterator[Breach]:
    for slot in dict.fromkeys(later.op.reads):
        known = slots[slot]
        writer = known.writer
        if writer is not None and not order.is_before(writer, later.op.stream):
            yield _race(
                "I3", slot, writer, later, f"reads what an unordered {writer.op.kind} wrote"
            )
        known.readers.append(later)


def _write(later: _Issued, slots: defaultdict[int, _Slot], order: _Order) -> Iterator[Breach]:
    for slot in dict.fromkeys(later.op.writes):
        known = slots[slot]
        writer = known.writer
        if writer is not None and not order.is_before(writer, later.op.stream):
            what = f"writes over what an unordered {writer.op.kind} writes"
            yield _race(_law_of_write(writer.op, later.op), slot, writer, later, what)
        for reader in known.readers:
            if not order.is_before(reader, later.op.stream):
                what = f"writes over what an unordered {reader.op.kind} reads"
                yield _race(_law_of_write(reader.op, later.op), slot, reader, later, what)
        known.writer, known.readers = later, []


def _law_of_write(earlier: Op, later: Op) -> str:
    if later.kind == "copy":
        return "L11"
    return "L7" if later.owner is not None and later.owner == earlier.owner else "L11"


def _race(law: str, slot: int, earlier: _Issued, later: _Issued, what: str) -> Breach:
    return breach(
        law,
        f"{later.op.kind} {what}",
        req_id=later.op.owner,
        slot=slot,
        before=str(earlier),
        after=str(later),
    )


def _lost_wait(op: Op, place: int) -> Breach:
    what = f"waits for event {op.event}, which is not recorded yet: the wait orders nothing"
    return breach("I3", what, req_id=op.owner, after=str(_Issued(op, place, 0)))


# ---- order

_Clock = dict[str, int]
"""Per stream, how many of its operations are ordered before something."""


class _Order:
    """What is ordered before the next operation of each stream: one vector clock per stream, and
    one per recorded event."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, _Clock] = defaultdict(dict)
        self._events: dict[int, _Clock] = {}

    def recorded(self, event: int) -> bool:
        return event in self._events

    def take(self, op: Op) -> int:
        """Issue `op`; its place in its stream, counted from 0."""
        clock = self._clocks[op.stream]
        nth = clock.get(op.stream, 0)
        clock[op.stream] = nth + 1
        if op.kind == "record":
            self._events[op.event] = dict(clock)
        elif op.kind == "wait":
            for stream, count in self._events.get(op.event, {}).items():
                clock[stream] = max(clock.get(stream, 0), count)
        return nth

    def is_before(self, earlier: _Issued, stream: str) -> bool:
        """Whether `earlier` is ordered before what `stream` was given last, or is that itself."""
        return self._clocks[stream].get(earlier.op.stream, 0) > earlier.nth
