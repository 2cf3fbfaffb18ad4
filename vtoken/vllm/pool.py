"""The spec's read-only view over vLLM's block pool and the live token tables."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.core.block_pool import BlockPool

from vtoken.core.flight import Flight
from vtoken.core.request_table import RequestTable
from vtoken.core.table import TokenTable


class BlockPoolView:
    """`vtoken_spec.view.PoolView` over vLLM's BlockPool."""

    #: no block is set aside for evacuations or held by a plan in the modes `off` and `eager`
    headroom: tuple[int, ...] = ()
    held: tuple[int, ...] = ()

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size

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

    def ref_count(self, block: int) -> int:
        return int(self._pool.blocks[block].ref_cnt)

    def is_cached(self, block: int) -> bool:
        return self._pool.blocks[block].block_hash is not None


class EngineView:
    """`vtoken_spec.view.StateView` of a running engine."""

    def __init__(self, pool: BlockPool, tables: TokenTable) -> None:
        self.pool = BlockPoolView(pool, tables.block_size)
        self._tables = tables

    @property
    def requests(self) -> Mapping[str, RequestTable]:
        return {table.req_id: table for table in self._tables.values()}

    @property
    def flights(self) -> tuple[Flight, ...]:
        return ()
