"""What the worker knows of each row with holes, so that it is told news and not the whole.

A row with holes is read through a view that skips them: a list of its live slots, in which the
slots of a step's own tokens come last. The worker keeps the list (`vtoken.kv.translation`). In
steady state it only loses the slots of tokens evicted since and gains those of new ones; after a
structural change, which moves tokens or takes blocks, it is told in full.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.arrays import IntArray
from vtoken.core.layout import StepLayout
from vtoken.core.request_table import RequestTable

_NONE = np.empty(0, dtype=np.int32)


class ViewNews:
    """Per request whose view the worker has: the slots it has to strike since it was told last.

    Attributes:
        told_in_full: how often a view was told in full, since start.
    """

    def __init__(self) -> None:
        self.told_in_full = 0
        self._gone: dict[str, list[IntArray]] = {}

    def evicted(self, table: RequestTable, token_ids: IntArray) -> None:
        """These tokens have died; they keep their slots for the time being."""
        gone = self._gone.get(table.req_id)
        if gone is not None and len(token_ids):
            gone.append(table.slots_at(table.positions[token_ids]))

    def forget(self, req_id: str) -> None:
        """The row was restructured, or is gone: next time it is told in full."""
        self._gone.pop(req_id, None)

    def tell(self, table: RequestTable, layout: StepLayout) -> None:
        """Fill in the view's part of `layout`, once the step's tokens are in the table."""
        if table.num_holes == 0:
            self.forget(table.req_id)
            return
        layout.holes = True
        gone = self._gone.get(table.req_id)
        if gone is None:
            layout.live_slots = table.live_slots()
            self.told_in_full += 1
        else:
            layout.gone = np.concatenate(gone) if gone else _NONE
        self._gone[table.req_id] = []
