"""The trace file: NDJSON, a header line, one record a line, an end line that proves it is whole.

    {"vtoken_trace": 2, "block_size": 32, "num_blocks": 64, "about": {...}}
    {"event": "append", "req": "0", "slots": [[32, 70]], "blocks": [1, 2, 3], "adopted": 0,
     "reads": [[32, 70]], "cached": [1, 2], "post": {"live": 70, "physical": 70, "blocks": 3}}
    ...
    {"event": "end", "records": 412}

Slots are runs `[first, count]`. `cached` and `uncached` are blocks that entered or left vLLM's
prefix cache since the record before. `post` is what the implementation counted after the event;
a replay compares it with the spec's state. Reading holds one line in memory, of at most
`MAX_LINE_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from vtoken.errors import TraceFormatError

SCHEMA = 2
MAX_LINE_BYTES = 4 << 20
MAX_SLOTS = 1 << 23
"""Of a pool: as many tokens as 70 GB of K and V hold on a small model, and 70 MB of the model's."""

EVENTS = (
    *("append", "recycle", "evict", "move", "release", "finish", "preempt"),
    *("prepare", "commit", "abort", "reserve", "unreserve"),
)
ENDINGS = ("finish", "preempt")
"""Events after which a request has no table."""
OF_THE_POOL = ("reserve", "unreserve")
"""Events that are no request's."""


@dataclass(frozen=True)
class Header:
    """What every event of a trace refers to.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks of the pool, the null block included.
        about: versions and options of the run, for people.
        partial: whether records were left out, so that counts after them mean nothing; else each
            record that leaves a table has them, and each that writes says what is read.
    """

    block_size: int
    num_blocks: int
    about: dict[str, Any] = field(default_factory=dict)
    partial: bool = False


@dataclass(frozen=True)
class Record:
    """One event and what was counted after it.

    Attributes:
        event: one of `EVENTS`.
        req: request id; empty for events of the pool.
        slots: new slots (append, recycle).
        blocks: new blocks (append, recycle), dropped blocks (move, release, prepare), headroom
            (reserve, unreserve).
        adopted: leading tokens from the prefix cache (append).
        reads: slots that attention is given, in the order of its view (append, recycle).
        tokens: token ids (evict, move, prepare).
        sources, targets: slots (move, prepare).
        order: block list afterwards (move).
        cached, uncached: changes of the prefix cache seen with this event.
        post: live tokens, physical length and blocks of the request afterwards; empty where it
            has no table then.
    """

    event: str
    req: str = ""
    slots: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    adopted: int = 0
    reads: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    uncached: tuple[int, ...] = ()
    post: dict[str, int] = field(default_factory=dict)


COUNTS = {"live", "physical", "blocks"}

_CACHE = ("cached", "uncached")
_WRITTEN = ("slots", "blocks", "reads", *_CACHE)
_MOVED = ("tokens", "sources", "targets", "blocks")
_FIELDS: dict[str, tuple[str, ...]] = {
    "append": _WRITTEN,
    "recycle": _WRITTEN,
    "evict": ("tokens", *_CACHE),
    "move": (*_MOVED, "order", *_CACHE),
    "prepare": (*_MOVED, *_CACHE),
    "release": ("blocks", *_CACHE),
    "commit": _CACHE,
    "finish": _CACHE,
    "preempt": _CACHE,
    "abort": (),
    "reserve": ("blocks",),
    "unreserve": ("blocks",),
}
"""The lists that each event may have."""
_RUNS = ("slots", "reads", "tokens", "sources", "targets")
_LISTS = ("blocks", "order", "cached", "uncached")


def runs_of(items: Sequence[int]) -> list[list[int]]:
    """Consecutive numbers as `[first, count]` runs."""
    runs: list[list[int]] = []
    for item in items:
        if runs and item == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([item, 1])
    return runs


def line_of(record: Record) -> str:
    """One NDJSON line, without its newline; empty fields are left out."""
    values: dict[str, Any] = {"event": record.event, "req": record.req}
    for name in _RUNS:
        if getattr(record, name):
            values[name] = runs_of(getattr(record, name))
    for name in _LISTS:
        if getattr(record, name):
            values[name] = list(getattr(record, name))
    if record.adopted:
        values["adopted"] = record.adopted
    values["post"] = record.post
    return json.dumps(values, separators=(",", ":"))


def header_line(header: Header) -> str:
    values = {
        "vtoken_trace": SCHEMA,
        "block_size": header.block_size,
        "num_blocks": header.num_blocks,
        "about": header.about,
        **({"partial": True} if header.partial else {}),
    }
    return json.dumps(values, separators=(",", ":"))


def end_line(records: int) -> str:
    return json.dumps({"event": "end", "records": records}, separators=(",", ":"))


def write_trace(file: Path, header: Header, records: Iterable[Record]) -> int:
    """Write a whole trace; returns the number of records."""
    count = 0
    with file.open("w", encoding="utf-8") as stream:
        stream.write(header_line(header) + "\n")
        for record in records:
            stream.write(line_of(record) + "\n")
            count += 1
        stream.write(end_line(count) + "\n")
    return count


def read_trace(file: Path) -> tuple[Header, Iterator[tuple[int, Record]]]:
    """Header, and the records with their line numbers, read as they are asked for.

    Raises:
        TraceFormatError: not a trace, another schema, cut off, or a line that is wrong in itself;
            with the line number. From the iterator for everything behind the header.
    """
    try:
        stream = file.open("rb")
    except OSError as error:
        raise TraceFormatError(f"cannot read trace {file}: {error.strerror}") from error
    lines = _lines(file, stream)
    first = next(lines, None)
    if first is None:
        stream.close()
        raise TraceFormatError(f"{file} is empty; a trace has a header line")
    try:
        header = _header(file, first[1])
    except TraceFormatError:
        stream.close()
        raise
    return header, _records(file, header, lines, stream)


def _lines(file: Path, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    while True:
        raw = stream.readline(MAX_LINE_BYTES + 1)
        if not raw:
            return
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise _wrong(file, number, f"longer than {MAX_LINE_BYTES} bytes")
        if not raw.endswith(b"\n"):
            raise _wrong(file, number, "cut off in the middle; the trace is truncated")
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _wrong(file, number, f"not JSON ({error})") from error
        if not isinstance(value, dict):
            raise _wrong(file, number, "not a JSON object")
        yield number, value


def _header(file: Path, value: dict[str, Any]) -> Header:
    schema = value.get("vtoken_trace")
    if schema is None:
        raise _wrong(file, 1, "not the header of a vToken trace")
    if schema != SCHEMA:
        raise _wrong(
            file, 1, f"trace schema {schema!r}, and this vToken reads {SCHEMA}; record it again"
        )
    sizes = [value.get("block_size"), value.get("num_blocks")]
    for size in sizes:
        if type(size) is not int or not 1 <= size <= MAX_SLOTS:
            raise _wrong(file, 1, f"block_size and num_blocks must be 1 to {MAX_SLOTS}")
    if sizes[0] * sizes[1] > MAX_SLOTS:  # type: ignore[operator]
        raise _wrong(file, 1, f"a pool of more than {MAX_SLOTS} slots")
    partial = value.get("partial", False)
    if type(partial) is not bool:
        raise _wrong(file, 1, "'partial' is not true or false")
    about = value.get("about", {})
    if not isinstance(about, dict):
        raise _wrong(file, 1, "'about' is not an object")
    return Header(sizes[0], sizes[1], about, partial)  # type: ignore[arg-type]


def _records(
    file: Path, header: Header, lines: Iterator[tuple[int, dict[str, Any]]], stream: IO[bytes]
) -> Iterator[tuple[int, Record]]:
    count = 0
    number = 1
    with stream:
        for number, value in lines:
            if value.get("event") == "end":
                if value.get("records") != count:
                    raise _wrong(
                        file, number, f"{count} records before the end, not {value.get('records')}"
                    )
                if next(lines, None) is not None:
                    raise _wrong(file, number + 1, "something follows the end of the trace")
                if count == 0:
                    raise _wrong(file, number, "the trace has no event")
                return
            yield number, _record(file, number, header, value)
            count += 1
    raise _wrong(file, number, "no end line; the trace is truncated")


def _record(file: Path, number: int, header: Header, value: dict[str, Any]) -> Record:
    event, req = value.get("event"), value.get("req")
    if event not in EVENTS:
        raise _wrong(file, number, f"unknown event {event!r}; known: {', '.join(EVENTS)}")
    if not isinstance(req, str):
        raise _wrong(file, number, "'req' is not a string")
    known = {"event", "req", "adopted", "post", *_RUNS, *_LISTS}
    if extra := value.keys() - known:
        raise _wrong(file, number, f"unknown field {sorted(extra)[0]!r}")
    limit = header.block_size * header.num_blocks
    fields: dict[str, Any] = {}
    for name in _RUNS:
        fields[name] = _expanded(file, number, name, value.get(name, []), limit)
    for name in _LISTS:
        fields[name] = _numbers(file, number, name, value.get(name, []), limit)
    for name in ("slots", "targets", "blocks", "order"):  # reads are L6's to judge
        if len(set(fields[name])) != len(fields[name]):
            raise _wrong(file, number, f"a number stands twice in {name!r}")
    for name in (*_RUNS, *_LISTS):
        if fields[name] and name not in _FIELDS[event]:
            raise _wrong(file, number, f"{event!r} has no {name!r}")
    adopted, post = value.get("adopted", 0), value.get("post")
    if type(adopted) is not int or adopted < 0:
        raise _wrong(file, number, "'adopted' is not a count")
    if adopted and event != "append":
        raise _wrong(file, number, f"{event!r} has no 'adopted'")
    if not isinstance(post, dict) or not all(type(v) is int for v in post.values()):
        raise _wrong(file, number, "'post' is not an object of counts")
    leaves_none = event in (*ENDINGS, *OF_THE_POOL, "abort")
    if post if leaves_none else post.keys() != COUNTS and not (header.partial and not post):
        raise _wrong(file, number, "'post' does not have the counts that belong to the event")
    if "reads" in _FIELDS[event] and not fields["reads"] and not header.partial:
        raise _wrong(file, number, f"{event!r} does not say what is read")
    return Record(event=event, req=req, adopted=adopted, post=post, **fields)


def _expanded(file: Path, number: int, name: str, value: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(file, number, f"{name!r} is not a list of runs")
    items: list[int] = []
    for run in value:
        if (
            not isinstance(run, list)
            or len(run) != 2
            or not all(type(x) is int and x >= 0 for x in run)
        ):
            raise _wrong(file, number, f"{name!r} holds {run!r} instead of [first, count]")
        if len(items) + run[1] > limit:  # more than the pool has slots: never real
            raise _wrong(file, number, f"{name!r} holds more than the pool's {limit} slots")
        items.extend(range(run[0], run[0] + run[1]))
    return tuple(items)


def _numbers(file: Path, number: int, name: str, value: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(x) is int and 0 <= x < limit for x in value):
        raise _wrong(file, number, f"{name!r} is not a list of blocks")
    return tuple(value)


def _wrong(file: Path, number: int, what: str) -> TraceFormatError:
    return TraceFormatError(f"{file}, line {number}: {what}")
