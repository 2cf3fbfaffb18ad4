"""L10 progress: what relocation could give back, and for how long it has not.

A request is *overdue* in a step in which relocation could give back at least one of its blocks,
it has no plan in flight that is still in its time, and none of its blocks came back. Whoever runs
a reclamation backend counts such steps in a row, for requests whose fragmentation is above the
threshold, and for all while an allocation fails for want of a block; the law bounds the count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from .breach import Breach, breach, ints, is_protected, live_slots
from .view import RequestView, StateView


def reclaimable_blocks(view: StateView, request: RequestView) -> int:
    """How many blocks relocation within a request could give back.

    Only blocks before the one with the physical end take part, private ones (neither shared nor
    cached); n of them with L live tokens fit ceil(max(0, L - h) / block_size) blocks, where h are
    the holes before the physical end in the block that it is in, if that one is private.
    """
    size, blocks = view.pool.block_size, ints(request.blocks)
    last = request.physical_len // size
    live = Counter(slot // size for slot in live_slots(request))
    private = [b for b in blocks[:last] if not is_protected(view.pool, b)]
    holes = 0
    if last < len(blocks) and not is_protected(view.pool, blocks[last]):
        holes = request.physical_len % size - live[blocks[last]]
    rest = max(0, sum(live[block] for block in private) - holes)
    return len(private) - -(-rest // size)


def l10_progress(view: StateView, overdue: Mapping[str, int], *, bound: int) -> Iterator[Breach]:
    """`overdue` steps in a row, per request, are at most `bound`."""
    for req_id, steps in overdue.items():
        if steps > bound and req_id in view.requests:
            blocks = reclaimable_blocks(view, view.requests[req_id])
            if blocks > 0:
                what = f"{blocks} block(s) could have come back for {steps} steps"
                yield breach("L10", what, req_id=req_id, before=bound, after=steps)
