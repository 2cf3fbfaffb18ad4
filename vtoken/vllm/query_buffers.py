"""Queries that a full CUDA graph copies for the score tap."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class QueryBuffers:
    """Where captured copies of q lie: a buffer for each layer, which keeps its address.

    It is handed queries as a tap is, by every step that is captured; a replay fills the buffers
    again, and counts, without it.

    Args:
        names: of the layers.
        num_tokens: most tokens of a step that is captured. Longer ones are not copied.
    """

    def __init__(self, names: Sequence[str], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._places = {name: place for place, name in enumerate(names)}
        self._buffers: dict[str, torch.Tensor] = {}
        self._counts = torch.zeros(0, dtype=torch.int64)

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate for queries `[tokens, *shape]` of every layer. Before anything is captured, or
        the memory would be the graph's own.

        Args:
            shape: heads and head_dim.
        """
        if not self._buffers:
            for name in self._places:
                self._buffers[name] = torch.zeros(
                    (self.num_tokens, *shape), dtype=dtype, device=device
                )
            self._counts = torch.zeros(len(self._places), dtype=torch.int64, device=device)

    def hand_over(self, name: str, query: torch.Tensor) -> None:
        """Two operations on tensors that stay, whatever runs them."""
        if len(query) > self.num_tokens:
            return
        self.reserve(tuple(query.shape[1:]), query.dtype, query.device)
        self._buffers[name][: len(query)].copy_(query)
        self._counts[self._places[name]].add_(1)

    def query(self, name: str) -> torch.Tensor:
        """What the layer has last handed over, `[num_tokens, heads, head_dim]`."""
        return self._buffers[name]

    def mark(self) -> torch.Tensor | None:
        """Where the counts stand, on the device; the host does not wait."""
        return self._counts.clone() if self._buffers else None

    def since(self, mark: torch.Tensor | None) -> dict[str, int]:
        """How often each layer has handed over since a mark, or ever. One transfer."""
        counts = self._counts if mark is None else self._counts - mark
        found = counts.tolist() if self._buffers else [0] * len(self._places)
        return dict(zip(self._places, found, strict=True))
