"""What `vtoken run` shows: the text as it is, on a terminal without its control characters."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from vtoken import report
from vtoken.config import VTokenConfig


def output(text: str = "", tokens: int = 0, finish: str | None = None, prompt: str = "p") -> Any:
    return SimpleNamespace(
        prompt=prompt, text=text, token_ids=list(range(tokens)), finish_reason=finish
    )


def test_a_single_text_is_streamed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    with report.Streamer(["a prompt"], 10) as streamer:
        streamer.on_text(0, output(tokens=1), "\x07one [bold]")
        assert capsys.readouterr().out == "\x07one [bold]"
        streamer.on_text(0, output(tokens=2, finish="stop"), " two")
    assert capsys.readouterr().out == " two\n"


def test_several_texts_come_whole_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    with report.Streamer(["first\nprompt", "x" * 99], 10) as streamer:
        streamer.on_text(1, output("later", 5, "length"), "later")
        streamer.on_text(0, output("sooner", 2), "sooner")
        assert capsys.readouterr().out == ""
        streamer.on_text(0, output("sooner or", 3, "stop"), " or")
    heading = "x" * 59 + "\u2026"
    assert capsys.readouterr().out == f"[1] first prompt\nsooner or\n\n[2] {heading}\nlater\n"


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> io.StringIO:
    """Make the report's console a terminal of that width; what it is sent."""
    screen = io.StringIO()

    def console(**_: Any) -> Console:
        return Console(file=screen, force_terminal=True, width=width, color_system=None)

    monkeypatch.setattr(report, "Console", console)
    return screen


def test_on_a_terminal_long_lines_break_at_spaces_and_controls_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = terminal(monkeypatch, width=20)
    with report.Streamer(["p"], 10) as streamer:
        streamer.on_text(0, output(tokens=5), "[red]one two\x1b[2J three four five")
        streamer.on_text(0, output(tokens=9, finish="stop"), " six\nseven")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", shown) if line and "generating" not in line]
    assert lines == ["[red]one two\ufffd[2J", "three four five six", "seven"]
    assert "\x1b[2J" not in screen.getvalue()


def result(evicted: int, policy: str = "random") -> dict[str, Any]:
    config = VTokenConfig() if policy == "none" else VTokenConfig(policy=policy, budget=64)
    return report.run_result(
        model="m",
        config=config,
        outputs=[output("text", 30, "length")],
        report={
            "blocks_peak": {"native": 8, "naive": 7, "vtoken": 3, "ideal": 2},
            "block_size": 32,
            "reclaim": "eager",
            "tokens": {"evicted": evicted, "recycled": 4, "moved": 5},
            "checks": {"I2": 6},
            "pool": {"total": 100, "free": 99},
        },
        free_before=100,
        start_s=1.0,
        generate_s=2.0,
    )


def test_the_summary_tells_every_number_of_the_result() -> None:
    screen = io.StringIO()
    report.show_summary(result(evicted=3), Console(file=screen, width=80))
    words = " ".join(screen.getvalue().split())
    for expected in (
        "of 32 tokens each",
        "native 8 100 %",
        "naive 7 88 %",
        "vtoken 3 38 %",
        "ideal 2 25 %",
        "policy random, reclaim eager",
        "tokens 3 evicted, 4 slots recycled, 5 copied",
        "checks I2 6; violations: 0",
        "pool 100 blocks, 100 free before, 99 after",
        "2.0 s for 30 tokens, 15.0 tokens/s; start 1.0 s",
    ):
        assert expected in words


def test_a_policy_that_evicted_nothing_is_worth_a_warning() -> None:
    assert "nothing was evicted" in str(report.warning_of(result(evicted=0)))
    assert report.warning_of(result(evicted=1)) is None
    assert report.warning_of(result(evicted=0, policy="none")) is None


def test_progress_of_a_model_that_is_there_shows_nothing() -> None:
    screen = io.StringIO()
    with report.model_progress(Console(file=screen)):
        pass
    assert screen.getvalue() == ""
    with report.model_progress(Console(file=screen, force_terminal=True)) as progress:
        progress("convert model", 0.5)
    assert "convert model" in screen.getvalue()
