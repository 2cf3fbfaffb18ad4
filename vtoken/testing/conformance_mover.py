"""The conformance suite of a mover: moves in KV caches of random bits, judged bit by bit."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from vtoken.kv import KVLayout
from vtoken.testing.conformance import (
    ConformanceError,
    ConformanceReport,
    Failure,
    shortest,
)
from vtoken.testing.conformance_cache import Case, Memory, Move, drawn_case, plainer, simpler
from vtoken_spec import i1_conservation

__all__ = ["MoverLike", "check_mover"]


class MoverLike(Protocol):
    """A mover as the suite needs it.

    One that also has `copies(sources, targets, owner=...)`, pieces for a copy stream as
    `vtoken.kv.Mover` gives them, is held to that too.
    """

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> object:
        """Copy K and V of `sources` to `targets`, slots, int64 `[n]` each, in all layers; targets
        are distinct and no target is a source. Done in the order of the caller's stream."""


MoverFactory = Callable[..., MoverLike]


def check_mover(
    factory: MoverFactory,
    *,
    examples: int = 150,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ConformanceReport:
    """Hold a mover to I1, and to touching nothing else.

    Args:
        factory: `factory(layout)` makes a mover for a `vtoken.kv.KVLayout`. One that takes
            `workspace_bytes=` too is given small ones, down to one token.
        examples: histories of up to 3 moves, each on a cache of its own.
        seed: of the first; the others follow in numbers.
        device: where the caches are.

    Raises:
        ConformanceError: with the smallest case found.
    """
    report = ConformanceReport("mover")
    bounded = _takes_workspace(factory)
    for number in range(seed, seed + examples):
        case = drawn_case(random.Random(number), bounded=bounded)
        failure = _run(factory, case, device, report)
        if failure is not None:
            again = f"check_mover(factory, examples=1, seed={number})"
            raise _shown(factory, case, failure, again, device)
        report.histories += 1
        report.operations.update([case.fmt, str(case.dtype).removeprefix("torch.")])
        if case.workspace is not None:
            largest = max(len(move.sources) for move in case.moves)
            report.operations["larger than the workspace"] += largest > case.workspace
    return report


def _takes_workspace(factory: MoverFactory) -> bool:
    try:
        return "workspace_bytes" in inspect.signature(factory).parameters
    except ValueError:  # written in C
        return False


# One case ---------------------------------------------------------------------------------------


def _run(
    factory: MoverFactory,
    case: Case,
    device: torch.device | str,
    report: ConformanceReport | None = None,
) -> Failure | None:
    """The first failure of a case; one that a large workspace does not show is of splitting."""
    failure = _moved(factory, case, device, report)
    if failure is None or case.workspace is None or failure.law == "workspace":
        return failure
    if _moved(factory, replace(case, workspace=None), device) is None:
        what = f"with a workspace of {case.workspace} token(s) only: {failure.message}"
        return replace(failure, law="splitting", message=what)
    return failure


def _moved(
    factory: MoverFactory,
    case: Case,
    device: torch.device | str,
    report: ConformanceReport | None = None,
) -> Failure | None:
    at = 0
    try:
        memory = Memory(case, device)
        batches = _watched(memory.layout)
        bound: dict[str, Any] = {}
        if case.workspace is not None:
            bound["workspace_bytes"] = case.workspace * memory.layout.token_bytes
        mover = factory(memory.layout, **bound)
        for at, move in enumerate(case.moves):
            for law, message in _judged(mover, move, memory, device):
                return Failure(law, message, at)
            if report is not None:
                pieces = move.in_pieces and hasattr(mover, "copies")
                report.operations["copies" if pieces else "move"] += 1
                report.operations["tokens"] += len(move.sources)
            if case.workspace is not None and max(batches, default=0) > case.workspace:
                what = f"took {max(batches)} tokens at once, the workspace holds {case.workspace}"
                return Failure("workspace", what, at)
    except Exception as error:
        return Failure("error", f"{type(error).__name__}: {error}", at)
    return None


def _watched(layout: KVLayout) -> list[int]:
    """How many tokens each `read` and `copy_slots` of the layout takes, from now on."""
    batches: list[int] = []
    read, copy_slots = layout.read, layout.copy_slots

    def watched_read(slots: torch.Tensor) -> torch.Tensor:
        batches.append(len(slots))
        return read(slots)

    def watched_copy(sources: torch.Tensor, targets: torch.Tensor) -> None:
        batches.append(len(sources))
        copy_slots(sources, targets)

    layout.read = watched_read  # type: ignore[method-assign]
    layout.copy_slots = watched_copy  # type: ignore[method-assign]
    return batches


def _judged(
    mover: MoverLike, move: Move, memory: Memory, device: torch.device | str
) -> Iterator[tuple[str, str]]:
    before = memory.bits()
    slots = [
        torch.tensor(listed, dtype=torch.int64, device=device)
        for listed in (move.sources, move.targets)
    ]
    given = [one.clone() for one in slots]
    pieces = getattr(mover, "copies", None) if move.in_pieces else None
    if pieces is None:
        mover.move(*given)
    else:
        yield from _in_pieces(pieces, given, move)
    if not all(torch.equal(one, other) for one, other in zip(slots, given, strict=True)):
        yield "arguments", "the slots that were given are others afterwards"
    after = memory.bits()
    yield from _conserved(move, memory, before, after)
    expected = before.clone()
    sources, targets = (memory.addresses[list(listed)] for listed in (move.sources, move.targets))
    expected[targets.flatten()] = before[sources.flatten()]
    wrong = (after != expected).nonzero().flatten().tolist()
    if wrong:
        yield _elsewhere(wrong[0], move, memory)


def _in_pieces(
    copies: Callable[..., Sequence[Any]], given: Sequence[torch.Tensor], move: Move
) -> Iterator[tuple[str, str]]:
    pieces = copies(*given, owner="a")
    pairs = [
        pair
        for piece in pieces
        for pair in zip(piece.sources.tolist(), piece.targets.tolist(), strict=True)
    ]
    if sorted(pairs) != sorted(zip(move.sources, move.targets, strict=True)):
        yield "pieces", f"the pieces say that they move {pairs}"
    for piece in reversed(pieces):  # they touch nothing in common, so any order will do
        piece.run()


def _conserved(
    move: Move, memory: Memory, before: torch.Tensor, after: torch.Tensor
) -> Iterator[tuple[str, str]]:
    """I1: each token's bits, at its source before and at its target afterwards."""
    old, new = (
        bits[memory.addresses[list(slots)]]
        for bits, slots in ((before, move.sources), (after, move.targets))
    )
    maps = [
        {token: tuple(row.flatten().tolist()) for token, row in enumerate(rows)}
        for rows in (old, new)
    ]
    for breach in i1_conservation(*maps, req_id="moved"):
        assert breach.token_id is not None
        token = breach.token_id
        where = (old[token] != new[token]).nonzero()
        halves = " and ".join("KV"[half] for half in sorted(set(where[:, 1].tolist())))
        layers = sorted(set(where[:, 0].tolist()))
        heads = sorted(set(where[:, 2].tolist()))
        yield (
            breach.law,
            f"payload changed by a relocation: token of slot {move.sources[token]}, moved to"
            f" {move.targets[token]}: {halves} differ in layers {layers}, heads {heads}",
        )


def _elsewhere(address: int, move: Move, memory: Memory) -> tuple[str, str]:
    """What an element is that changed although nothing was moved there."""
    found = (memory.addresses == address).nonzero()
    if not len(found):
        return "untouched", f"element {address} of the allocation, which is no token's, changed"
    slot, layer, half, head, _ = found[0].tolist()
    where = f"slot {slot} ({'KV'[half]}, layer {layer}, head {head})"
    if slot in move.sources:
        return "sources", f"{where} was moved from, and changed"
    return "untouched", f"{where} was not moved to, and changed"


# Showing ----------------------------------------------------------------------------------------


def _shown(
    factory: MoverFactory,
    case: Case,
    failure: Failure,
    again: str,
    device: torch.device | str,
) -> ConformanceError:
    """The error, with fewer moves of fewer tokens in a plainer cache that fails by the same law."""
    law = failure.law

    def fails(candidate: Case) -> bool:
        found = _run(factory, candidate, device)
        return found is not None and found.law == law

    moves = shortest(
        case.moves,
        lambda moves: fails(replace(case, moves=tuple(moves))),
        simpler=simpler,
        most_runs=300,
    )
    case = replace(case, moves=tuple(moves))
    changed = True
    while changed:
        changed = False
        for candidate in plainer(case):
            if fails(candidate):
                case, changed = candidate, True
                break
    failure = _run(factory, case, device) or failure
    lines = (f"a cache of {case}", *(str(move) for move in case.moves))
    return ConformanceError(law, failure.message, lines, again)
