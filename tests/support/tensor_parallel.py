"""Run as a program: one generation with N tensor-parallel ranks, result as JSON on stdout.

A program of its own, because the ranks are processes that import the main module again.
"""

from __future__ import annotations

import json
import os
import sys


def main(ranks: int, mode: str, policy: str = "random") -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(ranks))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the control's function
    import numpy as np
    from vllm import LLM, SamplingParams

    from vtoken.models import ensure_tiny_llama
    from vtoken.vllm.enable import engine_kwargs

    llm = LLM(
        str(ensure_tiny_llama()),
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=512,
        num_gpu_blocks_override=24,
        kv_cache_memory_bytes=1 << 28,
        max_num_batched_tokens=96,
        max_num_seqs=16,
        tensor_parallel_size=ranks,
        **engine_kwargs(policy=policy, budget=40, reclaim=mode, checks=3),
    )
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(3, 259, n).tolist()} for n in (150, 70, 200)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)
    results = llm.generate(prompts, params, use_tqdm=False)
    reports = llm.collective_rpc("vtoken_report")
    outputs = [list(result.outputs[0].token_ids) for result in results]
    llm.collective_rpc(_go_astray)
    try:
        llm.generate(prompts, params, use_tqdm=False)
        astray = ""
    except Exception as error:
        astray = str(error)
    result = {"outputs": outputs, "reports": reports, "astray": astray}
    print("RESULT " + json.dumps(result), flush=True)


def _go_astray(worker: object) -> None:
    """The second rank's layout differs from now on, as if it had missed a step."""
    runner = worker.model_runner  # type: ignore[attr-defined]
    if worker.rank == 1:  # type: ignore[attr-defined]
        original = runner._fingerprint
        runner._fingerprint = lambda batch: original(batch) + 1


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
