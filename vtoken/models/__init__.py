"""Local checkpoints for demos and tests, built once and kept in a cache folder outside the repo.

`smollm2` holds a small real model, `tiny` a random one that loads in a moment, and `checkpoint`
what both share: building atomically, finding again, telling a good checkpoint from a bad one.
"""

from vtoken.models.smollm2 import ensure_smollm2
from vtoken.models.tiny import ensure_tiny_llama

__all__ = ["ensure_smollm2", "ensure_tiny_llama"]
