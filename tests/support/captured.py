"""A decode step captured once and replayed: as a CUDA graph, or as the list of its launches.

Either way a replay repeats the same kernels on the same memory with the same numbers. Whatever is
to change between replays has to change within the tensors that were captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from support.paged_attention import Launch, launch_now

Step = Callable[[Launch], None]
"""A step that starts all its kernels by the `launch` that it is given."""


class Graph(Protocol):
    def replay(self) -> None:
        """Run the captured step again."""


class CudaGraph:
    """A step in a CUDA graph. It is run before it is captured, so that its kernels are compiled."""

    def __init__(self, step: Step) -> None:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            step(launch_now)
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step(launch_now)

    def replay(self) -> None:
        self._graph.replay()


class LaunchList:
    """The stand-in on a CPU: the step runs once, and what it launched is written down, each kernel
    with its grid, its tensors and the numbers as they were."""

    def __init__(self, step: Step) -> None:
        self._launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        step(self._note)

    def _note(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        self._launches.append((kernel, grid, arguments, constants))

    def replay(self) -> None:
        for kernel, grid, arguments, constants in self._launches:
            launch_now(kernel, grid, *arguments, **constants)


def capture(step: Step, device: torch.device) -> Graph:
    return CudaGraph(step) if device.type == "cuda" else LaunchList(step)
