"""KV cache spec and manager: vLLM's allocator counts physical instead of logical tokens.

`VTokenAttentionSpec` equals `FullAttentionSpec`; its type alone makes vLLM's coordinator build
`VTokenManager`. `allocate_slots`, the coordinator and BlockPool stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vtoken.core.arrays import BoolArray, IntArray
from vtoken.core.reclaimer import Reclaimer


@dataclass(frozen=True, kw_only=True)
class VTokenAttentionSpec(FullAttentionSpec):
    """Full attention whose blocks are managed through a token table.

    Attributes:
        why_no_scores: why the model's layers have no score tap, or empty: the one way in which
            the scheduler learns what only the worker can see.
    """

    why_no_scores: str = ""

    @classmethod
    def of(cls, spec: FullAttentionSpec, *, why_no_scores: str = "") -> VTokenAttentionSpec:
        values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
        return cls(**values, why_no_scores=why_no_scores)

    @classmethod
    def merge(cls, specs: list[VTokenAttentionSpec]) -> VTokenAttentionSpec:  # type: ignore[override]
        # vLLM's own names its fields one by one.
        return replace(super().merge(specs), why_no_scores=specs[0].why_no_scores)


class VTokenManager(FullAttentionManager):
    """A request's block list, kept in the physical order of its token table.

    `reclaimer` is set by the scheduler right after construction; without it (None) every method
    behaves as vLLM's own.
    """

    reclaimer: Reclaimer | None = None
    #: whether an allocation wanted more blocks than are free, since the scheduler last looked
    starved = False
    #: blocks of `reserve`, by id
    reserved: dict[int, KVCacheBlock]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reserved = {}

    # ---- overrides of vLLM

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        if self.reclaimer is not None:
            num_tokens = self.reclaimer.physical_need(request_id, num_tokens)
        count: int = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        if self.reclaimer is not None and count > self.block_pool.get_num_free_blocks():
            self.reclaimer.yield_headroom()
        self.starved = self.starved or count > self.block_pool.get_num_free_blocks()
        return count

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        if self.reclaimer is not None:
            num_tokens = self.reclaimer.physical_need(request_id, num_tokens)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        return blocks

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # After a request's first eviction its later KV depends on the pruned context, and its
        # blocks no longer hold what their index says: nothing of it may be hit any more.
        if self.reclaimer is not None:
            table = self.reclaimer.tables.get(request.request_id)
            if table is not None and table.evicted:
                return
        super().cache_blocks(request, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        # Finish, abort and preemption all pass here; a late plan for the request is dropped.
        if self.reclaimer is not None:
            self.reclaimer.drop(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    # ---- PoolPort, for the reclaimer

    def private(self, blocks: IntArray) -> BoolArray:
        pool = self.block_pool.blocks
        return np.array([pool[b].ref_cnt == 1 for b in blocks.tolist()], dtype=np.bool_)

    def uncache(self, blocks: IntArray) -> None:
        cached = {b for b in blocks.tolist() if self.block_pool.blocks[b].block_hash is not None}
        if cached:
            self.block_pool.evict_blocks(cached)

    def set_blocks(
        self, req_id: str, keep: Sequence[int], dropped: Sequence[int], joined: Sequence[int] = ()
    ) -> None:
        pool = self.block_pool.blocks
        for block in joined:  # its one reference was the backend's and is the request's now
            del self.reserved[block]
        self.req_to_blocks[req_id][:] = [pool[b] for b in keep]
        if dropped:
            # Tail blocks first, as vLLM frees them, so that prefixes stay hit-able longest.
            self.block_pool.free_blocks([pool[b] for b in reversed(dropped)])

    def reserve(self, count: int) -> list[int]:
        blocks = self.block_pool.get_new_blocks(min(count, self.block_pool.get_num_free_blocks()))
        self.reserved.update((block.block_id, block) for block in blocks)
        return [block.block_id for block in blocks]

    def unreserve(self, blocks: Sequence[int]) -> None:
        self.block_pool.free_blocks([self.reserved.pop(block) for block in blocks])

    # ---- for the scheduler

    def block_count(self, req_id: str) -> int:
        return len(self.req_to_blocks[req_id])

    def block_ids_from(self, req_id: str, first: int) -> list[int]:
        """Ids of the request's blocks from list index `first` on."""
        return [block.block_id for block in self.req_to_blocks[req_id][first:]]


def register_spec() -> None:
    """Tell vLLM's registry about the spec; idempotent, as plugins may load twice."""
    # The registry fills itself only while it is empty; ours must not be the first entry.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        VTokenAttentionSpec,
        manager_class=VTokenManager,
        uniform_type_base_spec=FullAttentionSpec,
    )
