"""The trace file: what is not a whole, well-formed trace is an error with its line number."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from vtoken.errors import Rejected, TraceFormatError
from vtoken.trace import Header, Record, read_trace, replay, shrink, write_trace
from vtoken.trace.explain import explain, in_words
from vtoken.trace.format import EVENTS, MAX_LINE_BYTES
from vtoken.trace.replay import load, replay_records

HEADER = Header(block_size=4, num_blocks=8, partial=True)
GOOD = [
    Record("append", "a", slots=tuple(range(4, 14)), blocks=(1, 2, 3), cached=(1, 2)),
    Record(
        "append", "b", slots=(16, 17, 18), blocks=(4,), post={"live": 3, "physical": 3, "blocks": 1}
    ),
    Record("evict", "a", tokens=(0, 1, 2, 3, 5)),
    Record("recycle", "b", slots=(17,)),  # wrong: slot 17 holds a live token of b
]


def accepted() -> list[Record]:
    return [
        *GOOD[:3],
        Record(
            "move",
            "a",
            tokens=(8, 9),
            sources=(12, 13),
            targets=(9, 4),
            blocks=(3,),
            order=(2, 1),
            uncached=(1, 2),
            post={"live": 5, "physical": 5, "blocks": 2},
        ),
        Record("append", "a", slots=(5,), post={"live": 6, "physical": 6, "blocks": 2}),
        Record("finish", "b"),
    ]


def lines_of(tmp_path: Path, records: list[Record]) -> list[str]:
    file = tmp_path / "t.ndjson"
    write_trace(file, HEADER, records)
    return file.read_text().splitlines()


def read_all(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.ndjson"
    file.write_bytes(content)
    _, records = read_trace(file)
    for _ in records:
        pass


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "t.ndjson"
    write_trace(file, HEADER, accepted())
    assert load(file) == (HEADER, accepted())


def test_the_spec_accepts_a_right_trace_and_counts_its_kinds(tmp_path: Path) -> None:
    file = tmp_path / "t.ndjson"
    write_trace(file, HEADER, accepted())
    result = replay(file)
    assert result.divergence is None, result.divergence
    assert result.length == 6
    assert result.events["append"] == 3


@pytest.mark.parametrize(
    ("where", "change", "law"),
    [
        (1, {"slots": [[16, 2], [19, 1]]}, "I2"),
        (1, {"blocks": [3]}, "L5"),
        (1, {"post": {"live": 4, "physical": 3, "blocks": 1}}, "I2"),
        (2, {"tokens": [[9, 1]]}, "I2"),
        (3, {"uncached": []}, "L8"),
        (3, {"sources": [[11, 2]]}, "I4"),
        (3, {"blocks": [2]}, "I4"),
        (4, {"slots": [[6, 1]]}, "I2"),
        (5, {"req": "c"}, "I2"),
    ],
)
def test_a_wrong_choice_is_the_first_divergence(
    tmp_path: Path, where: int, change: dict[str, object], law: str
) -> None:
    lines = lines_of(tmp_path, accepted())
    lines[where + 1] = json.dumps({**json.loads(lines[where + 1]), **change})
    file = tmp_path / "t.ndjson"
    file.write_text("\n".join(lines) + "\n")
    divergence = replay(file).divergence
    assert divergence is not None
    assert (divergence.line, divergence.law) == (where + 2, law), divergence


@pytest.mark.parametrize(
    ("line", "text", "complaint"),
    [
        (1, '{"vtoken_trace": 1, "block_size": 4, "num_blocks": 8}', "schema 1"),
        (1, '{"block_size": 4}', "not the header"),
        (1, '{"vtoken_trace": 2, "block_size": 0, "num_blocks": 8}', "block_size"),
        (2, '{"event": "explode", "req": "a", "post": {}}', "unknown event 'explode'"),
        (2, '{"event": "append", "req": "a", "slots": [[4, 1], [4, 1]], "post": {}}', "twice"),
        (2, '{"event": "append", "req": "a", "slots": [[4, 1000000000]], "post": {}}', "more than"),
        (2, '{"event": "append", "req": "a", "slots": [4], "post": {}}', "instead of"),
        (2, '{"event": "append", "req": 3, "post": {}}', "'req'"),
        (2, '{"event": "append", "req": "a", "why": 1, "post": {}}', "unknown field 'why'"),
        (2, '{"event": "append", "req": "a"}', "'post'"),
        (1, '{"vtoken_trace": 2, "block_size": 4096, "num_blocks": 4096}', "more than"),
        (1, '{"vtoken_trace": 2, "block_size": 4, "num_blocks": 8, "partial": 1}', "'partial'"),
        (2, '{"event": "append", "req": "a", "post": {"live": 1}}', "counts that belong"),
        (2, '{"event": "finish", "req": "a", "post": {"live": 1}}', "counts that belong"),
        (2, '{"event": "reserve", "req": "", "post": {"live": 1}}', "counts that belong"),
        (2, '{"event": "evict", "req": "a", "slots": [[4, 1]], "post": {}}', "has no 'slots'"),
        (2, '{"event": "evict", "req": "a", "adopted": 1, "post": {}}', "has no 'adopted'"),
        (3, "[1, 2]", "not a JSON object"),
        (3, "\x00\x01", "not JSON"),
        (3, "[" * 100_000, "not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: int, text: str, complaint: str) -> None:
    lines = lines_of(tmp_path, accepted())
    lines[line - 1] = text
    with pytest.raises(TraceFormatError, match=f"line {line}: .*{complaint}"):
        read_all(tmp_path, ("\n".join(lines) + "\n").encode())


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="line 1: not JSON"):
        read_all(tmp_path, b"\xff\xfe\x00garbage\n")


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="empty"):
        read_all(tmp_path, b"")


def test_a_trace_without_an_event_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="no event"):
        read_all(tmp_path, ("\n".join(lines_of(tmp_path, [])) + "\n").encode())


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = ("\n".join(lines_of(tmp_path, accepted())) + "\n").encode()
    read_all(tmp_path, whole)
    for end in range(len(whole)):
        with pytest.raises(TraceFormatError):
            read_all(tmp_path, whole[:end])


def test_a_hundred_megabytes_on_one_line_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "big.ndjson"
    with file.open("wb") as stream:
        for _ in range(100):
            stream.write(b"a" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(TraceFormatError, match="line 1: longer than"):
        read_trace(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_LINE_BYTES


def test_a_whole_trace_has_counts_and_says_what_is_read(tmp_path: Path) -> None:
    """Claim: leaving out what would be compared is not a way to be accepted, unless the header
    says that records were left out."""
    whole = replace(HEADER, partial=False)
    record = Record(
        "append", "a", slots=(4, 5), blocks=(1,), reads=(4, 5),
        post={"live": 2, "physical": 2, "blocks": 1},
    )  # fmt: skip
    file = tmp_path / "t.ndjson"
    write_trace(file, whole, [record, Record("finish", "a")])
    assert replay(file).divergence is None
    for less, complaint in (({"post": {}}, "counts"), ({"reads": ()}, "what is read")):
        write_trace(file, whole, [replace(record, **less)])  # type: ignore[arg-type]
        with pytest.raises(TraceFormatError, match=f"line 2: .*{complaint}"):
            replay(file)
        write_trace(file, HEADER, [replace(record, **less)])  # type: ignore[arg-type]
        assert replay(file).divergence is None


def test_what_entered_the_prefix_cache_is_taken_from_any_event() -> None:
    """Claim: a recorder tells of a change of the cache once, with the next event whatever it is;
    a replay that overlooked it with an eviction would refuse the hit that follows."""
    events = [
        Record("append", "a", slots=(4, 5, 6, 7, 8), blocks=(1, 2)),
        Record("evict", "a", tokens=(0,), cached=(1,)),
        Record("append", "b", slots=(4, 5, 6, 7, 12), blocks=(1, 3), adopted=4),
    ]
    assert replay_records(HEADER, enumerate(events, start=2)).divergence is None
    late = [events[0], replace(events[1], cached=()), events[2]]
    found = replay_records(HEADER, enumerate(late, start=2)).divergence
    assert found is not None
    assert found.line == 4


def test_counts_of_a_request_that_has_no_table_diverge() -> None:
    counts = {"live": 1, "physical": 1, "blocks": 1}
    found = replay_records(HEADER, [(2, Record("abort", "a", post=counts))]).divergence
    assert found is not None
    wrong = [Record("append", "a", slots=(4,), blocks=(1,)), Record("finish", "a", post=counts)]
    found = replay_records(HEADER, enumerate(wrong, start=2)).divergence
    assert found is not None
    assert (found.line, found.law) == (3, "I2")


def test_every_event_is_said_in_words_of_its_own() -> None:
    said = {
        event: in_words(Record(event, "a", slots=(4,), blocks=(1,), tokens=(0,)), 4)
        for event in EVENTS
    }
    assert len(set(said.values())) == len(EVENTS)
    assert "plans to move token 0" in said["prepare"]
    assert "switches" in said["commit"]


def test_a_commit_that_was_never_prepared_is_explained_by_its_request_s_plans() -> None:
    events = [
        Record("append", "a", slots=(4, 5), blocks=(1,)),
        Record("append", "b", slots=(8,), blocks=(2,)),
        Record("commit", "a"),
    ]
    chain = explain(HEADER, events)
    assert chain[-2] == "3. request a switches to its plan in flight"
    assert "law I4: the spec rejects this event: no plan of the request is in flight" in chain[-1]
    assert not any("request b" in line for line in chain)


def test_shrinking_keeps_the_law_and_drops_what_does_not_matter() -> None:
    small = shrink(HEADER, GOOD)
    assert [record.event for record in small] == ["append", "recycle"]
    assert {record.req for record in small} == {"b"}


def test_there_is_nothing_to_shrink_in_an_accepted_trace() -> None:
    with pytest.raises(Rejected, match="accepts"):
        shrink(HEADER, accepted())


def test_the_explanation_is_the_chain_of_events_at_the_slot() -> None:
    chain = explain(HEADER, GOOD)
    assert chain[0] == "2. request b writes 3 new tokens to slot 17 (block 4, 1)"
    assert chain[1].startswith("4. request b writes a new token into the hole at slot 17")
    assert "law L7" in chain[-1]
