"""What has to be set in the environment before vLLM is imported."""

from __future__ import annotations

import logging
import os
import warnings


def prepare_environment(*, quiet: bool) -> None:
    """Settings of vLLM's that have to be in place before it is imported; the user's win.

    Args:
        quiet: nothing below an error is shown of vLLM's log.
    """
    defaults = {
        # Pinned threads on cores that other work uses make a step twenty times as long.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
        "VLLM_NO_USAGE_STATS": "1",
        # Standard output is for what the model says.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    # What Python's own tracker of shared memory finds at exit, it also clears away.
    tracker = "ignore:resource_tracker:UserWarning"
    # And what vLLM does in each of its processes, torch would rather see done otherwise.
    triton = "ignore::FutureWarning:vllm.triton_utils.dispatcher"
    known = [os.getenv("PYTHONWARNINGS"), tracker, triton]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, known))
    # Logged before vLLM has set up its log, so that Python prints it bare; on a CPU it is normal.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    if quiet:
        defaults |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        warnings.filterwarnings("ignore", module=r"vllm\.|torch\.|transformers\.")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
