"""`vtoken fuzz`: a campaign, its progress, its result, and what to do with a finding."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from vtoken.environment import prepare_environment
from vtoken.errors import Rejected
from vtoken.options import check_writable, write_json_atomically

if TYPE_CHECKING:
    from vtoken.testing.fuzz import Finding, FuzzReport


class Target(StrEnum):
    """What is fuzzed."""

    CORE = "core"
    ENGINE = "engine"


def fuzz(
    target: Annotated[
        Target,
        typer.Option(help="core: tables, planner, mover; engine: vLLM on a tiny model."),
    ] = Target.CORE,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long.", metavar="S")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the campaign.", metavar="N")] = 0,
    episode: Annotated[
        int, typer.Option(min=0, help="First episode, to have one again.", metavar="N")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.", metavar="FILE")
    ] = None,
    trace: Annotated[
        Path, typer.Option(help="Where the trace of a finding goes.", metavar="FILE")
    ] = Path("vtoken-finding.ndjson"),
) -> None:
    """Hunt for violations at check level 3; exit status 1 when one is found."""
    if json_file is not None:
        check_writable(json_file)
    check_writable(trace)
    prepare_environment(quiet=True)  # before anything imports torch
    # Imported late, as everything that brings torch or vLLM: `vtoken --help` is to be quick.
    from vtoken.testing.fuzz import fuzz_core

    run: Callable[..., FuzzReport] = fuzz_core
    if target is Target.ENGINE:
        from vtoken.vllm.fuzz import fuzz_engine

        run = fuzz_engine
    console = Console(stderr=True)
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def show(report: FuzzReport) -> None:
            if console.is_terminal:
                live.update(_table(report), refresh=False)

        report = run(seconds=seconds, seed=seed, first_episode=episode, on_step=show)
    Console(highlight=False).print(_table(report))
    result: dict[str, Any] = report.as_dict()
    if json_file is not None:
        write_json_atomically(json_file, result)
    for finding in report.findings:
        _tell(finding, trace, target)
    if report.findings:
        raise typer.Exit(1)
    typer.echo(
        f"nothing found in {report.steps} steps of {report.episodes} episodes, seed {seed}, "
        f"{report.seconds:.0f} s"
    )


def _table(report: FuzzReport) -> Table:
    table = Table(title=f"fuzzing {report.target}, seed {report.seed}", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_row("seconds", f"{report.seconds:.1f}")
    table.add_row("episodes", str(report.episodes))
    steps = report.steps / report.seconds if report.seconds else 0.0
    table.add_row("steps", f"{report.steps} ({steps:.0f}/s)")
    table.add_row("events", f"{report.events} ({report.events_per_second:.0f}/s)")
    for event, count in sorted(report.coverage.items()):
        table.add_row(f"  {event}", str(count))
    table.add_row("refused wrong calls", str(report.rejections.total()))
    table.add_row("violations", str(len(report.findings)))
    return table


def _tell(finding: Finding, trace: Path, target: Target) -> None:
    typer.echo(f"\nlaw {finding.law}: {finding.message}")
    typer.echo(
        f"again: vtoken fuzz --target {target} --seed {finding.seed} --episode {finding.episode}"
    )
    if not finding.records:
        return
    from vtoken.trace import shrink, write_trace
    from vtoken.trace.explain import explain

    write_trace(trace, finding.header, finding.records)
    typer.echo(f"trace: {trace} ({len(finding.records)} records)")
    try:
        small = shrink(finding.header, finding.records)
    except Rejected:
        typer.echo("the spec accepts the trace itself; the fault lies in bytes or buffers")
        return
    smaller = trace.with_name(trace.name + ".small")
    write_trace(smaller, finding.header, small)
    typer.echo(f"smallest trace that breaks the same law: {smaller} ({len(small)} records)")
    for line in explain(finding.header, small):
        typer.echo(line)
