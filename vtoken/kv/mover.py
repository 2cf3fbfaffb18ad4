"""The mover: copies KV entries from slot to slot, all layers at once, in bounded memory."""

from __future__ import annotations

import threading
from functools import partial

import torch

from vtoken.errors import Rejected
from vtoken.kv.layouts import KVLayout
from vtoken.kv.streams import Copy

DEFAULT_WORKSPACE_BYTES = 64 * 1024 * 1024


class Mover:
    """Executes moves in the order of the caller's stream, or prepares them for a copy stream.

    Args:
        layout: the KV cache.
        workspace_bytes: bound on the bytes in flight; larger plans are split. In host memory
            nothing is in flight, as each element goes straight to its target (`host_copy`).
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    ) -> None:
        if workspace_bytes < layout.token_bytes:
            raise Rejected(
                f"workspace of {workspace_bytes} bytes does not hold one token "
                f"({layout.token_bytes} bytes)"
            )
        self.layout = layout
        self.batch_tokens = workspace_bytes // layout.token_bytes
        self.moved_tokens = 0
        # Copies of a copy stream may run in another thread while the caller moves as well.
        self._counting = threading.Lock()

    @property
    def moved_bytes(self) -> int:
        """Bytes of K and V written so far."""
        return self.moved_tokens * self.layout.token_bytes

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy K and V of `sources` to `targets`, slots, int64 `[n]` each.

        Targets are distinct and no target is a source (a plan fills holes, which are nobody's
        source), so splitting into batches cannot read what an earlier batch wrote.
        """
        for first in range(0, len(sources), self.batch_tokens):
            batch_from = sources[first : first + self.batch_tokens]
            batch_to = targets[first : first + self.batch_tokens]
            self.layout.copy_slots(batch_from, batch_to)
            with self._counting:
                self.moved_tokens += len(batch_from)

    def copies(self, sources: torch.Tensor, targets: torch.Tensor, *, owner: str) -> list[Copy]:
        """The same as `move`, in pieces of at most `batch_tokens` that a copy stream runs later.

        The slots are copied here, so the caller may reuse its tensors. A piece counts in
        `moved_tokens` when it has run.

        Raises:
            Rejected: there are not as many targets as sources.
        """
        if len(sources) != len(targets):
            raise Rejected(f"{len(sources)} sources and {len(targets)} targets")
        pairs = zip(
            sources.clone().split(self.batch_tokens),
            targets.clone().split(self.batch_tokens),
            strict=True,
        )
        return [
            Copy(partial(self.move, batch_from, batch_to), batch_from, batch_to, owner)
            for batch_from, batch_to in pairs
            if len(batch_from)  # no slots at all split into one empty piece
        ]
