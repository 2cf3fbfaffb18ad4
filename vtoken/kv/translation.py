"""The device-side translation cache: the slots of each row's live tokens, where rows have holes.

Kept on the worker between steps. It loses and gains single slots in steady state and is rebuilt
when the scheduler tells a row in full, which it does after a structural change.
"""

from __future__ import annotations

import numpy as np
import torch

from vtoken.core.arrays import IntArray
from vtoken.core.layout import StepLayout
from vtoken.errors import InvariantViolation


def on_device(slots: IntArray, device: torch.device | str) -> torch.Tensor:
    """Slots as int64 `[n]` on a device, in the order of its current stream.

    The host waits neither for the transfer nor for what the stream was given before, which it would
    from ordinary memory.
    """
    found = torch.from_numpy(slots.astype(np.int64))
    if torch.device(device).type == "cpu":
        return found
    return found.pin_memory().to(device, non_blocking=True)


def without(slots: torch.Tensor, dead: torch.Tensor, count: int) -> torch.Tensor:
    """`slots[~dead]`, of which there are `count`: told rather than found out, since a result whose
    length the device has to say makes the host wait for it.

    Args:
        slots: int64 `[n]`.
        dead: bool `[n]`.
    """
    alive = ~dead
    places = torch.where(alive, alive.cumsum(0) - 1, count).clamp_(max=count)
    # The last place takes what is dead. A slot of -1 is one that `count` promised too many.
    kept = slots.new_full((count + 1,), -1)
    return kept.scatter_(0, places, slots)[:count]


class TranslationCache:
    """Slots by request; int64 tensors on `device`.

    Attributes:
        rebuilds: rows told in full.
        updates: rows brought up to date with what came and went.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rebuilds = 0
        self.updates = 0
        self._device = device
        self._slots: dict[str, torch.Tensor] = {}

    def take(self, req_id: str, layout: StepLayout, count: int) -> torch.Tensor:
        """The row's live slots in this step, those of its `count` new tokens last, int64 `[n]`.

        Raises:
            InvariantViolation: L6, if the row is told as news and nothing is known of it.
        """
        if layout.live_slots is not None:
            self.rebuilds += 1
            slots = self._tensor(layout.live_slots)
        else:
            known = self._slots.get(req_id)
            if known is None:
                raise InvariantViolation(
                    law="L6", message="the view of an unknown row would be updated", req_id=req_id
                )
            self.updates += 1
            new = self._tensor(layout.new_slots[-count:])
            # A recycled hole is among those that are gone, in this step or an earlier one.
            if len(layout.gone):
                gone = np.unique(layout.gone)
                kept = layout.num_live - count
                if len(known) - len(gone) != kept:
                    raise InvariantViolation(
                        law="L6",
                        message="a row's view was told of as many slots as do not add up",
                        req_id=req_id,
                        before=len(known) - len(gone),
                        after=kept,
                    )
                # Both are without repeats; told so, the device does not look for any, whose number
                # the host would have to wait for.
                dead = torch.isin(known, self._tensor(gone), assume_unique=True)
                known = without(known, dead, kept)
            slots = torch.cat((known, new))
        self._slots[req_id] = slots
        return slots

    def forget(self, req_id: str) -> None:
        """The request has no row any more."""
        self._slots.pop(req_id, None)

    def _tensor(self, slots: IntArray) -> torch.Tensor:
        return on_device(slots, self._device)
