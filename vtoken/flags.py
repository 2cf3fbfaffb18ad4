"""The command line's declarations of vToken's own options, shared by the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vtoken.policies import policy_names

_PANEL = "Eviction and reclamation"

PolicyOption = Annotated[
    str | None,
    typer.Option(
        help=f"Eviction policy: {', '.join(policy_names())}; none evicts nothing.",
        metavar="NAME",
        show_default="none",
        rich_help_panel=_PANEL,
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens that a decode step may attend to, its own included.",
        metavar="TOKENS",
        rich_help_panel=_PANEL,
    ),
]
RatioOption = Annotated[
    float | None,
    typer.Option(
        help="The budget as a share of the request's length, in (0, 1].",
        metavar="SHARE",
        rich_help_panel=_PANEL,
    ),
]
ReclaimOption = Annotated[
    str | None,
    typer.Option(
        help="eager: holes are recycled or closed at once; off: evict without reclaiming.",
        metavar="MODE",
        show_default="eager",
        rich_help_panel=_PANEL,
    ),
]
ChecksOption = Annotated[
    int | None,
    typer.Option(
        help="Online checks, 0 (off) to 3 (everything, every step).",
        metavar="LEVEL",
        show_default="1",
        rich_help_panel=_PANEL,
    ),
]
SinksOption = Annotated[
    int | None,
    typer.Option(
        help="First tokens that streaming-llm keeps.",
        metavar="TOKENS",
        show_default="4",
        rich_help_panel=_PANEL,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="Seed of policies that draw, and of vLLM's sampling.",
        metavar="N",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="These options from a TOML, JSON or YAML file; flags override it.",
        metavar="FILE",
        rich_help_panel=_PANEL,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Record what happens to the token tables, for `vtoken replay`.",
        metavar="FILE",
        rich_help_panel=_PANEL,
    ),
]
