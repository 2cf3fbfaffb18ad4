"""Movers with one fault each, and the law or check that names it; and one without."""

from __future__ import annotations

import torch

from support.faults import Fault
from vtoken.kv import KVLayout, Mover
from vtoken.kv.streams import Copy


class PlainMover:
    """The shortest mover there is; it takes no workspace."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.layout.write(targets, self.layout.read(sources))


class KeysOnly(PlainMover):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        values = self.layout.read(targets)
        values[:, :, 0] = self.layout.read(sources)[:, :, 0]
        self.layout.write(targets, values)


class LastLayerLeftBehind(PlainMover):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        values = self.layout.read(sources)
        values[:, -1] = self.layout.read(targets)[:, -1]
        self.layout.write(targets, values)


class LastTokenDropped(PlainMover):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        super().move(sources[:-1], targets[:-1])


class TargetOneFurther(PlainMover):
    """Only where that stays in the cache."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        last = self.layout.num_blocks * self.layout.block_size - 1
        super().move(sources, (targets + 1).clamp(max=last))


class SourcesCleared(PlainMover):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        super().move(sources, targets)
        self.layout.write(sources, torch.zeros_like(self.layout.read(sources)))


class NeighboursToo(PlainMover):
    """Writes one token more, behind the targets."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        slots = set(range(self.layout.num_blocks * self.layout.block_size))
        spare = sorted(slots - {*sources.tolist(), *targets.tolist()})
        if spare and len(sources):
            self.layout.write(torch.tensor(spare[:1]), self.layout.read(sources[:1]))
        super().move(sources, targets)


class RowsOfTheView(PlainMover):
    """Moves rows of the view as it is, which transposed keys are not."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        size = self.layout.block_size
        for cache in self.layout.caches:
            rows = cache[:, sources // size, :, sources % size].clone()
            cache[:, targets // size, :, targets % size] = rows


class ByValue(PlainMover):
    """Loses the payloads of NaNs."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        values = self.layout.read(sources)
        if values.is_floating_point():
            values[values.isnan()] = torch.nan
        self.layout.write(targets, values)


class Batches(PlainMover):
    def __init__(self, layout: KVLayout, *, workspace_bytes: int = 1 << 20) -> None:
        super().__init__(layout)
        self.count = workspace_bytes // layout.token_bytes


class BatchesOneApart(Batches):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for first in range(0, len(sources), self.count + 1):
            last = first + self.count
            super().move(sources[first:last], targets[first:last])


class WorkspaceIgnored(Batches):
    pass


class WorkspaceIgnoredInCopies(Batches):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.layout.copy_slots(sources, targets)


class ArgumentsSorted(PlainMover):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        order = sources.argsort()
        sources.copy_(sources[order].clone())
        targets.copy_(targets[order].clone())
        super().move(sources, targets)


class PiecesWithoutTheLast(Mover):
    def copies(self, sources: torch.Tensor, targets: torch.Tensor, *, owner: str) -> list[Copy]:
        return super().copies(sources, targets, owner=owner)[:-1]


class NoEmptyMove(PlainMover):
    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.layout.read(sources[:1])[0]
        super().move(sources, targets)


MOVER_FAULTS = [
    Fault(KeysOnly, "I1"),
    Fault(LastLayerLeftBehind, "I1"),
    Fault(LastTokenDropped, "I1"),
    Fault(TargetOneFurther, "I1"),
    Fault(SourcesCleared, "sources"),
    Fault(NeighboursToo, "untouched"),
    Fault(RowsOfTheView, "I1"),
    Fault(ByValue, "I1"),
    Fault(BatchesOneApart, "splitting"),
    Fault(WorkspaceIgnored, "workspace"),
    Fault(WorkspaceIgnoredInCopies, "workspace"),
    Fault(ArgumentsSorted, "arguments"),
    Fault(PiecesWithoutTheLast, "pieces"),
    Fault(NoEmptyMove, "error"),
]
