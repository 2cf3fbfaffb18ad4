"""Carries errors out of vLLM's engine processes to the server that started them.

The engine of a server runs in a process of its own, and vLLM tells the server no more than that
it failed. So `vtoken serve` names a folder in an environment variable; a process of the engine
that fails leaves the first error there, and the server raises it again, as one clear line.
Without the variable (vLLM started by its own flags, or in-process) nothing here does anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vtoken import errors
from vtoken.errors import EngineFailed, InvariantViolation, Rejected, VTokenError
from vtoken.options import reason_of

#: environment variable naming the folder in which an engine process leaves its error
ERROR_FOLDER = "VTOKEN_ERROR_FOLDER"

_NAME = "error.json"
_FIELDS = ("req_id", "token_id", "slot", "before", "after")
#: how vLLM refuses a pool that is smaller than the context, with the context that would fit
_SMALL_POOL = re.compile(
    r"max seq len \((\d+)\).* available KV cache memory(?:.* maximum model length is (\d+))?"
)
#: how it refuses one that holds nothing
_NO_BLOCK = "No available memory for the cache blocks"
#: the way out of every pool that is too small
MORE_MEMORY = (
    "give the pool more memory (--kv-memory-mb of vtoken run and vtoken eval, else "
    "--kv-cache-memory-bytes, --gpu-memory-utilization, or --num-gpu-blocks-override)"
)
#: vLLM's functions whose logged errors end the engine
_FATAL = ("run_engine_core", "worker_main", "monitor_engine_cores")


class Mailbox:
    """The server's side: a folder for the first error of its engine processes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _NAME

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[Mailbox]:
        """A new mailbox, named in the environment of all processes started inside."""
        with tempfile.TemporaryDirectory(prefix="vtoken-") as folder:
            os.environ[ERROR_FOLDER] = folder
            try:
                yield cls(Path(folder))
            finally:
                os.environ.pop(ERROR_FOLDER, None)

    def error(self) -> VTokenError | None:
        """What was left, if anything was."""
        try:
            values = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return _decode(values)


def leave(error: BaseException) -> bool:
    """Leave an error for the server. The first one wins, as later ones follow from it.

    Returns:
        whether this process has a server to leave it for.
    """
    folder = os.environ.get(ERROR_FOLDER)
    if not folder:
        return False
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(_encode(error), stream)
        # A link cannot replace a file, so whole or not at all, and only once.
        Path(folder, _NAME).hardlink_to(name)
    return True


def refusal(error: VTokenError) -> BaseException:
    """What to raise for a refused start.

    In an engine process of `vtoken serve` that is a quiet exit, since the server tells the reason
    and vLLM would print two stack traces. Everywhere else it is the error itself.
    """
    in_child = multiprocessing.parent_process() is not None
    return SystemExit(2) if in_child and leave(error) else error


def watch_log() -> None:
    """Leave the errors that vLLM logs when an engine process ends; idempotent."""
    logger = logging.getLogger("vllm")
    if os.environ.get(ERROR_FOLDER) and not any(isinstance(h, _Recorder) for h in logger.handlers):
        logger.addHandler(_Recorder(level=logging.ERROR))


def vtoken_error_in(error: BaseException | None) -> VTokenError | None:
    """The vToken error behind an exception of vLLM's, if there is one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, VTokenError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def refused_start(error: Exception) -> Rejected:
    """What vLLM refuses while it starts, in one line.

    Of a pool that is too small vLLM does not say why a budget makes no difference, and it names
    one of the options that give more.
    """
    reason = reason_of(error)
    small = _SMALL_POOL.search(reason)
    if _NO_BLOCK in reason:
        return Rejected(f"the KV pool has no room for a single block; {MORE_MEMORY}")
    if small is None:
        return Rejected(f"vLLM does not start with these options: {reason}")
    context, fits = small.groups()
    return Rejected(
        f"the KV pool is smaller than one request may be: a prompt of up to {context} tokens, the "
        "context, has to fit before anything of it is evicted, and again after a preemption; "
        f"lower --max-model-len{f' to {fits}' if fits else ''}, or {MORE_MEMORY}"
    )


class _Recorder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        known = vtoken_error_in(error)
        if known is not None:
            leave(known)
        elif record.funcName in _FATAL:
            leave(_foreign(error, record.getMessage()))


def _foreign(error: BaseException | None, message: str) -> VTokenError:
    """An error of vLLM's own: of the options, if it refuses a value while it starts."""
    if isinstance(error, ValueError) and "failed to start" in message:
        return refused_start(error)
    reason = message if error is None else f"{type(error).__name__}: {reason_of(error)}"
    return EngineFailed(f"vLLM's engine failed ({reason}); its log above says where")


def _encode(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, InvariantViolation):
        return {"type": type(error).__name__, "message": str(error)}
    values = {name: getattr(error, name) for name in _FIELDS}
    # What is not plain text becomes its readable form, which is all that the report shows.
    plain = {k: v if isinstance(v, (str, int, type(None))) else repr(v) for k, v in values.items()}
    return {"type": "InvariantViolation", "law": error.law, "message": error.message, **plain}


def _decode(values: dict[str, Any]) -> VTokenError:
    kind = getattr(errors, values["type"], EngineFailed)
    if kind is InvariantViolation:
        fields = {name: values[name] for name in _FIELDS}
        return InvariantViolation(values["law"], values["message"], **fields)
    error: VTokenError = kind(values["message"])
    return error
