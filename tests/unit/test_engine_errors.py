"""An error of an engine process reaches the server that started it: the first one, whole."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vtoken.errors import (
    EngineFailed,
    InvariantViolation,
    Rejected,
    UnsupportedConfiguration,
    VTokenError,
)
from vtoken.vllm import engine_errors
from vtoken.vllm.engine_errors import ERROR_FOLDER, Mailbox, leave, refusal, watch_log


def test_without_a_server_nothing_is_left_and_nothing_changes() -> None:
    error = UnsupportedConfiguration("not this")
    assert ERROR_FOLDER not in os.environ
    assert not leave(error)
    assert refusal(error) is error
    before = list(logging.getLogger("vllm").handlers)
    watch_log()
    assert logging.getLogger("vllm").handlers == before


@pytest.mark.parametrize(
    "error",
    [
        Rejected("a budget of 0"),
        UnsupportedConfiguration("not this model"),
        EngineFailed("out of memory"),
        InvariantViolation("I2", "two tokens", req_id="r", token_id=0, slot=17, before={"a": 1}),
    ],
)
def test_the_first_error_arrives_as_it_was(error: VTokenError) -> None:
    with Mailbox.open() as mailbox:
        assert mailbox.error() is None
        assert leave(error)
        leave(Rejected("a consequence"))
        arrived = mailbox.error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert ERROR_FOLDER not in os.environ


def test_a_refusal_in_a_child_process_is_a_quiet_exit() -> None:
    script = (
        "import multiprocessing\n"
        "from vtoken.errors import UnsupportedConfiguration\n"
        "from vtoken.vllm.engine_errors import refusal\n"
        "def child():\n"
        "    raise refusal(UnsupportedConfiguration('not this'))\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('fork').Process(target=child)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    raise SystemExit(process.exitcode)\n"
    )
    with Mailbox.open() as mailbox:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (2, "")
        assert isinstance(mailbox.error(), UnsupportedConfiguration)


@pytest.fixture
def vllm_log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    yield logger
    logger.handlers[:] = before


def run_engine_core(logger: logging.Logger, error: Exception, message: str) -> None:
    """Named as vLLM's function whose logged errors end an engine."""
    try:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("engine") from cause
    except RuntimeError:
        logger.exception(message)


def test_a_violation_in_vllms_log_is_left_for_the_server(vllm_log: logging.Logger) -> None:
    with Mailbox.open() as mailbox:
        watch_log()
        watch_log()
        assert sum(isinstance(h, engine_errors._Recorder) for h in vllm_log.handlers) == 1
        run_engine_core(vllm_log, InvariantViolation("L5", "leak"), "fatal")
        assert isinstance(mailbox.error(), InvariantViolation)


def test_another_error_is_left_only_if_it_ends_the_engine(vllm_log: logging.Logger) -> None:
    child = vllm_log.getChild("v1.engine.core")
    with Mailbox.open() as mailbox:
        watch_log()
        try:
            raise RuntimeError("of a request")
        except RuntimeError:
            child.exception("a call failed")
        assert mailbox.error() is None
        run_engine_core(child, KeyError("x"), "fatal")
        assert isinstance(mailbox.error(), EngineFailed)
        assert str(mailbox.error()) == (
            "vLLM's engine failed (RuntimeError: engine); its log above says where"
        )


def test_what_vllm_refuses_while_it_starts_is_the_users(vllm_log: logging.Logger) -> None:
    def run_engine_core() -> None:
        try:
            raise ValueError("max_model_len is\n too large")
        except ValueError:
            vllm_log.exception("EngineCore failed to start.")

    with Mailbox.open() as mailbox:
        watch_log()
        run_engine_core()
        error = mailbox.error()
    assert isinstance(error, Rejected)
    assert str(error).endswith("with these options: max_model_len is too large")


def test_a_pool_without_a_block_is_told_with_the_way_out() -> None:
    """The text is vLLM's, which names an option that makes no difference here."""
    told = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"
    error = engine_errors.refused_start(ValueError(told))
    assert str(error).startswith("the KV pool has no room for a single block; give the pool more")
    assert "--kv-memory-mb of vtoken run" in str(error)
