"""vToken: a token-level virtualization boundary on vLLM's paged KV cache."""

__version__ = "0.1.0"
