"""The table on the terminal: every figure with the number of samples behind it."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table

from vtoken.evaluation.evaluate import Evaluation, Row
from vtoken.evaluation.rouge import CLOSE

PUBLISHED_DIFFERENCE, PUBLISHED_CLOSE = -0.0016, 0.931
"""What the published evaluation of token-level virtualization gives for its own system: mean
ROUGE-L F1 difference from naive eviction, and the share of pairs within `CLOSE`."""


def show(evaluation: Evaluation, console: Console | None = None) -> None:
    """Print the table and what is to be said below it."""
    console = console or Console(highlight=False)
    tasks, plan = evaluation.plan.tasks, evaluation.plan
    # Narrow enough for 80 columns with every task.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("policy", no_wrap=True)
    table.add_column("budget", justify="right")
    if "passkey" in tasks:
        table.add_column("pass\nkeys", justify="right")
    if "perplexity" in tasks:
        table.add_column("perplex-\nity", justify="right")
        table.add_column("over\ntokens", justify="right")
    if "rouge" in tasks:
        table.add_column("ROUGE-L\nto full", justify="right")
        table.add_column("naive\nto full", justify="right")
        table.add_column("to\nnaive", justify="right")
        table.add_column("over\npairs", justify="right")
    for row in evaluation.rows:
        table.add_row(*_cells(row, tasks), style="" if row.cell.evicts else "bold")
    console.print(table)
    console.print()
    for line in notes(evaluation):
        console.print(line, markup=False, soft_wrap=True)
    if evaluation.agreement is not None and plan.reclaim == "off":
        console.print("with --reclaim off, vtoken is naive itself")


def _cells(row: Row, tasks: tuple[str, ...]) -> list[str]:
    cells = [row.cell.policy, f"{100 * row.cell.budget_ratio:g} %"]
    if not row.cell.evicts:
        cells = ["full cache", ""]
    if "passkey" in tasks:
        found = row.passkey
        cells.append("" if found is None else f"{found.found}/{found.samples}")
    if "perplexity" in tasks:
        known = row.perplexity
        cells += ["", ""] if known is None else [_number(known.value, 2), f"{known.tokens:,}"]
    if "rouge" in tasks:
        similar = row.rouge
        if similar is None:
            cells += ["", "", "", ""]  # the full cache is what the others are held against
        else:
            cells += [_number(similar.vtoken, 4), _number(similar.naive, 4)]
            cells += [_number(similar.between, 4), str(similar.samples)]
    return cells


def notes(evaluation: Evaluation) -> list[str]:
    """What the figures are of, in words."""
    plan = evaluation.plan
    lines = []
    if "passkey" in plan.tasks:
        lines.append(
            f"passkey: {plan.samples['passkey']} prompts of {plan.length} tokens for each row"
        )
    excerpts = []
    first = evaluation.rows[0].perplexity
    if first is not None:
        excerpts.append(f"perplexity {first.samples}")
    if evaluation.agreement is not None and evaluation.rows[1:]:
        rouge = evaluation.rows[1].rouge
        assert rouge is not None
        excerpts.append(f"ROUGE-L {rouge.samples}")
    if excerpts:
        lines.append(
            f"text: {evaluation.text.source}, {evaluation.text_tokens:,} tokens; excerpts for "
            f"each row: {', '.join(excerpts)}"
        )
    agreement = evaluation.agreement
    if agreement is not None and agreement.pairs:
        lines.append(
            f"vtoken ({plan.reclaim}) and naive over {agreement.pairs} pairs: the same tokens in "
            f"{agreement.identical}; ROUGE-L difference {agreement.mean_difference:.4f} in the "
            f"mean, at most {CLOSE} in {100 * agreement.close / agreement.pairs:.1f} % of them "
            f"(published: {PUBLISHED_DIFFERENCE}, {100 * PUBLISHED_CLOSE:.1f} %)"
        )
    return lines


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
