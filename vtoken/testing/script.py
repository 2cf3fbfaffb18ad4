"""An episode as data: how the engine was made and what was asked of it, so that a failure which
no trace shows (wrong bytes, a race of streams) is a small file that runs again.

The spec judges a trace; a script drives the implementation. Calls that make no sense any more
after others were removed (a request that is not running) are left out when a script runs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtoken.core import BackgroundParams, ReclaimMode
from vtoken.errors import InvariantViolation, Rejected
from vtoken.testing.device import STRATEGIES, SimulatedDevice, Strategy
from vtoken.testing.harness import ByteFault, FakeEngine
from vtoken.testing.pool import PoolFault
from vtoken.trace.shrink import minimal

FORMAT = 1

Call = list[Any]
"""A method of `FakeEngine` and its arguments: `["evict", "r1", [3, 4]]`."""


@dataclass(frozen=True)
class EngineSpec:
    """How a `FakeEngine` is made; see there. `strategy` is the device's, None for no device."""

    mode: str
    block_size: int
    num_blocks: int
    transposed: bool = False
    level: int = 3
    background: BackgroundParams | None = None
    strategy: Strategy | None = None
    device_seed: int = 0
    lag: int = 1

    @classmethod
    def drawn(
        cls,
        rng: random.Random,
        *,
        mode: ReclaimMode | str,
        block_size: int,
        num_blocks: int,
        level: int = 3,
    ) -> EngineSpec:
        """Layout, and in the background mode parameters, adversary and lag, at random."""
        transposed, lag = rng.random() < 0.5, rng.choice([1, 1, 2, 5])
        if mode != ReclaimMode.BACKGROUND:
            return cls(str(mode), block_size, num_blocks, transposed, level)
        copy_out = rng.random() < 0.5  # which alone has use for headroom
        params = BackgroundParams(
            threshold=rng.choice([0.01, 0.2, 0.5]),
            headroom=rng.choice([1, 2, 3] if copy_out else [0, 0, 0, 1]),
            copy_budget=rng.choice([block_size, 3 * block_size, 1 << 20]),
            moves_per_plan=rng.choice([block_size, 4 * block_size, 1 << 20]),
            commit_delay=rng.choice([0, 1, 1, 2, 3, 8]),
            copy_out=copy_out,
        )
        strategy, seed = rng.choice(STRATEGIES), rng.getrandbits(32)
        made = (str(mode), block_size, num_blocks, transposed, level)
        return cls(*made, params, strategy, seed, lag)

    def build(self, engine: type[FakeEngine] = FakeEngine, *, recorded: bool = False) -> FakeEngine:
        device = None
        if self.strategy is not None:
            device = SimulatedDevice(self.strategy, seed=self.device_seed)
        return engine(
            mode=self.mode,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            level=self.level,
            transposed=self.transposed,
            recorded=recorded,
            background=self.background,
            device=device,
            lag=self.lag,
        )


class ScriptedEngine(FakeEngine):
    """A `FakeEngine` that writes down what is asked of it.

    Attributes:
        script: the calls so far, the one under way included.
    """

    def __init__(self, **made: Any) -> None:
        super().__init__(**made)
        self.script: list[Call] = []
        self._inside = False

    def add(self, req_id: str, *, prompt_len: int, family: int = 0) -> None:
        self.script.append(["add", req_id, prompt_len, family])
        super().add(req_id, prompt_len=prompt_len, family=family)

    def evict(self, req_id: str, token_ids: Iterable[int]) -> None:
        tokens = [int(token) for token in token_ids]
        self.script.append(["evict", req_id, tokens])
        super().evict(req_id, tokens)

    def grow(self, req_id: str, count: int) -> None:
        self.script.append(["grow", req_id, count])
        super().grow(req_id, count)

    def finish(self, req_id: str) -> None:
        self.script.append(["finish", req_id])
        super().finish(req_id)

    def preempt(self, req_id: str) -> None:
        if not self._inside:
            self.script.append(["preempt", req_id])
        super().preempt(req_id)

    def step(self, *, skip: Iterable[str] = (), cap: int = 1_000_000) -> dict[str, int]:
        left_out = list(skip)
        self.script.append(["step", left_out, cap])
        self._inside = True
        try:
            return super().step(skip=left_out, cap=cap)
        finally:
            self._inside = False

    def verify(self) -> None:
        self.script.append(["verify"])
        super().verify()


def what_broke(action: Callable[[], None]) -> tuple[str, str] | None:
    """Run it; (law, message) of what it raised: a law's id for a violation, "bytes" or "pool" where
    the harness itself saw it, "crash" for any other error."""
    try:
        action()
    except InvariantViolation as violation:
        return violation.law, violation.message
    except PoolFault as fault:
        return "pool", str(fault)
    except ByteFault as fault:
        return "bytes", str(fault)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return None


def run_script(engine: FakeEngine, script: Sequence[Call]) -> tuple[str, str] | None:
    """Run the calls, then verify everything; (law, message) of the first failure, or None."""

    def run() -> None:
        for name, *arguments in script:
            _call(engine, name, arguments)
        engine.verify()
        engine.executor.drain()

    return what_broke(run)


def _call(engine: FakeEngine, name: str, arguments: Sequence[Any]) -> None:
    running = {request.req_id for request in engine.running}
    if name == "step":
        engine.step(skip=[req for req in arguments[0] if req in running], cap=arguments[1])
    elif name == "verify":
        engine.verify()
    elif name == "add":
        if arguments[0] not in running | {request.req_id for request in engine.waiting}:
            engine.add(arguments[0], prompt_len=arguments[1], family=arguments[2])
    elif name == "evict":
        known = arguments[0] in running and arguments[0] in engine.reclaimer.tables
        free_to_go = set(engine.evictable(arguments[0])) if known else set()
        if victims := [token for token in arguments[1] if token in free_to_go]:
            engine.evict(arguments[0], victims)
    elif arguments[0] in running:
        getattr(engine, name)(*arguments)


def shrink_script(
    made: EngineSpec,
    script: Sequence[Call],
    law: str,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    most_runs: int = 600,
) -> list[Call]:
    """A shorter script that breaks the same law; the script itself, if it does not break it.

    Args:
        on_progress: called with (calls left, runs so far).
        most_runs: where to stop, since each run may take a tenth of a second.
    """

    def fails(candidate: Sequence[Call]) -> bool:
        found = run_script(made.build(), candidate)
        return found is not None and found[0] == law

    if not fails(script):
        return list(script)
    return minimal(script, fails, on_progress=on_progress, most_runs=most_runs)


def write_script(
    file: Path, made: EngineSpec, script: Sequence[Call], *, law: str, message: str
) -> None:
    values = {
        "vtoken_script": FORMAT,
        "law": law,
        "message": message,
        "engine": asdict(made),
        "script": list(script),
    }
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_script(file: Path) -> tuple[EngineSpec, list[Call]]:
    """Raises Rejected for what is not a script, with what is wrong in one line."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise Rejected(f"script {file} is larger than {MOST_BYTES} bytes")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Rejected(f"cannot read script {file}: {error}") from error
    if not isinstance(values, dict) or values.get("vtoken_script") != FORMAT:
        raise Rejected(f"{file} is not a script of vtoken fuzz in format {FORMAT}")
    try:
        made = _engine_of(dict(values["engine"]))
        script = [list(call) for call in values["script"]]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Rejected(f"{file} does not say how its engine is made ({error!r})") from error
    for number, call in enumerate(script, start=1):
        if not _is_call(call):
            raise Rejected(f"{file}: call {number} is not one of a script: {str(call)[:80]}")
    return made, script


MOST_BYTES = 16 << 20
_NUMBERS = {"block_size": (1, 4096), "num_blocks": (2, 1 << 16), "level": (0, 3), "lag": (1, 1000)}


def _engine_of(made: dict[str, Any]) -> EngineSpec:
    """Raises TypeError, KeyError or ValueError for what no engine can be made of."""
    ReclaimMode(made["mode"])
    if made["strategy"] is not None and made["strategy"] not in STRATEGIES:
        raise ValueError(f"strategy {made['strategy']!r}")
    for name, (least, most) in _NUMBERS.items():
        if type(made[name]) is not int or not least <= made[name] <= most:
            raise ValueError(f"{name} {made[name]!r}")
    if type(made["transposed"]) is not bool or type(made["device_seed"]) is not int:
        raise ValueError("transposed or device_seed")
    if made["background"] is not None:
        made["background"] = BackgroundParams(**made["background"])
        made["background"].check(block_size=made["block_size"])
    return EngineSpec(**made)


def _is_call(call: Call) -> bool:
    def count(value: object, least: int = 0) -> bool:
        return type(value) is int and least <= value <= 1 << 30

    match call:
        case ["add", str(), prompt_len, family]:
            return count(prompt_len, 1) and count(family)
        case ["evict", str(), list(tokens)]:
            return all(count(token) for token in tokens)
        case ["grow", str(), number]:
            return count(number, 1)
        case ["finish" | "preempt", str()]:
            return True
        case ["step", list(skip), cap]:
            return all(isinstance(req_id, str) for req_id in skip) and count(cap, 1)
        case ["verify"]:
            return True
        case _:
            return False
