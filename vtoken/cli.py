"""The command line: `vtoken run`, and where the other commands come together.

Exit status: 0 done; 1 a law was violated, or the engine or a policy failed; 2 wrong use or an
unsupported configuration, with one line that says why and what to do; 130 interrupted.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vtoken import __version__
from vtoken.environment import prepare_environment
from vtoken.errors import EngineFailed, InvariantViolation, VTokenError
from vtoken.eval_command import evaluate
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
from vtoken.fuzz_command import fuzz
from vtoken.options import (
    check_model_folder,
    check_writable,
    load_config,
    read_prompts,
    vtoken_options,
    write_json_atomically,
)
from vtoken.report import Streamer, ended_early, model_progress, run_result, show_summary
from vtoken.serve_command import serve
from vtoken.trace_commands import explain, replay, shrink

app = typer.Typer(
    help="Token-level KV eviction that gives memory back, on stock vLLM.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True)
# The base of everything that a command line can do wrong, in whichever click typer brings.
_WrongUse: type[Exception] = typer.BadParameter.__mro__[1]

_INTERRUPTED = 130
_MODEL = "Model and memory"
_GENERATION = "Generation"


def main() -> None:
    """Entry point of the `vtoken` script."""
    # Registered first, so called last: what comes after it are the complaints of C extensions
    # about each other's leaks, some forty lines below the one line that matters.
    atexit.register(_close_stderr)
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except _WrongUse as error:
        where = getattr(getattr(error, "ctx", None), "command_path", "vtoken")
        _say(f"{error.format_message().rstrip('.')}; see {where} --help")  # type: ignore[attr-defined]
        raise SystemExit(2) from None
    except VTokenError as error:
        _fail(error)
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python must not fail again while flushing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    if code == _INTERRUPTED:  # typer's own answer to Ctrl-C, in silence
        _say("interrupted")
    raise SystemExit(code if isinstance(code, int) else 0)


def _close_stderr() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _say(text: str) -> None:
    errors.print(f"vtoken: {text}", markup=False, highlight=False, soft_wrap=True)


def _fail(error: VTokenError) -> None:
    if isinstance(error, InvariantViolation):
        _say(str(error))
        raise SystemExit(1) from None
    _say(" ".join(str(error).split()))
    raise SystemExit(1 if isinstance(error, EngineFailed) else 2) from None


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"vtoken {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; '-' or none reads standard input.", metavar="PROMPT"),
    ] = None,
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
    file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts from a file, one a line: text, or JSON objects with a 'prompt'.",
            metavar="FILE",
            rich_help_panel=_GENERATION,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="New tokens per prompt.", metavar="N", rich_help_panel=_GENERATION
        ),
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 is greedy.", metavar="T", rich_help_panel=_GENERATION)
    ] = 0.0,
    chat: Annotated[
        bool, typer.Option(help="Apply the model's chat template.", rich_help_panel=_GENERATION)
    ] = True,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Always produce --max-tokens tokens.", rich_help_panel=_GENERATION
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder or hub name.",
            metavar="MODEL",
            show_default="embedded SmolLM2-135M",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per KV block.",
            metavar="N",
            show_default="32 on a CPU, else vLLM's",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Context length.",
            metavar="N",
            show_default="the model's",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    kv_memory_mb: Annotated[
        int,
        typer.Option(
            min=1, help="Memory of the KV pool, in MiB.", metavar="N", rich_help_panel=_MODEL
        ),
    ] = 1024,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Model dtype.",
            metavar="NAME",
            show_default="float32 on a CPU, else vLLM's",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the result as JSON to this file.", metavar="FILE"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's own log.")] = False,
) -> None:
    """Generate from prompts with eviction and reclamation, and report the KV blocks held."""
    settings = load_config(config, **vtoken_options(locals()))
    texts = read_prompts(prompts or [], file)
    if json_file is not None:
        check_writable(json_file)
    if model is not None:
        check_model_folder(model)
    prepare_environment(quiet=not verbose)
    checkpoint = model or str(_embedded_model())
    engine: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_memory_mb << 20,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "dtype": dtype,
        "seed": seed,
        "disable_log_stats": True,
        "use_tqdm_on_load": verbose,
    }
    begin = time.monotonic()
    with _busy("starting vLLM"), _traces(verbose):
        from vtoken.vllm.session import Session

        session = Session(checkpoint, settings, **engine)
    started = time.monotonic()
    with Streamer(texts, max_tokens) as streamer, _traces(verbose):
        outputs = session.generate(
            texts,
            max_tokens=max_tokens,
            temperature=temperature,
            chat=chat,
            ignore_eos=ignore_eos,
            on_text=streamer.on_text,
        )
    result = run_result(
        model=model or "SmolLM2-135M-Instruct",
        config=settings,
        outputs=outputs,
        report=session.report(),
        free_before=session.free_before,
        start_s=started - begin,
        generate_s=time.monotonic() - started,
    )
    if json_file is not None:
        write_json_atomically(json_file, result)
    show_summary(result)
    for warning in result["warnings"]:
        _say(f"warning: {warning}")
    session.close()
    if ended_early(result):
        raise typer.Exit(1)


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[MODEL] [OPTIONS] [VLLM FLAGS]",
)(serve)
app.command("eval")(evaluate)
app.command()(fuzz)
app.command()(replay)
app.command()(shrink)
app.command()(explain)


def _embedded_model() -> Path:
    from vtoken.models import ensure_smollm2

    with model_progress(errors) as progress:
        return ensure_smollm2(progress=progress)


@contextmanager
def _traces(wanted: bool) -> Iterator[None]:
    """Show where an error came from before it becomes one line."""
    try:
        yield
    except VTokenError:
        if wanted:
            traceback.print_exc()
        raise


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """A spinner on a terminal, one line elsewhere, for what takes longer than two seconds."""
    if not errors.is_terminal:
        print(f"{what} ...", file=sys.stderr)
        yield
        return
    with errors.status(f"{what} (10 to 60 s) ..."):
        yield


if __name__ == "__main__":
    main()
