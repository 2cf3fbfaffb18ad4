"""Which views an attention backend can be given, and which one a row gets in a step.

- dense: no holes before the physical end; stock kernel, stock block table;
- gather: rows with holes are recomputed by the same kernel over gathered slots (`backend.py`);
- page-1: the cache seen as pages of one token, the block table being the list of live slots.

A view that is off has its reason here; a row with holes on a backend without a view for them is
refused at start, never served inexactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from vtoken.errors import UnsupportedConfiguration


class View(StrEnum):
    """How attention reads a row."""

    DENSE = "dense"
    GATHER = "gather"
    PAGE_1 = "page-1"


NO_TAP = (
    "the score tap exists for vLLM's CPU and Triton attention only; start with --attention-backend "
    "TRITON_ATTN, or choose a policy that needs no attention weights, such as streaming-llm"
)


@dataclass(frozen=True)
class Capability:
    """What one backend can be given.

    Attributes:
        with_holes: the view for rows with holes, or None.
        why_not: reason where a view is off.
        why_no_scores: why it has no score tap, for policies that ask for attention weights;
            empty where it has one.
    """

    with_holes: View | None
    why_not: Mapping[View, str]
    why_no_scores: str = NO_TAP


def _off(gather: str, page_1: str) -> Mapping[View, str]:
    return MappingProxyType({View.GATHER: gather, View.PAGE_1: page_1})


_CPU_ONLY = "the second pass exists for vLLM's CPU kernels only"
_UNTESTED = "its page size of one is not tested with vToken"

CAPABILITIES: Mapping[str, Capability] = MappingProxyType(
    {
        "CPU_ATTN": Capability(
            View.GATHER,
            MappingProxyType({View.PAGE_1: "its kernels need blocks of 32 tokens"}),
            why_no_scores="",
        ),
        "TRITON_ATTN": Capability(
            View.PAGE_1, MappingProxyType({View.GATHER: _CPU_ONLY}), why_no_scores=""
        ),
        "FLASH_ATTN": Capability(
            None, _off(_CPU_ONLY, f"FA2 has no such pages; of FA3 {_UNTESTED}")
        ),
        "FLASHINFER": Capability(None, _off(_CPU_ONLY, _UNTESTED)),
        "FLEX_ATTENTION": Capability(None, _off(_CPU_ONLY, "it would mask instead; not built")),
    }
)


def capability_of(backend: str) -> Capability:
    """Of vLLM's backend of that name; an unknown one is dense only."""
    unknown = "vToken does not know this backend"
    return CAPABILITIES.get(backend, Capability(None, _off(unknown, unknown)))


def view_of(backend: str, *, holes: bool) -> View:
    """The view for a row of this step.

    Raises:
        UnsupportedConfiguration: the row has holes and the backend has no view for them.
    """
    if not holes:
        return View.DENSE
    able = capability_of(backend)
    if able.with_holes is None:
        reasons = "; ".join(f"{view}: {why}" for view, why in able.why_not.items())
        raise UnsupportedConfiguration(
            f"attention backend {backend} has no view for rows with holes ({reasons}); use "
            "--reclaim eager and --no-enable-prefix-caching"
        )
    return able.with_holes
