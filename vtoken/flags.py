"""The command line's declarations of vToken's own options, shared by the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vtoken.policies import policy_names

_PANEL = "Eviction and reclamation"
_BACKGROUND = "With --reclaim background"
_SCORES = "With policies that look at attention (h2o, scissorhands, fastgen)"

PolicyOption = Annotated[
    str | None,
    typer.Option(
        help=f"Eviction policy: {', '.join(policy_names())}, or module:Class; none evicts nothing.",
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
SlackOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens over the budget before eviction fires, in bursts down to the budget.",
        metavar="TOKENS",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
KeepFirstOption = Annotated[
    int | None,
    typer.Option(
        help="First tokens that no policy may evict.",
        metavar="TOKENS",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
KeepRecentOption = Annotated[
    int | None,
    typer.Option(
        help="Newest tokens that no policy may evict, beside the newest one.",
        metavar="TOKENS",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
KeepPromptOption = Annotated[
    bool | None,
    typer.Option(
        "--keep-prompt/--no-keep-prompt",
        help="No policy may evict tokens of the prompt.",
        show_default="no",
        rich_help_panel=_PANEL,
    ),
]
PolicyErrorOption = Annotated[
    str | None,
    typer.Option(
        help="When a policy fails: stop-request ends its request; keep-tokens evicts nothing "
        "more from it.",
        metavar="HOW",
        show_default="stop-request",
        rich_help_panel=_PANEL,
    ),
]
PolicyTimeOption = Annotated[
    float | None,
    typer.Option(
        help="A policy that takes longer in one call has failed; looked at after the call.",
        metavar="MS",
        show_default="no limit",
        rich_help_panel=_PANEL,
    ),
]
RequestPoliciesOption = Annotated[
    str | None,
    typer.Option(
        help="Policies that requests may choose: registered, or any, with module:Class.",
        metavar="WHICH",
        show_default="registered",
        rich_help_panel=_PANEL,
    ),
]
ReclaimOption = Annotated[
    str | None,
    typer.Option(
        help="eager: holes are recycled or closed at once; background: relocated beside the "
        "steps; off: evict without reclaiming.",
        metavar="MODE",
        show_default="eager",
        rich_help_panel=_PANEL,
    ),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        help="Share of holes, in (0, 1], from which on a request is relocated.",
        metavar="SHARE",
        show_default="0.25",
        rich_help_panel=_BACKGROUND,
    ),
]
HeadroomOption = Annotated[
    int | None,
    typer.Option(
        help="Blocks kept free of requests, as targets for --shared-prefix copy-out.",
        metavar="BLOCKS",
        show_default="0",
        rich_help_panel=_BACKGROUND,
    ),
]
CopyBudgetOption = Annotated[
    int | None,
    typer.Option(
        help="Most bytes of K and V given to the copy stream in one step.",
        metavar="BYTES",
        show_default="no bound",
        rich_help_panel=_BACKGROUND,
    ),
]
MovesOption = Annotated[
    int | None,
    typer.Option(
        help="Most tokens that one plan moves.",
        metavar="TOKENS",
        show_default="no bound",
        rich_help_panel=_BACKGROUND,
    ),
]
DelayOption = Annotated[
    int | None,
    typer.Option(
        help="Steps between a plan's copies and the switch of the layout.",
        metavar="STEPS",
        show_default="2",
        rich_help_panel=_BACKGROUND,
    ),
]
ForceSyncOption = Annotated[
    bool | None,
    typer.Option(
        "--force-sync/--no-force-sync",
        help="Copy in step order instead of beside the steps, to compare.",
        show_default="no",
        rich_help_panel=_BACKGROUND,
    ),
]
SharedPrefixOption = Annotated[
    str | None,
    typer.Option(
        help="keep: tokens in shared blocks stay there; copy-out: the few live ones of a request "
        "are copied out when a block is gained.",
        metavar="HOW",
        show_default="keep",
        rich_help_panel=_BACKGROUND,
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
        help="First tokens that streaming-llm and fastgen keep.",
        metavar="TOKENS",
        show_default="4",
        rich_help_panel=_PANEL,
    ),
]
RecentShareOption = Annotated[
    float | None,
    typer.Option(
        help="Share of the kept tokens that h2o and scissorhands reserve for the newest.",
        metavar="SHARE",
        show_default="0.5",
        rich_help_panel=_PANEL,
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        help="Observations that scissorhands looks back over, 1 to 32.",
        metavar="N",
        show_default="32",
        rich_help_panel=_PANEL,
    ),
]
RecoveryOption = Annotated[
    float | None,
    typer.Option(
        help="Share of a head's attention that fastgen's choice has to retain.",
        metavar="SHARE",
        show_default="0.95",
        rich_help_panel=_PANEL,
    ),
]
ScoreModeOption = Annotated[
    str | None,
    typer.Option(
        help="exact: weights of all layers in every step; sampled: of some, now and then.",
        metavar="MODE",
        show_default="exact",
        rich_help_panel=_SCORES,
    ),
]
ScoreLayersOption = Annotated[
    int | None,
    typer.Option(
        help="sampled: the last of every so many layers is looked at.",
        metavar="N",
        show_default="5",
        rich_help_panel=_SCORES,
    ),
]
ScoreEveryOption = Annotated[
    int | None,
    typer.Option(
        help="sampled: decode steps are looked at whose length is a multiple of this.",
        metavar="N",
        show_default="8",
        rich_help_panel=_SCORES,
    ),
]
ScoreWindowOption = Annotated[
    int | None,
    typer.Option(
        help="How many of a prompt chunk's last queries are observed.",
        metavar="N",
        show_default="32",
        rich_help_panel=_SCORES,
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
