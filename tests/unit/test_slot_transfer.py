"""Slots go to a device from pinned memory, so that the host waits for nothing (I3). A device that
only has shapes stands in; that nothing waits is timed in tests/gpu/test_speed_on_device.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vtoken.core import StepLayout
from vtoken.kv.relocator import Relocator
from vtoken.kv.streams import SynchronousCopyStream
from vtoken.kv.translation import TranslationCache, on_device

SLOTS = np.array([3, 1, 2], dtype=np.int32)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was pinned, and whether each transfer lets the host go on."""
    seen: list[tuple[str, Any]] = []
    move = torch.Tensor.to

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(("pinned", tensor.tolist()))
        return tensor

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(("sent", kwargs.get("non_blocking", False)))
        return move(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return seen


def test_on_the_host_nothing_is_sent(transfers: list[tuple[str, Any]]) -> None:
    found = on_device(SLOTS, "cpu")
    assert found.dtype == torch.int64
    assert found.tolist() == [3, 1, 2]
    assert transfers == []


def test_to_a_device_pinned_slots_are_sent_and_nobody_waits(
    transfers: list[tuple[str, Any]],
) -> None:
    found = on_device(SLOTS, torch.device("meta"))
    assert (found.device.type, found.dtype, len(found)) == ("meta", torch.int64, 3)
    assert transfers == [("pinned", [3, 1, 2]), ("sent", True)]


def test_the_relocator_and_the_translation_send_slots_that_way(
    transfers: list[tuple[str, Any]],
) -> None:
    mover: Any = SimpleNamespace(layout=SimpleNamespace(device=torch.device("meta")))
    Relocator(mover, SynchronousCopyStream())._slots(SLOTS)
    layout = StepLayout(reclaimed=0, num_live=3, new_slots=SLOTS[2:], live_slots=SLOTS)
    TranslationCache("meta").take("a", layout, 1)
    assert transfers == 2 * [("pinned", [3, 1, 2]), ("sent", True)]
