"""`vtoken serve`: vLLM's OpenAI server with vToken on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from vtoken.environment import prepare_environment
from vtoken.flags import (
    BudgetOption,
    ChecksOption,
    ConfigOption,
    CopyBudgetOption,
    DelayOption,
    ForceSyncOption,
    HeadroomOption,
    KeepFirstOption,
    KeepPromptOption,
    KeepRecentOption,
    MovesOption,
    PolicyErrorOption,
    PolicyOption,
    PolicyTimeOption,
    RatioOption,
    RecentShareOption,
    ReclaimOption,
    RecoveryOption,
    RequestPoliciesOption,
    ScoreEveryOption,
    ScoreLayersOption,
    ScoreModeOption,
    ScoreWindowOption,
    SeedOption,
    SharedPrefixOption,
    SinksOption,
    SlackOption,
    ThresholdOption,
    TraceOption,
    WindowOption,
)
from vtoken.options import load_config, vtoken_options
from vtoken.report import model_progress


def serve(
    context: typer.Context,
    policy: PolicyOption = None,
    budget: BudgetOption = None,
    budget_ratio: RatioOption = None,
    slack: SlackOption = None,
    keep_first: KeepFirstOption = None,
    keep_recent: KeepRecentOption = None,
    keep_prompt: KeepPromptOption = None,
    on_policy_error: PolicyErrorOption = None,
    policy_time_limit_ms: PolicyTimeOption = None,
    request_policies: RequestPoliciesOption = None,
    reclaim: ReclaimOption = None,
    threshold: ThresholdOption = None,
    headroom: HeadroomOption = None,
    copy_budget: CopyBudgetOption = None,
    moves_per_plan: MovesOption = None,
    commit_delay: DelayOption = None,
    force_sync: ForceSyncOption = None,
    shared_prefix: SharedPrefixOption = None,
    checks: ChecksOption = None,
    sinks: SinksOption = None,
    recent_share: RecentShareOption = None,
    window: WindowOption = None,
    recovery: RecoveryOption = None,
    score_mode: ScoreModeOption = None,
    score_layers: ScoreLayersOption = None,
    score_every: ScoreEveryOption = None,
    score_window: ScoreWindowOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    trace: TraceOption = None,
    vllm_help: Annotated[
        bool, typer.Option("--vllm-help", help="Show vLLM's own flags and exit.")
    ] = False,
) -> None:
    """vLLM's OpenAI server with vToken on. All of vLLM's own flags pass through.

    The model is named as for vLLM: first, or with --model. Without one, the
    embedded SmolLM2-135M is served under the name "smollm2". --config is
    vToken's here, not vLLM's.
    """
    settings = load_config(config, **vtoken_options(locals()))
    prepare_environment(quiet=False)
    from vtoken.vllm.version import check_version

    check_version()
    from vtoken.vllm.server import parse_flags, serve_forever, show_vllm_help

    if vllm_help:
        show_vllm_help()
    flags = [*context.args, *([] if seed is None else ["--seed", str(seed)])]
    with model_progress(Console(stderr=True)) as progress:
        args = parse_flags(settings, flags, progress=progress)
    serve_forever(args)
