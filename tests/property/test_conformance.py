"""The conformance suites: what keeps the contract passes, and seeded faults are named.

A fault is a small table, mover or stream with one thing wrong; each is caught by its own law or
check at the suites' default scope and seed, and each check is needed to catch one.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.broken_movers import (
    MOVER_FAULTS,
    KeysOnly,
    LastLayerLeftBehind,
    PlainMover,
    RowsOfTheView,
)
from support.broken_streams import STREAM_FAULTS, LoggedThread, Queued, adversary
from support.broken_tables import TABLE_FAULTS, LastOfABulkLives
from support.faults import Fault
from vtoken.core import TokenTable
from vtoken.kv import Mover
from vtoken.kv.streams import SynchronousCopyStream, ThreadCopyStream
from vtoken.testing import (
    ConformanceError,
    ModelTable,
    check_copy_stream,
    check_mover,
    check_token_table,
)
from vtoken.testing.conformance import CHECKS, shortest
from vtoken.testing.device import STRATEGIES
from vtoken_spec import LAWS

ROOT = Path(__file__).resolve().parents[2]


def caught(check: Callable[..., object], fault: Fault, **options: Any) -> ConformanceError:
    with pytest.raises(ConformanceError) as error:
        check(fault.make, **options)
    assert error.value.law in fault.laws, error.value
    return error.value


# Token tables -----------------------------------------------------------------------------------


def test_our_token_table_conforms() -> None:
    """Claim: 200 histories with every operation, shared prefixes, and every wrong call there is."""
    report = check_token_table(TokenTable)
    assert report.histories == 200
    done = report.operations
    assert min(done[name] for name in ("evict_token", "evict_tokens", "apply_moves", "drop")) > 100
    assert done["sync_new_tokens"] > 1000
    assert done["sync_new_tokens behind a shared prefix"] > 100
    refused = {reason: count for reason, count in report.rejections.items() if count >= 50}
    assert set(refused) == {
        "a negative id is no token",
        "a source is not the slot of the live token it names",
        "a target is not an unused slot of an owned or headroom block",
        "a token or a block is named twice",
        "the block is not free",
        "the block list does not extend the known one",
        "the last computed token cannot be evicted",
        "the offset is outside a block",
        "the request has no table",
        "the slots are not the next ones at the physical end",
        "the token has not been computed yet",
        "the token is dead already",
        "there is no new token",
    }


def test_the_model_behind_the_boundary_conforms() -> None:
    assert check_token_table(ModelTable, examples=60).histories == 60


@pytest.mark.parametrize("fault", TABLE_FAULTS, ids=str)
def test_a_faulty_table_is_caught_by_name_with_a_short_history(fault: Fault) -> None:
    """Claim: the history has at most six calls, and ends in the one that shows the fault."""
    error = caught(check_token_table, fault)
    assert len(error.history) <= 7, error
    assert error.history[0].startswith("table = factory(")
    assert all(line.startswith("table.") for line in error.history[1:])


@pytest.mark.parametrize("fault", TABLE_FAULTS, ids=str)
def test_a_seed_finds_the_same_history_again(fault: Fault) -> None:
    error = caught(check_token_table, fault)
    seed = int(error.again.partition("seed=")[2].rstrip(")"))
    again = caught(check_token_table, fault, examples=1, seed=seed)
    assert str(again) == str(error)


def test_a_history_is_python_that_shows_the_fault() -> None:
    error = caught(check_token_table, Fault(LastOfABulkLives, "L6"))
    names: dict[str, Any] = {"factory": LastOfABulkLives}
    exec("\n".join(error.history), names)
    (req_id,) = names["table"]
    assert names["table"][req_id].live.tolist().count(False) == 1


# Movers -----------------------------------------------------------------------------------------


def test_our_mover_conforms() -> None:
    report = check_mover(Mover)
    counts = report.operations
    assert report.histories == 150
    assert min(counts[name] for name in ("move", "copies", "larger than the workspace")) > 50
    assert min(counts[name] for name in ("float32", "bfloat16", "float16", "uint8")) > 20
    assert min(counts[name] for name in ("token rows", "transposed keys")) > 50


def test_a_mover_without_workspace_and_pieces_conforms() -> None:
    report = check_mover(PlainMover)
    assert report.operations["copies"] == report.operations["larger than the workspace"] == 0


@pytest.mark.parametrize("fault", MOVER_FAULTS, ids=str)
def test_a_faulty_mover_is_caught_by_name_with_one_short_move(fault: Fault) -> None:
    error = caught(check_mover, fault)
    cache, move = error.history
    assert move.count(",") <= 3, error
    if fault.make is RowsOfTheView:
        assert "fmt transposed keys" in cache
    else:
        assert "fmt token rows" in cache
    if fault.make in (KeysOnly, LastLayerLeftBehind):
        assert "V differ" in error.message


# Copy streams -----------------------------------------------------------------------------------


STREAMS = {
    "synchronous": SynchronousCopyStream,
    "thread": ThreadCopyStream,
    "logged thread": LoggedThread,
    **{strategy: adversary(strategy) for strategy in STRATEGIES},
}


@pytest.mark.parametrize("name", STREAMS)
def test_our_copy_streams_conform(name: str) -> None:
    report = check_copy_stream(STREAMS[name])
    assert report.histories == 100
    kinds = ("launch", "wait", "poll", "compute", "synchronize", "failing copy")
    assert min(report.operations[kind] for kind in kinds) > 40
    assert set(report.rejections) == {"a closed stream", "an event of another kind of stream"}


def test_the_stream_that_is_broken_below_conforms() -> None:
    check_copy_stream(Queued)


@pytest.mark.parametrize("fault", STREAM_FAULTS, ids=str)
def test_a_faulty_stream_is_caught_by_name_with_a_short_history(fault: Fault) -> None:
    patience_s = 1.0 if "hang" in fault.laws else 5.0
    error = caught(check_copy_stream, fault, patience_s=patience_s)
    assert len(error.history) <= 7, error


# The suites themselves --------------------------------------------------------------------------


def test_every_check_catches_a_fault_here() -> None:
    """Claim: no check is idle, and every name that a failure can have is a law or is explained."""
    found = {fault.laws[0] for fault in (*TABLE_FAULTS, *MOVER_FAULTS, *STREAM_FAULTS)}
    assert found >= set(CHECKS)
    assert found - set(CHECKS) <= set(LAWS)


def test_a_suite_needs_neither_pytest_nor_hypothesis() -> None:
    program = """
import sys
from vtoken.testing import *
from vtoken.core import TokenTable
from vtoken.kv import Mover
from vtoken.kv.streams import ThreadCopyStream
for report in (
    check_token_table(TokenTable, examples=2),
    check_mover(Mover, examples=2),
    check_copy_stream(ThreadCopyStream, examples=2),
):
    print(report)
assert not {"pytest", "_pytest", "hypothesis"} & set(sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.partition(":")[0] for line in ran.stdout.splitlines()] == [
        "token table",
        "mover",
        "copy stream",
    ]


def test_an_error_survives_pickling_and_says_everything_in_a_few_lines() -> None:
    error = ConformanceError("I2", "slot 3 twice", ("table = factory(2)",), "check(...)")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error).splitlines() == [
        "law I2, unique mapping: slot 3 twice",
        "the shortest history found:",
        "    table = factory(2)",
        "again: check(...)",
    ]


def test_a_shortest_history_keeps_what_fails_and_stops_at_its_bound() -> None:
    def fails(numbers: Sequence[int]) -> bool:
        return sum(numbers) >= 20

    def smaller(number: int) -> range:
        return range(number)

    left = shortest(range(10), fails, simpler=smaller, most_runs=10_000)
    assert (len(left), sum(left)) == (3, 20)
    runs: list[int] = []
    shortest(range(100), lambda _: bool(runs.append(1)), most_runs=7)
    assert len(runs) == 7


EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "conformance.md").read_text("utf-8"), re.M | re.S
)


@pytest.mark.parametrize("example", EXAMPLES, ids=["table", "mover", "stream"])
def test_the_examples_of_the_document_run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "docs/conformance.md", "exec"), {"__name__": "example"})
    assert "histories" in capsys.readouterr().out
