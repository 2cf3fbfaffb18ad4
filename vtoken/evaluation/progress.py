"""Progress of minutes of engine work, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Stages:
    """A bar for each task on a terminal; elsewhere a line when one begins."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._tty = self._console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._tty,
        )
        self._tasks: dict[str, TaskID] = {}
        self._begun: set[str] = set()
        self._starting: TaskID | None = None

    def __enter__(self) -> Stages:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def starting(self, what: str) -> None:
        """A stage whose end cannot be foreseen; it lasts until `expect`."""
        if self._tty:
            self._starting = self._bars.add_task(f"{what} (10 to 60 s)", total=None)
        else:
            print(f"{what} ...", file=sys.stderr)

    def expect(self, tokens: Mapping[str, int]) -> None:
        """The tasks to come, with how many tokens each will produce."""
        if self._starting is not None:
            self._bars.remove_task(self._starting)
            self._starting = None
        for task, total in tokens.items():
            self._tasks[task] = self._bars.add_task(task, total=total, start=False)

    def advance(self, task: str, tokens: int) -> None:
        """So many more tokens of a task."""
        if task not in self._begun:
            self._begun.add(task)
            self._bars.start_task(self._tasks[task])
            if not self._tty:
                print(f"{task} ...", file=sys.stderr)
        self._bars.advance(self._tasks[task], tokens)
