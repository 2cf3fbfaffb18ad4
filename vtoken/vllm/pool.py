"""The spec's read-only view over vLLM's block pool and the live token tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vtoken.core.flight import Flight
from vtoken.core.reclaimer import Reclaimer
from vtoken.core.request_table import RequestTable
from vtoken.vllm.kv_manager import VTokenManager


class BlockPoolView:
    """`vtoken_spec.view.PoolView` over vLLM's BlockPool. Blocks that the backend has reserved are
    headroom, or held by the plans in flight that draw them; to the laws nobody refers to them."""

    def __init__(self, manager: VTokenManager, reclaimer: Reclaimer) -> None:
        self._pool = manager.block_pool
        self._reserved = manager.reserved
        self._reclaimer = reclaimer
        self.block_size = int(manager.block_size)

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def free(self) -> list[int]:
        """Ids in vLLM's free queue, walked link by link, not derived from reference counts."""
        return [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]

    @property
    def headroom(self) -> list[int]:
        held = set(self.held)
        return [block for block in self._reserved if block not in held]

    @property
    def held(self) -> list[int]:
        beside = self._reclaimer.background
        return [] if beside is None else beside.held

    def ref_count(self, block: int) -> int:
        return 0 if block in self._reserved else int(self._pool.blocks[block].ref_cnt)

    def is_cached(self, block: int) -> bool:
        return self._pool.blocks[block].block_hash is not None


class EngineView:
    """`vtoken_spec.view.StateView` of a running engine."""

    def __init__(self, manager: VTokenManager, reclaimer: Reclaimer) -> None:
        self.pool = BlockPoolView(manager, reclaimer)
        self._reclaimer = reclaimer

    @property
    def requests(self) -> Mapping[str, RequestTable]:
        return {table.req_id: table for table in self._reclaimer.tables.values()}

    @property
    def flights(self) -> Sequence[Flight]:
        return self._reclaimer.flights
