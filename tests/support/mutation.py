"""Seeds one fault into one function of the implementation, and takes it out again.

A mutant replaces a piece of a function's source text and compiles it in the function's own
module. Shipped code knows nothing of this; every place that holds the original function gets
the mutant while it is applied.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One seeded fault.

    Attributes:
        name: what is wrong, in a few words.
        target: `module:function` or `module:Class.method`; the method may be a property.
        old, new: the piece of source text, which occurs exactly once, and what replaces it.
        laws: the laws that may catch it; the check that does must be one of them.
        hunt: how it is hunted, see `tests/mutants/hunts.py`.
        modes: in which modes, in turn.
    """

    name: str
    target: str
    old: str
    new: str
    laws: frozenset[str]
    hunt: str = "walk"
    modes: tuple[str, ...] = ("eager", "eager", "off")


def mutant(name: str, target: str, old: str, new: str, laws: str, **how: Any) -> Mutant:
    return Mutant(name, target, old, new, frozenset(laws.split()), **how)


@contextmanager
def applied(fault: Mutant) -> Iterator[None]:
    """The implementation with the fault in it, while inside.

    Raises:
        LookupError: the source no longer holds the piece exactly once; mend the catalogue.
    """
    module_name, _, path = fault.target.partition(":")
    module = import_module(module_name)
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    function = original
    if isinstance(original, classmethod | staticmethod):
        function = original.__func__
    elif isinstance(original, property):
        function = original.fget
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(fault.old) != 1:
        raise LookupError(f"{fault.name}: {source.count(fault.old)} places hold {fault.old!r}")
    space: dict[str, Any] = {}
    text = "from __future__ import annotations\n" + source.replace(fault.old, fault.new)
    exec(compile(text, f"<mutant: {fault.name}>", "exec"), vars(module), space)
    changed = space[name]
    places = [(owner, name)]
    if not outer:  # a plain function may have been imported elsewhere by name
        places += [
            (other, key)
            for other_name, other in list(sys.modules.items())
            if other_name.startswith(("vtoken", "support"))
            for key, value in list(vars(other).items())
            if value is original and other is not owner
        ]
    try:
        for place, key in places:
            setattr(place, key, changed)
        yield
    finally:
        for place, key in places:
            setattr(place, key, original)
