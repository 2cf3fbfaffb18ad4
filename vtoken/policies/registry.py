"""Finds policies by name: the built-in ones, those of other packages, and any class by its place.

Other packages register a `Policy` subclass under the entry point group `vtoken.policies`; one
that is not registered is named `module:Class`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from vtoken.errors import Rejected
from vtoken.policies.base import Policy
from vtoken.policies.fastgen import FastGen
from vtoken.policies.h2o import H2O
from vtoken.policies.random_eviction import RandomEviction
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.scores import ScoreNeed
from vtoken.policies.sliding_window import SlidingWindow
from vtoken.policies.streaming_llm import StreamingLLM

GROUP = "vtoken.policies"
BUILT_IN: tuple[type[Policy], ...] = (
    *(StreamingLLM, SlidingWindow, RandomEviction),
    *(H2O, Scissorhands, FastGen),
)


@cache
def policy_names() -> tuple[str, ...]:
    """Registered names that `find_policy` knows, built-in ones first."""
    names = [policy.name for policy in BUILT_IN]
    names += sorted(e.name for e in entry_points(group=GROUP) if e.name not in names)
    return tuple(names)


def find_policy(name: str) -> type[Policy]:
    """The policy class of that name, or at `module:Class`.

    Raises:
        Rejected: unknown name, or what it names does not load or is not a `Policy`.
    """
    for policy in BUILT_IN:
        if policy.name == name:
            return policy
    if ":" in name:
        return _checked(name, name, _at(name))
    for entry in entry_points(group=GROUP):
        if entry.name != name:
            continue
        try:
            found = entry.load()
        except Exception as error:
            raise Rejected(f"policy {name!r} does not load: {_reason(error)}") from error
        return _checked(name, entry.value, found)
    raise Rejected(
        f"unknown policy {name!r}; choose one of: {', '.join(policy_names())}, or module:Class"
    )


def _at(place: str) -> object:
    module, _, path = place.partition(":")
    try:
        found: object = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise Rejected(f"policy {place!r} does not load: {_reason(error)}") from error
    return found


def _checked(name: str, place: str, found: object) -> type[Policy]:
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise Rejected(f"policy {name!r} ({place}) is not a vtoken Policy subclass")
    if not isinstance(found.needs, ScoreNeed):
        raise Rejected(f"policy {name!r} ({place}): needs is not a ScoreNeed, but {found.needs!r}")
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise Rejected(f"policy {name!r} ({place}) does not define {', '.join(missing)}")
    return found


def _reason(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
