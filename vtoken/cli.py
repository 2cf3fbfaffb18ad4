"""The command line: `vtoken run` and `vtoken serve`.

Exit status: 0 done; 1 a law was violated or the engine failed; 2 wrong use or an unsupported
configuration, with one line that says why and what to do.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vtoken import __version__
from vtoken.config import VTokenConfig
from vtoken.errors import InvariantViolation, Rejected, VTokenError
from vtoken.options import load_config, read_prompts, write_json_atomically
from vtoken.policies import policy_names
from vtoken.report import Streamer, model_progress, run_result, show_summary

app = typer.Typer(
    help="Token-level KV eviction that gives memory back, on stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True)

PolicyOption = Annotated[
    str | None,
    typer.Option(help=f"Eviction policy: none, {', '.join(policy_names())}.", show_default="none"),
]
BudgetOption = Annotated[
    int | None, typer.Option(help="Tokens that a decode step may attend to, its own included.")
]
RatioOption = Annotated[
    float | None, typer.Option(help="The budget as a share of the request's length, in (0, 1].")
]
ReclaimOption = Annotated[
    str | None,
    typer.Option(
        help="eager: holes are recycled or closed at once; off: evict without reclaiming.",
        show_default="eager",
    ),
]
ChecksOption = Annotated[
    int | None, typer.Option(help="Online checks, 0 (off) to 3 (everything).", show_default="1")
]
SinksOption = Annotated[
    int | None, typer.Option(help="First tokens that streaming-llm keeps.", show_default="4")
]
SeedOption = Annotated[
    int | None, typer.Option(help="Seed of policies that draw.", show_default="0")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(help="vToken options from a TOML, JSON or YAML file; flags override it."),
]


def main() -> None:
    """Entry point of the `vtoken` script."""
    try:
        app()
    except VTokenError as error:
        _fail(error)


def _fail(error: VTokenError) -> None:
    if isinstance(error, InvariantViolation):
        errors.print(str(error), style="red", markup=False, highlight=False)
        raise SystemExit(1)
    text = " ".join(str(error).split())
    errors.print(f"vtoken: {text}", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(2)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"vtoken {__version__}")
        raise typer.Exit


@app.command()
def run(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; '-' or none reads standard input.")
    ] = None,
    policy: PolicyOption = None,
    budget: BudgetOption = None,
    budget_ratio: RatioOption = None,
    reclaim: ReclaimOption = None,
    checks: ChecksOption = None,
    sinks: SinksOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Prompts from a file: one a line, or JSON lines with 'prompt'."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or hub name.", show_default="embedded SmolLM2-135M"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option(help="Apply the model's chat template.")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Always produce --max-tokens tokens.")] = False,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per KV block.", show_default="32 on a CPU, else vLLM's"),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context length.", show_default="the model's")
    ] = None,
    kv_memory_mb: Annotated[int, typer.Option(min=1, help="Memory of the KV pool, in MiB.")] = 1024,
    dtype: Annotated[
        str | None, typer.Option(help="Model dtype.", show_default="float32 on a CPU")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result as JSON.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own log.")] = False,
) -> None:
    """Generate from prompts with eviction and reclamation, and report the blocks held."""
    settings = load_config(
        config,
        policy=policy,
        budget=budget,
        budget_ratio=budget_ratio,
        reclaim=reclaim,
        checks=checks,
        sinks=sinks,
        seed=seed,
    )
    texts = read_prompts(prompts or [], file)
    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise Rejected(f"the folder of {json_file} does not exist; make it first")
    _prepare_environment(verbose=verbose)
    checkpoint = model or str(_embedded_model())
    engine: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_memory_mb << 20,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "dtype": dtype,
        "disable_log_stats": True,
        "use_tqdm_on_load": verbose,
    }
    started = time.monotonic()
    with _busy("starting vLLM"):
        session = _start(checkpoint, settings, engine)
    with Streamer(texts, max_tokens) as streamer:
        outputs = session.generate(
            texts,
            max_tokens=max_tokens,
            temperature=temperature,
            chat=chat,
            ignore_eos=ignore_eos,
            on_text=streamer.on_text,
        )
    report = session.report()
    result = run_result(
        model=model or "SmolLM2-135M-Instruct",
        config=settings,
        outputs=outputs,
        report=report,
        free_before=session.free_before,
        seconds=time.monotonic() - started,
    )
    if json_file is not None:
        write_json_atomically(json_file, result)
    show_summary(result)
    session.close()


def _start(checkpoint: str, settings: VTokenConfig, engine: dict[str, Any]) -> Any:
    from vtoken.vllm.session import Session, find_violation

    try:
        return Session(checkpoint, settings, **engine)
    except VTokenError:
        raise
    except Exception as error:
        known = find_violation(error)
        if known is not None:
            raise known from None
        reason = " ".join(str(error).split())
        raise Rejected(f"vLLM does not start with these options: {reason}") from error


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    policy: PolicyOption = None,
    budget: BudgetOption = None,
    budget_ratio: RatioOption = None,
    reclaim: ReclaimOption = None,
    checks: ChecksOption = None,
    sinks: SinksOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
) -> None:
    """vLLM's OpenAI server with vToken on. All of vLLM's own flags pass through.

    Without --model the embedded SmolLM2-135M is served under the name "smollm2".
    """
    settings = load_config(
        config,
        policy=policy,
        budget=budget,
        budget_ratio=budget_ratio,
        reclaim=reclaim,
        checks=checks,
        sinks=sinks,
        seed=seed,
    )
    _prepare_environment(verbose=True)
    flags = list(context.args)
    if not any(flag == "--model" or flag.startswith("--model=") for flag in flags):
        flags += ["--model", str(_embedded_model()), "--served-model-name", "smollm2"]
    from vtoken.vllm.server import serve_forever

    serve_forever(settings, flags)


def _embedded_model() -> Path:
    from vtoken.models import ensure_smollm2

    with model_progress(errors) as progress:
        return ensure_smollm2(progress=progress)


def _prepare_environment(*, verbose: bool) -> None:
    """Settings of vLLM's that have to be in place before it is imported; the user's win."""
    defaults = {
        # Pinned threads on cores that other work uses make a step twenty times as long.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not verbose:
        defaults |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        warnings.filterwarnings("ignore", module=r"vllm\.|torch\.")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """A spinner on a terminal, one line elsewhere, for what takes longer than two seconds."""
    if not errors.is_terminal:
        print(f"{what} ...", file=sys.stderr)
        yield
        return
    with errors.status(f"{what} (20 to 60 s) ..."):
        yield


if __name__ == "__main__":
    main()
