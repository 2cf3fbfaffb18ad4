"""`vtoken replay`, `vtoken shrink` and `vtoken explain`: what to do with a trace.

A trace is what `vtoken run --trace FILE` and `vtoken serve --trace FILE` record.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vtoken.options import check_writable
from vtoken.trace.explain import explain as explain_records
from vtoken.trace.format import write_trace
from vtoken.trace.replay import ReplayResult, load_diverging
from vtoken.trace.replay import replay as replay_file
from vtoken.trace.shrink import shrink as shrink_records
from vtoken_spec import Event

TraceArgument = Annotated[Path, typer.Argument(help="A trace.", metavar="TRACE")]


def replay(
    trace: TraceArgument,
    laws: Annotated[
        bool, typer.Option(help="Evaluate the state laws I2 and L5 after every event as well.")
    ] = True,
) -> None:
    """Hold a trace to the spec: accepted, or where it first diverges (exit status 1)."""
    with _counting("events replayed") as progress:
        task = progress.add_task("", total=None)
        result = replay_file(
            trace, laws=laws, on_record=lambda count: progress.update(task, completed=count)
        )
    _show(trace, result)
    if result.divergence is not None:
        raise typer.Exit(1)


def shrink(
    trace: TraceArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where the smaller trace goes.", show_default="TRACE.small"
        ),
    ] = None,
) -> None:
    """Find a smaller trace that breaks the same law."""
    target = output or trace.with_name(trace.name + ".small")
    check_writable(target)
    header, records = load_diverging(trace)
    with _counting("records left") as progress:
        task = progress.add_task("", total=None)
        small = shrink_records(
            header, records, on_progress=lambda left, _: progress.update(task, completed=left)
        )
    write_trace(target, replace(header, partial=True), small)
    typer.echo(f"{len(records)} records, {len(small)} of them break the same law: {target}")
    for line in explain_records(header, small):
        typer.echo(line)


def explain(trace: TraceArgument) -> None:
    """Say which events led to the slot that a trace stumbles over, in words."""
    header, records = load_diverging(trace)
    for line in explain_records(header, records):
        typer.echo(line)


def _counting(what: str) -> Progress:
    """A counter on a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:.0f} " + what),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _show(trace: Path, result: ReplayResult) -> None:
    console = Console(highlight=False)
    known = len(get_args(Event))
    title = f"{result.length} records, {result.kinds.total()} events of the model replayed"
    table = Table(title=title, title_justify="left")
    table.add_column("record")
    table.add_column("count", justify="right")
    table.add_column(f"event of the model ({len(result.kinds)} of {known} kinds)")
    table.add_column("count", justify="right")
    none = ("", 0)
    pairs = zip_longest(sorted(result.events.items()), sorted(result.kinds.items()), fillvalue=none)
    for (record, records), (event, events) in pairs:
        table.add_row(record, str(records or ""), event, str(events or ""))
    console.print(table)
    if result.divergence is None:
        console.print(f"accepted: the spec allows every event of {trace}", markup=False)
    else:
        found = result.divergence
        text = f"line {found.line} diverges, law {found.law}: {found.message}"
        console.print(text, markup=False, soft_wrap=True)
        console.print(f"see vtoken explain {trace}", markup=False, soft_wrap=True)
