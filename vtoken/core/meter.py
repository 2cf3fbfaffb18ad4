"""Blocks held, measured four ways over the same eviction decisions.

- native: nothing evicted, ceil(tokens / block size) per request;
- naive: eviction without reclamation, the logical blocks with at least one live token;
- vtoken: the blocks a request holds;
- ideal: ceil(live tokens / block size) per request.

Sums run over requests, so a block shared by two requests counts once for each in all four.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vtoken.core.request_table import RequestTable


@dataclass
class BlockUsage:
    """Blocks held by all requests together, in the four systems compared."""

    native: int = 0
    naive: int = 0
    vtoken: int = 0
    ideal: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class BlockMeter:
    """Running totals and peaks; one request's share is updated when it is scheduled."""

    def __init__(self) -> None:
        self.now = BlockUsage()
        self.peak = BlockUsage()
        self._shares: dict[str, tuple[int, int, int, int]] = {}

    def update(self, table: RequestTable) -> None:
        """Take the request's share as of now into the totals and the peaks."""
        size = table.block_size
        share = (
            -(-table.logical_len // size),
            table.naive_blocks,
            table.num_blocks,
            -(-table.num_live // size),
        )
        old = self._shares.get(table.req_id)
        if old == share:
            return
        self._shares[table.req_id] = share
        self._add(share, old or (0, 0, 0, 0))

    def drop(self, req_id: str) -> None:
        """Forget a request that finished or was preempted."""
        old = self._shares.pop(req_id, None)
        if old is not None:
            self._add((0, 0, 0, 0), old)

    def _add(self, share: tuple[int, int, int, int], old: tuple[int, int, int, int]) -> None:
        self.now.native += share[0] - old[0]
        self.now.naive += share[1] - old[1]
        self.now.vtoken += share[2] - old[2]
        self.now.ideal += share[3] - old[3]

    def end_step(self) -> None:
        """Close a step: each system's peak is the largest total it had at the end of a step."""
        now, peak = self.now, self.peak
        peak.native = max(peak.native, now.native)
        peak.naive = max(peak.naive, now.naive)
        peak.vtoken = max(peak.vtoken, now.vtoken)
        peak.ideal = max(peak.ideal, now.ideal)
