"""vLLM's GPU paths on a machine without a GPU: Triton kernels run in Triton's interpreter.

To be called before vLLM is imported, and in a process that is used for nothing else: what vLLM
finds of Triton at import decides which of its paths exist. A harness of tests; no product code
does anything of the kind.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace


class _Active:
    """As much of a Triton driver as vLLM asks for."""

    @classmethod
    def is_active(cls) -> bool:
        return True


def use_interpreter() -> None:
    """Let vLLM keep Triton, in the interpreter.

    Raises:
        RuntimeError: vLLM is imported already.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("the interpreter has to be chosen before vllm is imported")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_Active, compiler=None)  # type: ignore[assignment]


def use_triton_attention() -> None:
    """Let vLLM's CPU platform choose vLLM's Triton attention, with the GPU's layout of the cache
    and blocks of 16 tokens. Call `use_interpreter` before it."""
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Asked for by the kernel's choice of tiles; there is no device that could answer.
    torch.cuda.get_device_capability = lambda *_: (8, 0)  # type: ignore[assignment]
    register_backend(
        AttentionBackendEnum.CPU_ATTN,
        "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    )
