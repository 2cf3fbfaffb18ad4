"""Where one token's K and V lie in a paged KV cache: one adapter per memory layout.

vLLM gives each layer a view `[blocks, kv_heads, tokens, 2 * head_dim]` of one allocation shared
by all layers. What the last two dimensions mean differs by backend:

- `TokenRowLayout`: row t holds K then V of token t (the GPU backends, any stride order);
- `TransposedKeyLayout`: per (block, head) the first half of the memory is K transposed,
  `[head_dim, tokens]`, the second half is V, `[tokens, head_dim]` (vLLM's CPU kernels `vec` and
  `vec16`). Copying a "row" of the view there would move pieces of many tokens.

With two KV heads both have the same shape, so an adapter is never guessed from shapes: it is
chosen by the attention backend and proven at start by `probe_layout`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vtoken.errors import Rejected, UnsupportedConfiguration
from vtoken.kv.host_copy import HostPart, host_parts

if TYPE_CHECKING:
    from vtoken.kv.triton_copy import DevicePart


def stack_layers(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views `[n, blocks, heads, tokens, content]` that together cover all layers, in order.

    One view when the layers lie at equal distances in one allocation (vLLM's case), so that a
    move is one operation for all layers; else one view per layer.

    Raises:
        UnsupportedConfiguration: the layers differ in shape or dtype.
    """
    first = layers[0]
    for layer in layers:
        if layer.shape != first.shape or layer.dtype != first.dtype or layer.dim() != 4:
            raise UnsupportedConfiguration(
                f"layers have different KV cache shapes ({tuple(first.shape)} and "
                f"{tuple(layer.shape)}); vToken needs one uniform attention type: choose a model "
                "whose layers all use full attention with equal heads"
            )
    same_storage = all(
        layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and layer.stride() == first.stride()
        for layer in layers
    )
    gaps = {
        after.storage_offset() - before.storage_offset()
        for before, after in itertools.pairwise(layers)
    }
    if len(layers) > 1 and same_storage and len(gaps) == 1 and min(gaps) > 0:
        shape = (len(layers), *first.shape)
        strides = (gaps.pop(), *first.stride())
        return [first.as_strided(shape, strides, first.storage_offset())]
    return [layer.unsqueeze(0) for layer in layers]


def device_parts(views: Sequence[torch.Tensor]) -> list[DevicePart]:
    """The parts of a cache for copies by Triton; none elsewhere than on a CUDA device.

    Args:
        views: as `KVLayout.parts` gives them.
    """
    if any(view.device.type != "cuda" for view in views):
        return []
    try:
        from vtoken.kv.triton_copy import DevicePart
    except ImportError:
        return []
    return [DevicePart(view) for view in views]


class KVLayout(ABC):
    """Reads and writes tokens of a stack of layers by slot.

    Args:
        caches: result of `stack_layers`.
    """

    #: name in messages
    name: str

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self.caches = list(caches)
        _, blocks, heads, tokens, content = self.caches[0].shape
        self.num_layers = sum(cache.shape[0] for cache in self.caches)
        self.num_blocks = int(blocks)
        self.num_heads = int(heads)
        self.block_size = int(tokens)
        self.head_dim = int(content) // 2
        self.dtype = self.caches[0].dtype
        self.device = self.caches[0].device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.num_layers * self.num_heads * 2 * self.head_dim * self.dtype.itemsize

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """K and V of `slots` (int64 `[n]`): `[n, layers, 2, heads, head_dim]`, a copy."""
        parts = [self._read(cache, slots) for cache in self.caches]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Store what `read` gave at other slots (distinct, int64 `[n]`)."""
        first = 0
        for cache in self.caches:
            last = first + cache.shape[0]
            self._write(cache, slots, values[:, first:last])
            first = last

    def copy_slots(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy K and V of `sources` to `targets` in all layers, and store to no other slot: what
        `read` and `write` do, and faster in host memory. Fastest where the slots of a block come
        together, as plans have them.

        Args:
            sources, targets: int64 `[n]` each; targets are distinct and no target is a source.

        Raises:
            Rejected: there are not as many targets as sources.
            IndexError: a slot is outside of the cache; in host memory only, since a device would
                have to be waited for.
        """
        if len(sources) != len(targets):
            raise Rejected(f"{len(sources)} sources and {len(targets)} targets")
        if len(sources) == 0:
            return
        if not self._host_parts:
            for device_part in self._device_parts:
                device_part.copy(sources, targets)
            if not self._device_parts:
                self.write(targets, self.read(sources))
            return
        end = self.num_blocks * self.block_size
        slots = torch.stack((sources, targets)).numpy()
        if slots.min() < 0 or slots.max() >= end:
            raise IndexError(f"slots {slots.min()} to {slots.max()} of a cache of {end}")
        for part in self._host_parts:
            part.copy(*slots)

    @cached_property
    def _host_parts(self) -> list[HostPart]:
        return host_parts(self.parts())

    @cached_property
    def _device_parts(self) -> list[DevicePart]:
        return device_parts(self.parts())

    def parts(self) -> list[torch.Tensor]:
        """Views `[layers, blocks, tokens, heads, content]` that together are all of K and V, any
        strides. None: copies go through `read` and `write`."""
        return []

    def _split(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // self.block_size, slots % self.block_size

    @abstractmethod
    def _read(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _write(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None: ...

    def for_layer(self, cache: torch.Tensor) -> KVLayout:
        """The same layout over one layer's `[blocks, heads, tokens, content]` (scratch space)."""
        return type(self)([cache.unsqueeze(0)])


class TokenRowLayout(KVLayout):
    """Row t of `[tokens, 2 * head_dim]` is K then V of token t; strides are free."""

    name = "token rows"

    def parts(self) -> list[torch.Tensor]:
        return [cache.transpose(2, 3) for cache in self.caches]

    def _read(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        block, offset = self._split(slots)
        rows = cache[:, block, :, offset]  # [n, layers, heads, content]
        return rows.unflatten(-1, (2, self.head_dim)).transpose(2, 3)

    def _write(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        block, offset = self._split(slots)
        cache[:, block, :, offset] = values.transpose(2, 3).flatten(-2)


class TransposedKeyLayout(KVLayout):
    """K transposed per (block, head), V in rows after it; needs contiguous (block, head) runs."""

    name = "transposed keys"

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        super().__init__(caches)
        tokens, content = self.block_size, 2 * self.head_dim
        for cache in self.caches:
            if cache.stride()[-2:] != (content, 1):
                raise UnsupportedConfiguration(
                    f"KV cache strides {tuple(cache.stride())} do not keep a head's block in one "
                    "run, as the CPU kernels need; use vLLM's default KV cache layout"
                )
        self._keys = []
        self._values = []
        for cache in self.caches:
            outer, strides = cache.shape[:3], cache.stride()[:3]
            start = cache.storage_offset()
            half = tokens * self.head_dim
            self._keys.append(
                cache.as_strided((*outer, self.head_dim, tokens), (*strides, tokens, 1), start)
            )
            self._values.append(
                cache.as_strided(
                    (*outer, tokens, self.head_dim), (*strides, self.head_dim, 1), start + half
                )
            )

    def parts(self) -> list[torch.Tensor]:
        keys = [keys.permute(0, 1, 4, 2, 3) for keys in self._keys]
        return keys + [values.transpose(2, 3) for values in self._values]

    def _index(self, cache: torch.Tensor) -> int:
        return next(i for i, mine in enumerate(self.caches) if mine is cache)

    def _read(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        block, offset = self._split(slots)
        which = self._index(cache)
        keys = self._keys[which][:, block, :, :, offset]  # [n, layers, heads, head_dim]
        values = self._values[which][:, block, :, offset]
        return torch.stack((keys, values), dim=2)

    def _write(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        block, offset = self._split(slots)
        which = self._index(cache)
        self._keys[which][:, block, :, :, offset] = values[:, :, 0]
        self._values[which][:, block, :, offset] = values[:, :, 1]
