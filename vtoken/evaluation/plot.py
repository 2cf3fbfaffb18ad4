"""The plot: each figure over the budget, one line for each policy, the full cache as a level."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from vtoken.evaluation.evaluate import Evaluation, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart without colour too: colours of Okabe and Ito's palette, each with a marker.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_TITLES = {
    "passkey": "pass keys found, of {n}",
    "perplexity": "perplexity, {n} tokens",
    "rouge": "ROUGE-L F1 to full cache, {n} texts",
}


def draw(evaluation: Evaluation) -> bytes:
    """A PNG of one panel for each task."""
    # Imported here: it takes a second, which `vtoken --help` need not.
    from matplotlib.figure import Figure

    tasks = evaluation.plan.tasks
    figure = Figure(figsize=(4.2 * len(tasks), 4.4), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for panel, task in zip(panels, tasks, strict=True):
        _draw_task(panel, evaluation, task)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * len(tasks) + 1)
    )
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150, metadata={"Software": "vtoken eval"})
    return stream.getvalue()


def _draw_task(panel: Axes, evaluation: Evaluation, task: str) -> None:
    full, rows = evaluation.rows[0], evaluation.rows[1:]
    budgets = sorted(evaluation.plan.budgets)
    policies = evaluation.plan.policies
    for number, policy in enumerate(policies):
        mine = {row.cell.budget_ratio: _value(row, task) for row in rows if _is_of(row, policy)}
        # Beside each other, since few samples often give two policies the same figure.
        aside = 0.5 * (number - (len(policies) - 1) / 2)
        panel.plot(
            [100 * budget + aside for budget in budgets],
            [mine[budget] for budget in budgets],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            alpha=0.8,
            label=policy,
        )
    level = _value(full, task)
    # Drawn in every panel where it is a number, and named once for all of them.
    panel.axhline(level, color="#555555", linestyle="--", label="full cache")
    n = _samples(full if task != "rouge" else rows[0], task)
    panel.set_title(_TITLES[task].format(n=f"{n:,}"), fontsize=11)
    panel.set_xlabel("budget, % of the request's tokens")
    panel.set_xticks([100 * budget for budget in budgets])
    panel.grid(alpha=0.25)
    if task != "perplexity":
        panel.set_ylim(-0.05, 1.08)
    elif _spread(rows, level) > 3:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")


def _is_of(row: Row, policy: str) -> bool:
    return row.cell.policy == policy


def _value(row: Row, task: str) -> float:
    if task == "passkey":
        assert row.passkey is not None
        return row.passkey.share
    if task == "perplexity":
        assert row.perplexity is not None
        return row.perplexity.value
    return 1.0 if row.rouge is None else row.rouge.vtoken


def _samples(row: Row, task: str) -> int:
    figure: Any = getattr(row, task)
    return int(figure.tokens if task == "perplexity" else figure.samples)


def _spread(rows: list[Row], level: float) -> float:
    """How many times the full cache's perplexity the largest one is."""
    values = [row.perplexity.value for row in rows if row.perplexity is not None]
    finite = [value for value in values if math.isfinite(value)]
    return max(finite, default=level) / level
