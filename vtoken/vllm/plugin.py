"""vLLM's entry point `vllm.general_plugins`: runs in every process, perhaps twice.

It registers the KV cache spec, and in processes of `vtoken serve` also listens for errors; an
installed but unused vToken changes nothing. vLLM only logs a plugin that fails to load; a test
asserts that this one loads.
"""

from __future__ import annotations


def register() -> None:
    """Make `VTokenAttentionSpec` known to vLLM; idempotent."""
    from vtoken.vllm.engine_errors import watch_log
    from vtoken.vllm.kv_manager import register_spec

    watch_log()
    register_spec()
