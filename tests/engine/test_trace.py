"""A trace of real serving is accepted by the unchanged spec, and a corrupted one is not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from support.engines import Engine
from vtoken.trace import replay

pytestmark = pytest.mark.engine


def record(engine: Engine, file: Path, policy: str, mode: str) -> None:
    """Chunked prefills, a shared prefix, aborts, a pool that runs out."""
    rng = np.random.default_rng(11)
    shared = rng.integers(3, 259, 64).tolist()
    prompts = [rng.integers(3, 259, n).tolist() for n in (150, 40, 210)]
    prompts += [shared + rng.integers(3, 259, n).tolist() for n in (9, 30, 70)]
    engine.configure(policy=policy, budget=48, reclaim=mode, checks=1, trace=str(file))
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, 60)
    for _ in range(25):
        engine.step(outputs)
    engine.llm.llm_engine.abort_request(["1", "3"])
    engine.drain()
    engine.configure(checks=1)  # closes the trace


@pytest.fixture(scope="module")
def traces(shared_tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    files = {}
    for policy in ("streaming-llm", "sliding-window", "random"):
        for mode in ("eager", "off"):
            files[f"{policy} {mode}"] = folder / f"{policy}-{mode}.ndjson"
            record(shared_tiny, files[f"{policy} {mode}"], policy, mode)
    return files


def test_the_spec_accepts_traces_of_real_serving(traces: dict[str, Path]) -> None:
    events: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for file in traces.values():
        result = replay(file)
        assert result.divergence is None, result.divergence
        assert result.length > 200
        events += result.events
        kinds += result.kinds
    expected = {"append", "recycle", "evict", "move", "release", "finish", "preempt"}
    assert events.keys() == expected
    assert kinds.keys() >= {
        *("Allocate", "Hit", "Append", "Recycle", "Attend", "Evict", "MoveTokens", "Release"),
        *("Cache", "Uncache", "Finish", "Preempt", "Resume"),
    }


def test_a_trace_holds_no_token_values(traces: dict[str, Path]) -> None:
    names = set()
    for line in traces["random eager"].read_text().splitlines()[1:-1]:
        names |= json.loads(line).keys()
    assert names <= {
        "event", "req", "slots", "tokens", "sources", "targets", "blocks", "order",
        "cached", "uncached", "adopted", "post", "reads",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["recycle", "move", "append", "evict"])
def test_a_corrupted_event_is_named_by_its_line(
    traces: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    lines = traces["random eager"].read_text().splitlines()
    number = [i for i, x in enumerate(lines) if f'"event":"{kind}"' in x][-1]
    value = json.loads(lines[number])
    if kind == "move":
        value["targets"][0][0] += 1 if value.get("targets") else 0
    elif kind == "evict":
        value["tokens"][0][0] = 0 if value["tokens"][0][0] else 1
        value["tokens"][0][1] = 1
    else:
        value["slots"][0][0] += 1
    lines[number] = json.dumps(value)
    broken = tmp_path / "broken.ndjson"
    broken.write_text("\n".join(lines) + "\n")
    divergence = replay(broken).divergence
    assert divergence is not None
    assert divergence.line == number + 1, divergence
