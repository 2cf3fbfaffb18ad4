"""Validates a trace against the unchanged spec, and says where it first diverges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vtoken.checks.follower import Follower
from vtoken.checks.judge import first_breach
from vtoken.errors import InvariantViolation, Rejected
from vtoken.trace.format import OF_THE_POOL, Header, Record, read_trace


@dataclass(frozen=True)
class Divergence:
    """The first event that the spec does not allow, or after which its state differs.

    Attributes:
        line: line number in the file, or index of the record from 1 without a file.
        law: the law it breaks.
        message: what and where.
    """

    line: int
    law: str
    message: str


@dataclass
class ReplayResult:
    """What a replay found.

    Attributes:
        header: of the trace.
        events: records replayed, by kind.
        kinds: events of the spec's model that they exercised, by kind.
        divergence: the first one, or None: the trace is accepted.
    """

    header: Header
    events: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    divergence: Divergence | None = None

    @property
    def length(self) -> int:
        return self.events.total()


class Replayer:
    """Feeds records to the spec's model, one at a time.

    Args:
        header: sizes of the pool.
        laws: whether the spec's state laws are evaluated after each record as well; the
            default is every record, which costs O(pool) each.
    """

    def __init__(self, header: Header, *, laws: bool = True) -> None:
        self._follower = Follower(num_blocks=header.num_blocks, block_size=header.block_size)
        self._laws = laws

    @property
    def kinds(self) -> Counter[str]:
        """Events the model accepted so far, by kind."""
        return self._follower.kinds

    def feed(self, record: Record) -> None:
        """Apply one record and compare its counts.

        Raises:
            InvariantViolation: the spec rejects it, or its state differs from `post`.
        """
        follower = self._follower
        moves = (
            tuple(zip(record.tokens, record.sources, record.targets, strict=True))
            if (record.sources or record.targets)
            else ()
        )
        if record.event not in ("abort", *OF_THE_POOL):
            follower.cache_changed(record.cached, record.uncached)
        match record.event:
            case "append" | "recycle":
                self._appended(record)
            case "evict":
                follower.evict(record.req, record.tokens)
            case "move":
                follower.move(record.req, moves, record.blocks, record.order)
            case "release":
                follower.release(record.req, record.blocks)
            case "prepare":
                follower.prepare(record.req, moves, record.blocks)
            case "commit":
                follower.commit(record.req)
            case "abort":
                follower.abort(record.req)
            case "reserve":
                follower.reserve(record.blocks)
            case "unreserve":
                follower.unreserve(record.blocks)
            case "preempt":
                follower.preempt(record.req)
            case _:
                follower.finish(record.req)
        self._compare(record)
        if self._laws:
            breach = first_breach(follower.state)
            if breach is not None:
                raise InvariantViolation(law=breach.law, message=breach.message)

    def _appended(self, record: Record) -> None:
        follower = self._follower
        if record.event == "recycle":
            follower.recycle(record.req, record.slots[0] if record.slots else -1, record.blocks)
        else:
            follower.append(record.req, record.slots, record.blocks, record.adopted)
        follower.settle_cache()
        if record.reads:
            follower.attend(record.req, record.reads, len(record.slots) - record.adopted)

    def _compare(self, record: Record) -> None:
        if not record.post:
            return
        table = self._follower.state.requests.get(record.req)
        if table is None:
            raise InvariantViolation(
                law="I2",
                message="the trace counts tokens of a request that has no table",
                req_id=record.req,
            )
        counted = {
            "live": sum(table.live),
            "physical": table.physical_len,
            "blocks": len(table.blocks),
        }
        for name, value in record.post.items():
            if name in counted and counted[name] != value:
                raise InvariantViolation(
                    law="I2",
                    message=f"the spec's state has {name} {counted[name]}, the trace {value}",
                    req_id=record.req,
                    before=counted[name],
                    after=value,
                )


def replay_records(
    header: Header,
    records: Iterable[tuple[int, Record]],
    *,
    laws: bool = True,
    on_record: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay numbered records; stops at the first divergence."""
    replayer = Replayer(header, laws=laws)
    result = ReplayResult(header, kinds=replayer.kinds)
    for line, record in records:
        try:
            replayer.feed(record)
        except InvariantViolation as violation:
            result.divergence = Divergence(line, violation.law, violation.message)
            return result
        except ValueError as error:  # moves whose columns differ in length
            result.divergence = Divergence(line, "I4", f"malformed moves: {error}")
            return result
        result.events[record.event] += 1
        if on_record is not None:
            on_record(result.length)
    return result


def replay(
    file: Path, *, laws: bool = True, on_record: Callable[[int], None] | None = None
) -> ReplayResult:
    """Replay a trace file.

    Raises:
        TraceFormatError: the file is not a whole, well-formed trace.
    """
    header, records = read_trace(file)
    return replay_records(header, records, laws=laws, on_record=on_record)


def load(file: Path) -> tuple[Header, list[Record]]:
    """A whole trace in memory, for shrinking.

    Raises:
        TraceFormatError
    """
    header, records = read_trace(file)
    return header, [record for _, record in records]


def load_diverging(file: Path) -> tuple[Header, list[Record]]:
    """The records up to where the trace diverges; what follows need not even be readable.

    Raises:
        Rejected: the spec accepts all of it.
        TraceFormatError: it is malformed before it diverges.
    """
    header, records = read_trace(file)
    replayer, kept = Replayer(header), []
    for _, record in records:
        kept.append(record)
        try:
            replayer.feed(record)
        except (InvariantViolation, ValueError):
            return header, kept
    raise Rejected(f"the spec accepts {file}; there is nothing that diverges")
