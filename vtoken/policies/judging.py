"""What a policy is asked, and whether its answer can be carried out: no token table is touched
before that is settled."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vtoken.core.arrays import IntArray
from vtoken.policies.base import PolicyView


class Protection(Protocol):
    """The options of eviction that are the same for every policy."""

    @property
    def slack(self) -> int: ...
    @property
    def keep_first(self) -> int: ...
    @property
    def keep_recent(self) -> int: ...
    @property
    def keep_prompt(self) -> bool: ...


def view_to_ask(
    live: npt.NDArray[np.bool_],
    num_live: int,
    *,
    budget: int,
    protection: Protection,
    num_prompt: int,
) -> PolicyView | None:
    """What the policy is asked before a step, or None if nothing has to go or nothing may.

    The step's first new token counts; the newest computed token always stays.

    Args:
        live: liveness per id, bool `[num_tokens]`; of the view it is read only.
        num_prompt: ids below are of the prompt.
    """
    over = num_live + 1 - budget
    if over <= protection.slack:
        return None
    newest = len(live) - 1
    first, stop = protection.keep_first, newest - protection.keep_recent
    if protection.keep_prompt:
        first = max(first, num_prompt)
    if first or stop < newest:
        excess = min(over, int(np.count_nonzero(live[first : max(first, stop)])))
    else:
        excess = min(over, num_live - 1)
    if excess <= 0:
        return None
    seen = live[:]
    seen.flags.writeable = False  # of this view of the table, which is all that a policy gets
    return PolicyView(len(live), seen, num_live, excess, first, stop)


class Unfit(Exception):
    """An answer that cannot be carried out; the text says what is wrong with it."""


def judged(answer: object, view: PolicyView) -> IntArray:
    """A policy's answer as int32 `[n]`, once nothing in it can do harm."""
    ids = np.asarray(answer)
    if ids.ndim == 1 and ids.size == 0:
        return np.empty(0, dtype=np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise Unfit(f"its victims are no list of token ids, but {ids.dtype} {list(ids.shape)}")
    low, high = int(ids.min()), int(ids.max())
    if low < view.first or high >= view.end:
        wrong = low if low < view.first else high
        if not 0 <= wrong < view.num_tokens:
            raise Unfit(f"it named token {wrong}, and the request has {view.num_tokens}")
        if not view.live[wrong]:
            raise Unfit(f"it named token {wrong}, which is dead")
        if wrong == view.num_tokens - 1:
            raise Unfit(f"it named token {wrong}, which is the newest")
        raise Unfit(f"it named token {wrong}, which is protected")
    alive = view.live[ids]
    if not alive.all():
        raise Unfit(f"it named token {int(ids[~alive][0])}, which is dead")
    if ids.size > 1:
        ordered = np.sort(ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            raise Unfit(f"it named token {int(twice[0])} twice")
    return ids.astype(np.int32)
