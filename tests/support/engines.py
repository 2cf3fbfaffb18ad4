"""In-process vLLM engines for tests: started once, configured anew for each test.

An engine start costs seconds to tens of seconds, so tests share engines and exchange vToken's
configuration while the engine is idle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from support.exactness import Comparison, Life, Recorder, Reference, compare
from support.interpreter import use_interpreter, use_triton_attention
from vtoken.config import VTokenConfig

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
#: which of vLLM's model runners this process tests, "v1" or "v2"; see `interpreter.py`
RUNNER = os.environ.get("VTOKEN_TEST_RUNNER", "v1")
#: which attention kernels, "cpu" or "triton"
ATTENTION = os.environ.get("VTOKEN_TEST_ATTENTION", "cpu")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(RUNNER == "v2"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if (RUNNER == "v2" or ATTENTION == "triton") and not torch.cuda.is_available():
    use_interpreter()
if ATTENTION == "triton":
    use_triton_attention()

BLOCK = 16 if ATTENTION == "triton" else 32
#: every engine of this process: one that is garbage ends what the others share
_KEPT: list[Any] = []


@dataclass
class Served:
    """What a run produced and what was seen of it.

    `lives` are in order of admission; a preempted request has several.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    lives: list[Life]
    report: dict[str, Any]
    free_before: int

    def tokens_of(self, life: Life) -> list[int]:
        index = int(life.req_id.split("-")[0])
        return self.prompts[index] + self.outputs[index]


@contextmanager
def _async_scheduling() -> Iterator[None]:
    """Undo the CPU platform's `async_scheduling = False` while an engine is configured."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


class Engine:
    """A shared engine.

    Args:
        checkpoint: model folder.
        blocks: size of the KV pool, the null block included.
        chunk: most tokens of a step, so longer prompts are prefilled in chunks.
        stock: plain vLLM, without vToken.
        settings: vToken's configuration at the start, which decides what CUDA graphs hold.
        more: arguments of `LLM`, also in place of those that are given here.
        asynchronous: with vLLM's async scheduling, which its CPU platform switches off; this
            harness switches it on again, so that two steps are in flight.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        blocks: int,
        chunk: int = 96,
        max_model_len: int = 512,
        prefix_caching: bool = True,
        stock: bool = False,
        asynchronous: bool = False,
        settings: VTokenConfig | None = None,
        **more: Any,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        from vtoken.vllm.enable import engine_kwargs

        extra = {} if stock else engine_kwargs(settings or VTokenConfig())
        if asynchronous:
            extra["scheduler_cls"] = extra["scheduler_cls"].replace(".VToken", ".VTokenAsync")
        self.checkpoint = checkpoint
        with _async_scheduling() if asynchronous else nullcontext():
            given = {
                "enforce_eager": True,
                "dtype": "float32",
                "block_size": BLOCK,
                "max_model_len": max_model_len,
                "num_gpu_blocks_override": blocks,
                "kv_cache_memory_bytes": 1 << 30,
                "max_num_batched_tokens": chunk,
                "max_num_seqs": 16,
                "enable_prefix_caching": prefix_caching,
                "disable_log_stats": True,
                "use_tqdm_on_load": False,
            }
            self.llm = LLM(str(checkpoint), **{**given, **extra, **more})
        _KEPT.append(self.llm)
        core = self.llm.llm_engine.engine_core.engine_core
        self.core = core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.checkpoint)

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def configure(self, **options: Any) -> None:
        """New vToken configuration, empty prefix cache."""
        settings = VTokenConfig(**options)
        self.scheduler.vtoken_configure(settings)
        self.runner.vtoken_configure(settings)
        assert self.llm.reset_prefix_cache()

    def submit(
        self,
        req_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        priority: int = 0,
        **more: Any,
    ) -> str:
        """Add a request; returns the id that the engine gave it."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **more
        )
        internal: str = self.llm.llm_engine.add_request(
            req_id, {"prompt_token_ids": list(token_ids)}, params, priority=priority
        )
        return internal

    def session_turn(self, token_ids: Sequence[int], stops: Sequence[int]) -> Any:
        """One turn of the streaming-input session "session", for the engine core itself: vLLM's
        synchronous front end has no sessions."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=60, temperature=0.0, stop_token_ids=list(stops), detokenize=False
        )
        return self.llm.llm_engine.input_processor.process_inputs(
            "session",
            {"prompt_token_ids": list(token_ids)},
            params,
            supported_tasks=("generate",),
            resumable=True,
        )

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        asked: Sequence[dict[str, Any]] | None = None,
        **more: Any,
    ) -> Served:
        """Run prompts together to the end, watching every step.

        Args:
            asked: what each request asks for itself (`extra_args`).
        """
        free = self.free
        recorder = Recorder(self.llm)
        with recorder.watching():
            for index, prompt in enumerate(prompts):
                own = more if asked is None else {**more, "extra_args": asked[index]}
                self.submit(str(index), prompt, max_tokens, **own)
            outputs = self.drain()
        report = self.scheduler.vtoken_report() if hasattr(self.scheduler, "vtoken_report") else {}
        return Served(
            [list(p) for p in prompts],
            [outputs.get(str(i), []) for i in range(len(prompts))],
            recorder.lives,
            report,
            free,
        )

    def drain(self) -> dict[str, list[int]]:
        """Step until no request is left; output ids by request."""
        outputs: dict[str, list[int]] = {}
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            self.step(outputs)
        return outputs

    def step(self, outputs: dict[str, list[int]]) -> None:
        for result in self.llm.llm_engine.step():
            outputs[result.request_id] = list(result.outputs[0].token_ids)

    def compare(self, served: Served) -> Comparison:
        total = Comparison()
        for life in served.lives:
            total.add(compare(self.reference, life, served.tokens_of(life)))
        return total


@cache
def engine_on(which: str) -> Engine:
    """One engine per kind and test process: "tiny", "tiny stock", "tiny async", "smollm2".

    The tiny ones have a pool of 23 blocks of 32 tokens, steps of at most 96 tokens, and a context
    in which a prompt and 500 decode steps fit.
    """
    from vtoken.models import ensure_smollm2, ensure_tiny_llama

    if which == "smollm2":
        return Engine(ensure_smollm2(), blocks=64, chunk=256, max_model_len=1024)
    return Engine(
        ensure_tiny_llama(),
        blocks=24,
        max_model_len=640,
        stock="stock" in which,
        asynchronous="async" in which,
    )
