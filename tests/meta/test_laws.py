"""Every law has a statement, a predicate, a property test, an online level and a seeded fault, or
a reason why not; a row that no longer fits the project fails."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutants.catalogue import ALL

import vtoken_spec as spec

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """Where one law stands.

    Attributes:
        test: `file::function` of a property test that evaluates it on many states.
        online: `file` in which it is evaluated while serving, at the level named in its docstring.
        fault: name of a seeded fault that this law may catch.
        missing: why there is none of these; then the others are empty.
    """

    test: str = ""
    online: str = ""
    fault: str = ""
    missing: str = ""


_WALKS = "tests/property/test_core_against_model.py::test_long_walks_keep_every_law_and_every_byte"
_ONLINE, _WORKER = "vtoken/checks/online.py", "vtoken/checks/worker.py"
_FOLLOWER = "vtoken/checks/follower.py"

ROWS = {
    "I1": Row(_WALKS, _WORKER, "mover drops the last token of a plan"),
    "I2": Row(_WALKS, _ONLINE, "recycled hole keeps its dead token"),
    "I3": Row(missing="copies are done before the step that commits them; none is in flight"),
    "I4": Row(_WALKS, _ONLINE, "stale version in the plan"),
    "L5": Row(_WALKS, _ONLINE, "a block is given back twice"),
    "L6": Row(_WALKS, _WORKER, "rows with holes are given as dense"),
    "L7": Row(_WALKS, _ONLINE, "steady recycling forgets the prefix cache"),
    "L8": Row(_WALKS, _FOLLOWER, "written before it leaves the prefix cache"),
    "L9": Row(
        "tests/property/test_core_against_model.py::"
        "test_modes_show_attention_the_same_tokens_and_bytes",
        missing="a law of two runs: nothing to evaluate in one, and no fault is its alone",
    ),
    "L10": Row(missing="nothing is deferred, so no progress has to be awaited"),
    "L11": Row(missing="blocks are freed in step order, behind every copy out of them"),
}


def test_the_table_has_exactly_the_laws() -> None:
    assert list(ROWS) == list(spec.LAWS)


@pytest.mark.parametrize("law", ROWS)
def test_a_law_is_stated_and_has_a_predicate_or_a_reason(law: str) -> None:
    text = (ROOT / "spec" / "LAWS.md").read_text(encoding="utf-8")
    assert re.search(rf"^\*\*{law} ", text, re.MULTILINE), "no statement"
    if spec.LAWS[law].predicate is None:
        assert ROWS[law].missing
        assert not ROWS[law].test


@pytest.mark.parametrize("law", [law for law, row in ROWS.items() if row.test])
def test_the_property_test_exists(law: str) -> None:
    file, _, name = ROWS[law].test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in names


@pytest.mark.parametrize("law", [law for law, row in ROWS.items() if row.online])
def test_the_law_is_evaluated_while_serving(law: str) -> None:
    text = (ROOT / ROWS[law].online).read_text(encoding="utf-8")
    assert f'"{law}"' in text


@pytest.mark.parametrize("law", [law for law, row in ROWS.items() if row.fault])
def test_a_seeded_fault_may_be_caught_by_the_law(law: str) -> None:
    found = [fault for fault in ALL if fault.name == ROWS[law].fault]
    assert found, "the fault is no longer in the catalogue"
    assert law in found[0].laws


def test_a_law_without_a_row_s_evidence_says_why() -> None:
    for law, row in ROWS.items():
        assert row.missing or (row.test and row.online and row.fault), law
