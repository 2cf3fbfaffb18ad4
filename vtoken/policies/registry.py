"""Finds policies by name: the built-in ones and those of other packages.

Other packages register a `Policy` subclass under the entry point group `vtoken.policies`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from vtoken.errors import Rejected
from vtoken.policies.base import Policy
from vtoken.policies.random_eviction import RandomEviction
from vtoken.policies.sliding_window import SlidingWindow
from vtoken.policies.streaming_llm import StreamingLLM

GROUP = "vtoken.policies"
_BUILT_IN: tuple[type[Policy], ...] = (StreamingLLM, SlidingWindow, RandomEviction)


@cache
def policy_names() -> tuple[str, ...]:
    """Names that `find_policy` knows, built-in ones first."""
    names = [policy.name for policy in _BUILT_IN]
    names += sorted(e.name for e in entry_points(group=GROUP) if e.name not in names)
    return tuple(names)


def find_policy(name: str) -> type[Policy]:
    """The policy class of that name.

    Raises:
        Rejected: unknown name, or the entry point does not load or is not a `Policy`.
    """
    for policy in _BUILT_IN:
        if policy.name == name:
            return policy
    for entry in entry_points(group=GROUP):
        if entry.name != name:
            continue
        try:
            found = entry.load()
        except Exception as error:
            raise Rejected(f"policy {name!r} does not load: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Policy)):
            raise Rejected(f"policy {name!r} ({entry.value}) is not a vtoken Policy subclass")
        return found
    raise Rejected(f"unknown policy {name!r}; choose one of: {', '.join(policy_names())}")
