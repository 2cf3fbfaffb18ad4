"""Every fault of the catalogue is caught, by a check that it names, within seconds.

The hunt is the seeded walk of `tests/property/test_core_against_model.py` at check level 3, in
both modes, over several block sizes, with pools that run out and pools that do not. Set
VTOKEN_MUTANTS_REPORT to a file name to have a table of who caught what written there.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mutants.catalogue import ALL, CHECKS, WALKED
from support.mutation import Mutant, applied
from vtoken.errors import InvariantViolation, Rejected
from vtoken.kv import payload_digests
from vtoken.testing.harness import FakeEngine
from vtoken.testing.pool import PoolFault
from vtoken.testing.walk import act, pool_blocks

SECONDS = 60.0
FOUND: dict[str, tuple[str, float]] = {}


def hunt() -> tuple[str, float]:
    """Walk until something is caught: (what caught it, seconds); ("nothing", s) if nothing is."""
    start = time.monotonic()
    for seed in range(10_000):
        rng = random.Random(seed)
        size = (4, 2, 16, 1)[seed % 4]
        mode = "off" if seed % 8 >= 6 else "eager"
        ample = seed % 3 == 0
        engine = FakeEngine(
            mode=mode,
            block_size=size,
            num_blocks=pool_blocks(size, ample=ample),
            transposed=seed % 2 == 1,
        )
        names: Counter[str] = Counter()
        for _ in range(40):
            try:
                act(engine, rng, names=names)
                skip = [r.req_id for r in engine.running if rng.random() < 0.15]
                engine.step(skip=skip, cap=rng.choice([1, size, size + 1, 99]))
                engine.verify()
            except InvariantViolation as violation:
                return violation.law, time.monotonic() - start
            except PoolFault:
                return "pool", time.monotonic() - start
            except AssertionError:
                return "bytes", time.monotonic() - start
            except Rejected:
                return "contract", time.monotonic() - start
            except Exception:
                return "crash", time.monotonic() - start
        if time.monotonic() - start > SECONDS:
            break
    return "nothing", time.monotonic() - start


def test_the_unharmed_implementation_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: otherwise every mutant would count as killed."""
    monkeypatch.setattr("mutants.test_mutants.SECONDS", 4.0)
    assert hunt()[0] == "nothing"


@pytest.mark.parametrize("fault", WALKED, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_caught(fault: Mutant) -> None:
    with applied(fault):
        caught, seconds = hunt()
    FOUND[fault.name] = (caught, seconds)
    allowed = fault.laws | ({"pool"} if "L5" in fault.laws else set())
    assert caught in allowed, f"caught by {caught} after {seconds:.1f} s"


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
    FOUND[fault.name] = (caught, 0.0)
    assert caught in fault.laws
    assert len(set(payload_digests(payload))) == 2


def test_the_catalogue_is_large_and_names_are_unique() -> None:
    assert len(ALL) >= 40
    assert len({fault.name for fault in ALL}) == len(ALL)


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    yield
    file = os.environ.get("VTOKEN_MUTANTS_REPORT")
    if not file or not FOUND:
        return
    lines = ["| seeded fault | caught by | seconds |", "| --- | --- | --- |"]
    lines += [f"| {name} | {law} | {took:.2f} |" for name, (law, took) in FOUND.items()]
    median = statistics.median(took for _, took in FOUND.values())
    lines.append(f"\n{len(FOUND)} faults, median {median:.2f} s.")
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
