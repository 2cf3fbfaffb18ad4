"""`vtoken fuzz`: a campaign, its progress, its result, and what to do with a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    from vtoken.testing.report import Finding, FuzzReport

Show = Callable[["FuzzReport"], None]


class Target(StrEnum):
    """What is fuzzed."""

    MODEL = "model"
    CORE = "core"
    ENGINE = "engine"


def fuzz(
    target: Annotated[
        Target,
        typer.Option(
            help="model: the spec itself; core: tables, planner, mover, copies in flight; "
            "engine: vLLM on a tiny model."
        ),
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
    script: Annotated[
        Path | None,
        typer.Option(help="Run the script of a finding again instead.", metavar="FILE"),
    ] = None,
) -> None:
    """Hunt for violations at check level 3; exit status 1 when one is found."""
    if json_file is not None:
        check_writable(json_file)
    check_writable(trace)
    prepare_environment(quiet=True)  # before anything imports torch
    if script is not None:
        _again(script)
        return
    with _progress() as show:
        report = _campaign(target)(seconds=seconds, seed=seed, first_episode=episode, on_step=show)
        told = [line for finding in report.findings for line in _keep(report, finding, trace, show)]
    Console(highlight=False).print(_table(report))
    result: dict[str, Any] = report.as_dict()
    if json_file is not None:
        write_json_atomically(json_file, result)
    for line in told:
        typer.echo(line)
    if report.findings:
        raise typer.Exit(1)
    typer.echo(
        f"nothing found in {report.steps} steps of {report.episodes} episodes, seed {seed}, "
        f"{report.seconds:.0f} s"
    )


def _campaign(target: Target) -> Callable[..., FuzzReport]:
    # Imported late, as everything that brings torch or vLLM: `vtoken --help` is to be quick.
    if target is Target.MODEL:
        from vtoken.testing.fuzz_model import fuzz_model

        return fuzz_model
    if target is Target.ENGINE:
        from vtoken.vllm.fuzz import fuzz_engine

        return fuzz_engine
    from vtoken.testing.fuzz import fuzz_core

    return fuzz_core


@contextmanager
def _progress() -> Iterator[Show]:
    """A table that is kept up to date on a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def show(report: FuzzReport) -> None:
            if console.is_terminal:
                live.update(_table(report), refresh=False)

        yield show


def _table(report: FuzzReport) -> Table:
    from typing import get_args

    from vtoken_spec import Event

    table = Table(title=f"fuzzing {report.target}, seed {report.seed}", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_row("seconds", f"{report.seconds:.1f}")
    table.add_row("episodes", str(report.episodes))
    steps = report.steps / report.seconds if report.seconds else 0.0
    table.add_row("steps", f"{report.steps} ({steps:.0f}/s)")
    rates = f"{report.events_per_second:.0f}/s, {report.events_per_cpu_second:.0f}/s of CPU"
    table.add_row("events", f"{report.events} ({rates})")
    table.add_row("event kinds", f"{len(report.coverage)} of {len(get_args(Event))}")
    for event, count in sorted(report.coverage.items()):
        table.add_row(f"  {event}", str(count))
    table.add_row("refused", f"{report.rejections.total()}, {len(report.rejections)} reasons")
    table.add_row("shrinks", str(report.shrinks))
    table.add_row("violations", str(len(report.findings)))
    return table


def _keep(report: FuzzReport, finding: Finding, trace: Path, show: Show) -> Iterator[str]:
    """Write a finding's files and make them small; says what a reader needs."""
    from vtoken.testing.script import shrink_script, write_script
    from vtoken.trace import shrink, write_trace
    from vtoken.trace.explain import explain

    before = report.shrinks

    def progress(_: int, runs: int) -> None:
        report.shrinks = before + runs
        show(report)

    again = f"--target {report.target} --seed {finding.seed} --episode {finding.episode}"
    yield f"\nlaw {finding.law}: {finding.message}"
    yield f"again: vtoken fuzz {again}"
    yield from finding.history
    if finding.header is not None and finding.records:
        write_trace(trace, finding.header, finding.records)
        yield f"trace: {trace} ({len(finding.records)} records)"
        try:
            small = shrink(finding.header, finding.records, on_progress=progress)
        except Rejected:
            yield "the spec accepts the trace itself; the fault lies in bytes or buffers"
        else:
            smaller = trace.with_name(trace.name + ".small")
            write_trace(smaller, replace(finding.header, partial=True), small)
            yield f"smallest trace that breaks the same law: {smaller} ({len(small)} records)"
            yield from explain(finding.header, small)
    if finding.made is not None:
        before = report.shrinks
        calls = shrink_script(finding.made, finding.script, finding.law, on_progress=progress)
        file = trace.with_suffix(".script.json")
        write_script(file, finding.made, calls, law=finding.law, message=finding.message)
        yield f"script: {len(calls)} of {len(finding.script)} calls show it as well"
        yield f"again: vtoken fuzz --script {file}"


def _again(file: Path) -> None:
    from vtoken.testing.script import read_script, run_script

    made, calls = read_script(file)
    found = run_script(made.build(), calls)
    if found is not None:
        typer.echo(f"law {found[0]}: {found[1]}")
        raise typer.Exit(1)
    typer.echo(f"nothing found in the {len(calls)} calls of {file}")
