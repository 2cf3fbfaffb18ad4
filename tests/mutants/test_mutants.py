"""Every fault of the catalogue is caught, by a check that it names, within a minute; and every law
is the one that catches some fault.

`hunts.py` says how faults are hunted. Set VTOKEN_MUTANTS_REPORT to a file name to have a table of
who caught what written there.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vtoken_spec as spec
from mutants.catalogue import ALL, CHECKS, FLIGHT, TRIPS, WALKED
from mutants.hunts import HUNTS, hunt
from support.mutation import Mutant, applied, mutant
from vtoken.kv import payload_digests

FOUND: dict[tuple[str, str], tuple[str, float]] = {}
BY_NAME = {fault.name: fault for fault in ALL}


def found(fault: Mutant, how: str = "") -> str:
    """What caught the fault; hunted once."""
    key = fault.name, how or fault.hunt
    if key not in FOUND:
        with applied(fault):
            FOUND[key] = hunt(fault, how=how)
    return FOUND[key][0]


@pytest.mark.parametrize("how", HUNTS)
def test_the_unharmed_implementation_is_not_caught(how: str) -> None:
    """Control: otherwise every mutant would count as killed."""
    modes = ("eager", "off", "background", "background")
    none = mutant("none", "", "", "", "", hunt=how, modes=modes)
    assert hunt(none, seconds=4.0)[0] == "nothing"


@pytest.mark.parametrize("fault", WALKED, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_caught(fault: Mutant) -> None:
    caught = found(fault)
    allowed = fault.laws | ({"pool"} if "L5" in fault.laws else set())
    assert caught in allowed, f"caught by {caught}"


@pytest.mark.parametrize("law", spec.LAWS)
def test_a_law_catches_a_fault_by_its_own_name(law: str) -> None:
    """Claim: no law is dead. Where others would see the fault first, the law looks alone."""
    name, how = TRIPS[law]
    assert law in BY_NAME[name].laws
    assert found(BY_NAME[name], how) == law


@pytest.mark.parametrize("fault", CHECKS, ids=lambda fault: fault.name)
def test_a_blunted_digest_is_noticed(fault: Mutant) -> None:
    """Digests of payloads that differ in one number, in each layer and in K and V."""
    with applied(fault):
        caught = "nothing"
        from vtoken.kv import digests

        for layer in range(2):
            for half in range(2):
                payload = torch.zeros((2, 2, 2, 2, 4))
                payload[1, layer, half, 1, 3] = 1.0
                first, second = digests.payload_digests(payload)
                if first == second:
                    caught = "digest"
    FOUND[fault.name, "digests"] = (caught, 0.0)
    assert caught in fault.laws
    assert len(set(payload_digests(payload))) == 2


def test_the_catalogue_is_large_and_names_are_unique() -> None:
    assert len(ALL) >= 70
    assert len(FLIGHT) >= 20
    assert len(BY_NAME) == len(ALL)


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    yield
    file = os.environ.get("VTOKEN_MUTANTS_REPORT")
    if not file or not FOUND:
        return
    lines = ["| seeded fault | hunt | caught by | seconds |", "| --- | --- | --- | --- |"]
    for (name, how), (law, took) in FOUND.items():
        lines.append(f"| {name} | {how} | {law} | {took:.2f} |")
    median = statistics.median(took for _, took in FOUND.values())
    lines.append(f"\n{len(FOUND)} hunts, median {median:.2f} s.")
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
