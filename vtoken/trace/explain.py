"""Says in words which events led to the slot that a diverging trace stumbles over."""

from __future__ import annotations

from collections.abc import Sequence

from vtoken.errors import Rejected
from vtoken.trace.format import Header, Record
from vtoken.trace.replay import replay_records


def explain(header: Header, records: Sequence[Record]) -> list[str]:
    """The shortest chain of events that touch the offending slots, oldest first, in words.

    Raises:
        Rejected: the spec accepts the trace.
    """
    divergence = replay_records(header, enumerate(records, start=1)).divergence
    if divergence is None:
        raise Rejected("the spec accepts this trace; there is nothing to explain")
    size = header.block_size
    culprit = records[divergence.line - 1]
    slots = {*culprit.slots, *culprit.reads, *culprit.sources, *culprit.targets}
    blocks = {*culprit.blocks, *(slot // size for slot in slots)}
    chain = []
    for number, record in enumerate(records[: divergence.line - 1], start=1):
        own = {*record.slots, *record.sources, *record.targets}
        touched = slots & own
        mine = record.req == culprit.req
        same = mine and (set(record.tokens) & set(culprit.tokens) or record.event in _LIVES)
        shared = blocks & {*record.blocks, *(slot // size for slot in own)}
        # A culprit without slots (a commit, an ending) is explained by its request's plans.
        if touched or same or (shared and not slots):
            chain.append(f"{number}. {in_words(record, size, only=touched)}")
    chain.append(f"{divergence.line}. {in_words(culprit, size)}")
    chain.append(f"   law {divergence.law}: {divergence.message}")
    return chain


_LIVES = ("prepare", "commit", "abort", "preempt", "finish")


def in_words(record: Record, block_size: int, *, only: set[int] | None = None) -> str:
    """One event as a sentence; with `only`, slots are limited to these."""

    def places(slots: Sequence[int]) -> str:
        shown = [slot for slot in slots if not only or slot in only]
        named = [f"{slot} (block {slot // block_size}, {slot % block_size})" for slot in shown[:4]]
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        return ", ".join(named) + more

    def few(items: Sequence[int]) -> str:
        return ", ".join(map(str, items[:6])) + (" ..." if len(items) > 6 else "")

    who = f"request {record.req}"
    if record.event == "append":
        hit = f", the first {record.adopted} from the prefix cache" if record.adopted else ""
        return f"{who} writes {len(record.slots)} new tokens to slot {places(record.slots)}{hit}"
    if record.event == "recycle":
        return f"{who} writes a new token into the hole at slot {places(record.slots)}"
    if record.event == "evict":
        return f"the policy evicts token {few(record.tokens)} of {who}"
    if record.event == "move":
        moved = f"moves token {few(record.tokens)} from slot {places(record.sources)}"
        moved += f" to slot {places(record.targets)}"
        back = f" and gives back block {few(record.blocks)}" if record.blocks else ""
        return f"{who} {moved if record.tokens else 'cuts its end'}{back}"
    if record.event == "prepare":
        moved = f"token {few(record.tokens)} from slot {places(record.sources)}"
        moved += f" to slot {places(record.targets)}"
        return f"{who} plans to move {moved} and to give back block {few(record.blocks)}"
    ours = {
        "release": f"{who} gives back block {few(record.blocks)}",
        "commit": f"{who} switches to its plan in flight",
        "abort": f"the plan of {who} is aborted",
        "preempt": f"{who} is preempted",
        "finish": f"{who} ends",
        "reserve": f"block {few(record.blocks)} is set aside as headroom",
        "unreserve": f"headroom block {few(record.blocks)} is free again",
    }
    return ours[record.event]
