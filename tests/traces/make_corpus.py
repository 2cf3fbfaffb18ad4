"""Makes the corpus anew, after a change of the trace's schema: `python -m traces.make_corpus`, in
`tests/`. Each file is the smallest found for one seeded fault, or a trace of a healthy run."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

from mutants.catalogue import WALKED

from support.mutation import Mutant, applied, mutant
from vtoken.errors import Rejected
from vtoken.testing.fuzz import fuzz_core
from vtoken.testing.report import Finding
from vtoken.testing.script import shrink_script, write_script
from vtoken.testing.walk import act, drawn_engine
from vtoken.trace import Header, replay, shrink, write_trace
from vtoken.trace.replay import load
from vtoken.trace.shrink import law_of

HERE = Path(__file__).parent

FAULTS = (
    *WALKED,
    mutant(
        "commit cuts the end back into a block that the prefix cache can hit",
        "vtoken.core.in_flight:PlansInFlight._land",
        "self._commit(table, ids",
        "used = np.flatnonzero(table.block_live[keep])\n"
        "    inside = table.live_mask(keep[used[-1] : used[-1] + 1])[0]\n"
        "    end = int(used[-1]) * size + int(np.flatnonzero(inside)[-1]) + 1\n"
        "    self._commit(table, ids",
        "L7 L8 I2 bytes",
    ),
)
"""The last one was a real one: found by the campaign, cured by leaving the physical end alone."""


def finding(fault: Mutant) -> Finding | None:
    with applied(fault):
        for seed in range(2):
            if found := fuzz_core(seconds=10, seed=seed).findings:
                return found[0]
    return None


def keep(fault: Mutant, taken: dict[str, int]) -> str:
    """Write the fault's file, unless its law has enough of them; says what was done."""
    found = finding(fault)
    if found is None or found.header is None or found.made is None:
        return "not found"
    name = file_name(fault)
    try:
        records = shrink(found.header, found.records)
    except Rejected:
        with applied(fault):
            calls = shrink_script(found.made, found.script, found.law)
        if taken.setdefault(f"script {found.law}", 0) >= 2:
            return "enough scripts"
        taken[f"script {found.law}"] += 1
        made = found.made
        write_script(HERE / f"{name}.script.json", made, calls, law=found.law, message=fault.name)
        return f"script of {len(calls)} calls, law {found.law}"
    law = law_of(found.header, records)
    if taken.setdefault(f"trace {law}", 0) >= 3:
        return "enough traces"
    taken[f"trace {law}"] += 1
    header = Header(found.header.block_size, found.header.num_blocks, {}, partial=True)
    write_trace(HERE / f"{name}.ndjson", header, records)
    return f"trace of {len(records)} records, law {law}"


def healthy() -> None:
    """Accepted traces: the core with plans in flight, and vLLM serving three policies with chunked
    prefills, shared prefixes, aborts and a pool that runs out."""
    for seed, size in ((3, 4), (11, 2)):
        rng = random.Random(seed)
        engine = drawn_engine(rng, mode="background", block_size=size, ample=False, recorded=True)
        names: Counter[str] = Counter()
        for _ in range(60):
            act(engine, rng, names=names)
            engine.step(cap=rng.choice([1, size, 99]))
        header = Header(size, engine.pool.num_blocks, {})
        write_trace(HERE / f"core-background-{size}.ndjson", header, engine.records)
    from engine.test_trace import record

    from support.engines import engine_on

    for policy, mode in (
        ("streaming-llm", "eager"),
        ("sliding-window", "off"),
        ("random", "eager"),
    ):
        file = HERE / f"vllm-{policy}-{mode}.ndjson"
        record(engine_on("tiny"), file, policy, mode)
        header, records = load(file)  # without what the run was, which names its own file
        write_trace(file, Header(header.block_size, header.num_blocks, {}), records)


HEALTHY = {
    "core-background-4.ndjson": "the core with plans in flight, blocks of 4",
    "core-background-2.ndjson": "the core with plans in flight, blocks of 2",
    "vllm-streaming-llm-eager.ndjson": "vLLM serving, StreamingLLM, eager; chunked, aborts",
    "vllm-sliding-window-off.ndjson": "vLLM serving, sliding window, off; chunked, aborts",
    "vllm-random-eager.ndjson": "vLLM serving, random, eager; chunked, aborts",
}
INTRODUCTION = """# Kept traces and scripts

A trace (`.ndjson`) is what happened; `vtoken replay` holds it to the spec. A script
(`.script.json`) is what was asked of the engine without a model; `vtoken fuzz --script` runs it.
Most are the smallest found for one seeded fault, whose name is the note: the trace diverges with
the law given here; the script passes, and fails with that law when the fault is seeded. The others
are healthy. `test_corpus.py` holds all of them to this table, and `make_corpus.py` makes them anew.

| file | what | gives |
| --- | --- | --- |
"""


def write_table() -> None:
    """README.md, from the files that are there."""
    names = {file_name(fault): fault.name for fault in FAULTS}
    rows = []
    for file in sorted(HERE.glob("*.ndjson")):
        found = replay(file).divergence
        gives = "accepted" if found is None else f"{found.law} at line {found.line}"
        rows.append((file.name, HEALTHY.get(file.name) or names[file.stem], gives))
    for file in sorted(HERE.glob("*.script.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        rows.append((file.name, values["message"], values["law"]))
    lines = [f"| `{name}` | {note} | {gives} |" for name, note, gives in rows]
    (HERE / "README.md").write_text(INTRODUCTION + "\n".join(lines) + "\n", encoding="utf-8")


def file_name(fault: Mutant) -> str:
    return re.sub(r"[^a-z0-9]+", "-", fault.name.lower()).strip("-")


def main() -> None:
    for old in (*HERE.glob("*.ndjson"), *HERE.glob("*.script.json")):
        old.unlink()
    healthy()
    taken: dict[str, int] = {}
    for fault in FAULTS:
        try:
            print(f"{fault.name}: {keep(fault, taken)}", flush=True)
        except LookupError as error:
            print(f"mend the catalogue: {error}", flush=True)
    write_table()


if __name__ == "__main__":
    sys.exit(main())
