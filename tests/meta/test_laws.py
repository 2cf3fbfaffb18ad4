"""Every law has a statement, a predicate, a property test, an online level, a seeded fault that it
catches by its own name and a contract for symbolic execution, or a reason why not; a row that no
longer fits the project fails, and so does a reason that has become wrong."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mutants.catalogue import ALL, TRIPS

import vtoken_spec as spec
from vtoken_spec.explore import state_faults, transition_faults

ROOT = Path(__file__).resolve().parents[2]
CROSSHAIR = ROOT / "tests" / "crosshair"
CHECKS = ROOT / "vtoken" / "checks"


@dataclass(frozen=True)
class Row:
    """Where one law stands.

    Attributes:
        test: `file::function` of a property test that evaluates it on many states.
        online: `file` in which it is evaluated while serving, at the level named in its docstring.
        contract: `file::function` in tests/crosshair of a contract that judges it.
        exempt: why there is none of these, by column; then the column is empty.

    The seeded fault is in `mutants.catalogue.TRIPS`; that the law is the one that catches it, and
    in which hunt, is tested in tests/mutants.
    """

    test: str
    online: str = ""
    contract: str = ""
    exempt: Mapping[str, str] = field(default_factory=dict)


_WALKS = "tests/property/test_core_against_model.py::test_long_walks_keep_every_law_and_every_byte"
_PAIRS = (
    "tests/property/test_core_against_model.py::test_modes_show_attention_the_same_tokens_and_bytes"
)
_ONLINE, _WORKER = "vtoken/checks/online.py", "vtoken/checks/worker.py"
_FOLLOWER = "vtoken/checks/follower.py"

ROWS = {
    "I1": Row(_WALKS, _WORKER, "contracts.py::move"),
    "I2": Row(_WALKS, _ONLINE, "contracts.py::recycle"),
    "I3": Row(_WALKS, _FOLLOWER, "flying.py::attend_in_flight"),
    "I4": Row(_WALKS, _ONLINE, "contracts.py::move_of_version"),
    "L5": Row(_WALKS, _ONLINE, "contracts.py::release"),
    "L6": Row(_WALKS, _WORKER, "contracts.py::attend"),
    "L7": Row(_WALKS, _ONLINE, "contracts.py::append"),
    "L8": Row(_WALKS, _FOLLOWER, "contracts.py::recycle_beside_cached"),
    "L9": Row(
        _PAIRS,
        exempt={
            "online": "a law of two runs; an engine that serves is one",
            "contract": "a law of two runs; a contract is about one step",
        },
    ),
    "L10": Row(
        _WALKS,
        _ONLINE,
        exempt={"contract": "a law of many steps; a contract is about one, and the model no clock"},
    ),
    "L11": Row(_WALKS, _ONLINE, "flying.py::finish_in_flight"),
}
COLUMNS = ("test", "online", "contract")


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def given(column: str) -> list[str]:
    return [law for law, row in ROWS.items() if getattr(row, column)]


def predicate(law: str) -> str:
    return spec.LAWS[law].predicate.__name__


def test_the_table_has_exactly_the_laws() -> None:
    assert list(ROWS) == list(spec.LAWS) == list(TRIPS)


@pytest.mark.parametrize("law", ROWS)
def test_a_law_is_stated_and_its_predicate_is_named_beside_it(law: str) -> None:
    text = (ROOT / "spec" / "LAWS.md").read_text(encoding="utf-8")
    assert re.search(rf"^\*\*{law} ", text, re.MULTILINE), "no statement"
    assert re.search(rf"^\| {law} \|.*:{predicate(law)}`", text, re.MULTILINE), "no predicate"


@pytest.mark.parametrize("law", ROWS)
def test_each_column_has_an_entry_or_a_reason_and_not_both(law: str) -> None:
    row = ROWS[law]
    assert set(row.exempt) <= set(COLUMNS)
    for column in COLUMNS:
        assert bool(getattr(row, column)) != bool(row.exempt.get(column)), column


@pytest.mark.parametrize("law", given("test"))
def test_the_property_test_exists(law: str) -> None:
    file, _, name = ROWS[law].test.partition("::")
    assert name in functions(ROOT / file)


@pytest.mark.parametrize("law", given("online"))
def test_the_law_is_evaluated_while_serving(law: str) -> None:
    assert f'"{law}"' in (ROOT / ROWS[law].online).read_text(encoding="utf-8")


@pytest.mark.parametrize("law", TRIPS)
def test_a_seeded_fault_may_be_caught_by_the_law(law: str) -> None:
    found = [fault for fault in ALL if fault.name == TRIPS[law][0]]
    assert found, "the fault is no longer in the catalogue"
    assert law in found[0].laws


@pytest.mark.parametrize("law", given("contract"))
def test_the_contract_exists_and_is_confirmed(law: str) -> None:
    file, _, name = ROWS[law].contract.partition("::")
    assert name in functions(CROSSHAIR / file)
    expected = json.loads((CROSSHAIR / "expectations.json").read_text(encoding="utf-8"))
    assert expected[file].get(name) == "confirmed"


@pytest.mark.parametrize("law", [law for law in ROWS if ROWS[law].contract])
def test_contracts_judge_the_law(law: str) -> None:
    """Claim: what the contracts call (`is_right`) evaluates the law's predicate."""
    judged = inspect.getsource(state_faults) + inspect.getsource(transition_faults)
    assert predicate(law) in judged


@pytest.mark.parametrize("law", [law for law in ROWS if ROWS[law].exempt])
def test_a_reason_is_given_only_for_what_is_not_there(law: str) -> None:
    """Claim: no check online and no contract names the predicate of a law that is exempt."""
    if "online" in ROWS[law].exempt:
        for file in CHECKS.glob("*.py"):
            text = file.read_text(encoding="utf-8")
            assert f'"{law}"' not in text, file.name
            assert predicate(law) not in text, file.name
    if "contract" in ROWS[law].exempt:
        judged = inspect.getsource(state_faults) + inspect.getsource(transition_faults)
        texts = [file.read_text(encoding="utf-8") for file in CROSSHAIR.glob("*.py")]
        assert not any(predicate(law) in text for text in [judged, *texts])
