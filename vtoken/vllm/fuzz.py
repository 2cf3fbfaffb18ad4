"""The fuzzing campaign on a real vLLM engine with the random tiny model, in this process.

Each episode draws a policy with its options, a budget, protected tokens, a way of looking at
attention, and a mode, then lets requests arrive, some with a policy or options of their own, be
aborted and be preempted at random in a pool that is nearly always full, at check level 3 with the
spec in lock step; after it, every request has ended, no policy has failed, and every block must be
free.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.models import ensure_tiny_llama
from vtoken.testing.report import Finding, FuzzReport
from vtoken.trace.format import Header
from vtoken.trace.replay import load
from vtoken.vllm.session import Session

POOL_BLOCKS, BLOCK, CHUNK, LONGEST = 24, 32, 96, 512
EPISODE_STEPS = 120
POLICIES = ("streaming-llm", "sliding-window", "random", "h2o", "scissorhands", "fastgen")
_STALL_STEPS = 2_000


def fuzz_engine(
    *,
    seconds: float,
    seed: int,
    first_episode: int = 0,
    on_step: Callable[[FuzzReport], None] | None = None,
) -> FuzzReport:
    """Run episodes until time is up or one finds a violation, a leak or a stall.

    The start of the engine does not count towards `seconds`.
    """
    session = Session(
        ensure_tiny_llama(),
        VTokenConfig(),
        enforce_eager=True,
        max_model_len=LONGEST,
        num_gpu_blocks_override=POOL_BLOCKS,
        kv_cache_memory_bytes=1 << 28,
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=16,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    report = FuzzReport("engine", seed)
    report.begin()
    with TemporaryDirectory(prefix="vtoken-fuzz-") as folder:
        file = Path(folder) / "episode.ndjson"
        while report.tick() < seconds and not report.findings:
            number = first_episode + report.episodes
            rng = random.Random(f"{seed}/{number}")
            found = _episode(session, rng, file, report, on_step)
            report.episodes += 1
            report.tick()
            if found is not None:
                header, records = _recorded(session, file)
                report.findings.append(Finding(*found, seed, number, header, records))
    return report


def _episode(
    session: Session,
    rng: random.Random,
    file: Path,
    report: FuzzReport,
    on_step: Callable[[FuzzReport], None] | None,
) -> tuple[str, str] | None:
    """One episode; (law, message) of what it found."""
    engine, scheduler = session.llm.llm_engine, session.scheduler
    settings = _settings(rng, file)
    session.reconfigure(settings)
    shared = _prompt(rng, rng.randint(0, 100))
    alive: list[str] = []
    counts: Counter[str] = Counter()
    try:
        steps = 0
        while steps < EPISODE_STEPS or engine.has_unfinished_requests():
            arriving = steps < EPISODE_STEPS
            if arriving and len(alive) < 14 and rng.random() < 0.4:
                counts["add"] += 1
                name = f"{report.episodes}.{counts['add']}"
                prompt = (shared if rng.random() < 0.5 else []) + _prompt(rng, rng.randint(1, 200))
                own = _asked(rng, settings)
                session.submit(name, prompt, max_tokens=rng.randint(1, 80), extra_args=own)
                alive.append(name)
            if alive and rng.random() < 0.05:
                engine.abort_request([alive.pop(rng.randrange(len(alive)))])
            if arriving and rng.random() < 0.01:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            if engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished and output.request_id in alive:
                        alive.remove(output.request_id)
            steps += 1
            report.steps += 1
            report.tick()
            if on_step is not None:
                on_step(report)
            if steps > _STALL_STEPS:
                return "L10", f"requests {sorted(scheduler.requests)} make no progress"
        report.events += scheduler.vtoken_checker.shadow.events
        report.coverage.update(scheduler.vtoken_checker.shadow.kinds)
        if scheduler.vtoken_policies.failures:
            return "policy", "; ".join(scheduler.vtoken_policies.messages)
        pool = session.report()["pool"]
        if pool["free"] != pool["total"] or len(scheduler.vtoken.tables):
            return (
                "L5",
                f"{pool['total'] - pool['free']} blocks are not free after the last request",
            )
    except InvariantViolation as violation:
        return violation.law, violation.message
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return None


def _settings(rng: random.Random, file: Path) -> VTokenConfig:
    mode = rng.choice(["background", "background", "eager", "off"])
    beside: dict[str, Any] = {}
    if mode == "background":
        beside = {
            "threshold": rng.choice([0.02, 0.2, 0.5]),
            "headroom": rng.choice([0, 1, 3]),
            "copy_budget": rng.choice([None, 1 << 17]),
            "moves_per_plan": rng.choice([None, BLOCK]),
            "commit_delay": rng.randint(0, 8),
            "force_sync": rng.random() < 0.2,
            "shared_prefix": rng.choice(["keep", "copy-out"]),
        }
    first, recent = rng.choice([0, 0, 1, 9]), rng.choice([0, 0, 1, 9])
    ratio = rng.random() < 0.2
    return VTokenConfig(
        policy=rng.choice(POLICIES),
        budget=None if ratio else rng.randint(6 + first + recent, 300),
        budget_ratio=rng.choice([0.1, 0.5, 0.9]) if ratio else None,
        slack=rng.choice([0, 0, 1, 40]),
        keep_first=first,
        keep_recent=recent,
        keep_prompt=rng.random() < 0.1,
        recent_share=rng.choice([0.0, 0.5, 0.9]),
        window=rng.choice([1, 8, 32]),
        recovery=rng.choice([0.4, 0.6, 0.95]),
        **_scores(rng),
        reclaim=mode,
        seed=rng.randint(0, 99),
        checks=3,
        trace=str(file),
        **beside,
    )


def _scores(rng: random.Random) -> dict[str, Any]:
    """A way of looking at attention."""
    window = rng.choice([1, 7, 32, 64])
    if rng.random() < 0.5:
        return {"score_mode": "exact", "score_window": window}
    return {
        "score_mode": "sampled",
        "score_layers": rng.choice([1, 2, 5]),
        "score_every": rng.choice([1, 3, 8]),
        "score_window": window,
    }


def _asked(rng: random.Random, settings: VTokenConfig) -> dict[str, Any] | None:
    """What a request asks for itself; most ask for nothing."""
    if rng.random() < 0.6:
        return None
    asked: dict[str, Any] = {}
    if rng.random() < 0.7:
        asked["policy"] = rng.choice([*POLICIES, "none"])
    if asked.get("policy") != "none" and rng.random() < 0.5:
        asked["budget"] = rng.randint(6 + settings.keep_first + settings.keep_recent, 300)
    if rng.random() < 0.5:
        asked |= _scores(rng)
    return {f"vtoken_{name}": value for name, value in asked.items()}


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(3, 258) for _ in range(length)]


def _recorded(session: Session, file: Path) -> tuple[Header, list[Any]]:
    recorder = session.scheduler.vtoken_recorder
    if recorder is not None:
        recorder.close()
    return load(file)
