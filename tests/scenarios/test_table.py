"""README.md's table of scenarios says what the tests say."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
ROW = re.compile(r"\| (S\d\d) \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|")
TEST = re.compile(r"`([\w./]+\.py)::(test_\w+)`")
LATER = "comes with"


@dataclass(frozen=True)
class Row:
    """One scenario: where it can be tried, its tests as (file, function), what is tested."""

    where: str
    tests: tuple[tuple[str, str], ...]
    status: str


@cache
def table() -> tuple[tuple[str, Row], ...]:
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    found = [ROW.fullmatch(line) for line in lines if line.startswith("| S")]
    assert all(found), "every row has an id, a scenario, where, its tests and a status"
    return tuple((row[1], Row(row[2], tuple(TEST.findall(row[3])), row[4])) for row in found if row)


@cache
def functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_each_scenario_has_one_row() -> None:
    assert [name for name, _ in table()] == [f"S{number:02}" for number in range(1, 29)]


def test_every_test_that_a_row_names_exists() -> None:
    missing = [
        f"{name}: {file}::{test}"
        for name, row in table()
        for file, test in row.tests
        if not (FOLDER / file).is_file() or test not in functions(FOLDER / file)
    ]
    assert missing == []


def test_every_test_that_carries_an_id_is_in_its_row() -> None:
    rows = dict(table())
    left_out = [
        f"{name}: {file.name}::{test}"
        for file in sorted(FOLDER.glob("test_*.py"))
        for test in functions(file)
        for name in (f"S{number}" for number in re.findall(r"(?<=_)s(\d\d)(?=_)", test))
        if test.startswith("test_") and (file.name, test) not in rows[name].tests
    ]
    assert left_out == []


def test_a_row_is_tested_or_says_what_it_comes_with() -> None:
    for name, row in table():
        assert set(row.where.split(", ")) <= {"core", "engine"}, name
        assert row.status.startswith("tested" if row.tests else LATER), name
