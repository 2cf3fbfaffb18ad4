"""`vtoken eval`: what policies and budgets cost in quality, on a text of the user's."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vtoken import __version__
from vtoken.config import VTokenConfig
from vtoken.environment import prepare_environment
from vtoken.errors import Rejected
from vtoken.evaluation.evaluate import Evaluation, Tasks
from vtoken.evaluation.plan import BUDGETS, LENGTH, TASKS, Plan, make_plan
from vtoken.evaluation.progress import Stages
from vtoken.evaluation.table import show
from vtoken.evaluation.texts import Text, default_text, read_text
from vtoken.flags import ChecksOption, ConfigOption, SeedOption
from vtoken.options import (
    check_model_folder,
    check_writable,
    load_config,
    write_bytes_atomically,
    write_json_atomically,
)
from vtoken.policies import policy_names
from vtoken.report import model_progress, vllm_version

_WHAT = "What is evaluated"
_MODEL = "Model and memory"
_MOST_WARNINGS = 5


def evaluate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies, with commas between them or the option repeated.",
            metavar="NAMES",
            show_default="all registered ones",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            "--budget-ratio",
            "--budgets",
            help="Budgets as shares of a request's length, in (0, 1].",
            metavar="SHARES",
            show_default=",".join(f"{budget:g}" for budget in BUDGETS),
            rich_help_panel=_WHAT,
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of " + ", ".join(TASKS) + ".",
            metavar="NAMES",
            show_default="all",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text for perplexity and ROUGE-L, UTF-8.",
            metavar="FILE",
            show_default="Python's language reference",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most samples of each task.",
            metavar="N",
            show_default="passkey 20, others 12",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a pass key prompt; multiples of the KV block are fastest.",
            metavar="N",
            show_default=str(LENGTH),
            rich_help_panel=_WHAT,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few samples, short prompts: under three minutes.")
    ] = False,
    reclaim: Annotated[
        str,
        typer.Option(
            help="How vToken's runs reclaim: background, eager, or off. Naive ones do not.",
            metavar="MODE",
            rich_help_panel=_WHAT,
        ),
    ] = "background",
    checks: ChecksOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder or hub name.",
            metavar="MODEL",
            show_default="embedded SmolLM2-135M",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    kv_memory_mb: Annotated[
        int,
        typer.Option(
            min=1, help="Memory of the KV pool, in MiB.", metavar="N", rich_help_panel=_MODEL
        ),
    ] = 1024,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the result as JSON to this file.", metavar="FILE"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the result into this PNG file.", metavar="FILE")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's own log.")] = False,
) -> None:
    """Evaluate what eviction costs: pass keys found, perplexity, ROUGE-L to the full cache.

    Policies x budgets on one engine, with the full cache as the ceiling. ROUGE-L
    is taken twice, with reclamation and without (naive); it should not differ.
    """
    plan = make_plan(
        policies=policy or policy_names(),
        budgets=budgets or (),
        tasks=tasks or (),
        samples=samples,
        length=length,
        reclaim=reclaim,
        quick=quick,
    )
    settings = _settings(plan, config, checks=checks, seed=seed)
    plan = replace(plan, seed=settings.seed)  # which a file may have given
    wanted = default_text() if text is None else read_text(text)
    _check_files(json_file, plot)
    if model is not None:
        check_model_folder(model)
    prepare_environment(quiet=not verbose)
    # Forcing a text's tokens is written for the logits processors of this runner.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    checkpoint = model or _embedded_model()
    found, times = _run(
        checkpoint, settings, plan, wanted, kv_memory_mb=kv_memory_mb, verbose=verbose
    )
    show(found)
    seconds = "{evaluate_s:.0f} s, and {start_s:.0f} s to start the engine".format(**times)
    typer.echo(f"time: {seconds}")
    if json_file is not None:
        about = {
            "model": model or "SmolLM2-135M-Instruct",
            "quick": quick,
            "config": settings.as_dict(),
            "versions": {"vtoken": __version__, "vllm": vllm_version(), "python": _python()},
        }
        write_json_atomically(json_file, about | times | found.as_dict())
    if plot is not None:
        from vtoken.evaluation.plot import draw

        write_bytes_atomically(plot, draw(found))
    for warning in found.warnings[:_MOST_WARNINGS]:
        typer.echo(f"vtoken: warning: {warning}", err=True)
    if found.warnings:
        raise typer.Exit(1)


def _python() -> str:
    return ".".join(str(part) for part in sys.version_info[:3])


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    for file in (json_file, plot):
        if file is not None:
            check_writable(file)
    if plot is not None and plot.suffix.lower() != ".png":
        raise Rejected(f"--plot writes a PNG file; give {plot} a name that ends in .png")


def _settings(plan: Plan, config: Path | None, **flags: Any) -> VTokenConfig:
    """The engine's configuration, with every row's policy and budget tried on it.

    Raises:
        Rejected: one of them does not go with the others.
    """
    first = plan.cells[0]
    settings = load_config(
        config,
        policy=first.policy,
        budget_ratio=first.budget_ratio,
        reclaim=plan.reclaim,
        **flags,
    )
    for cell in plan.cells:
        VTokenConfig.from_mapping(
            settings.as_dict() | {"policy": cell.policy, "budget_ratio": cell.budget_ratio}
        )
    return settings


def _embedded_model() -> str:
    from vtoken.models import ensure_smollm2

    with model_progress(Console(stderr=True)) as progress:
        return str(ensure_smollm2(progress=progress))


def _run(
    checkpoint: str,
    settings: VTokenConfig,
    plan: Plan,
    text: Text,
    *,
    kv_memory_mb: int,
    verbose: bool,
) -> tuple[Evaluation, dict[str, float]]:
    """Start an engine, evaluate, and say how long it took."""
    begin = time.monotonic()
    with Stages() as stages:
        stages.starting("starting vLLM")
        # Imported late, as everything that brings torch or vLLM: `vtoken --help` is to be quick.
        from vtoken.vllm.eval_engine import EvalEngine

        engine = EvalEngine(
            checkpoint,
            settings,
            longest=plan.longest,
            enforce_eager=True,
            kv_cache_memory_bytes=kv_memory_mb << 20,
            seed=plan.seed,
            disable_log_stats=True,
            use_tqdm_on_load=verbose,
        )
        started = time.monotonic()
        tasks = Tasks(plan, text, engine)
        stages.expect({task: tasks.tokens(task) for task in plan.tasks})
        found = tasks.run(engine, stages.advance)
        engine.close()
    times = {"start_s": started - begin, "evaluate_s": time.monotonic() - started}
    return found, {name: round(seconds, 3) for name, seconds in times.items()}
