"""Imports go one way: spec <- core, kv, policies <- checks, trace <- vllm <- cli.

Read from the source text, so nothing is imported and a wrong import under `TYPE_CHECKING`, inside
a function, or spelled as `importlib.import_module("...")` counts as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Layer:
    """What the modules of one layer may import, besides each other and the standard library.

    Attributes:
        ours: layers of this project.
        others: packages of others; None allows all but the engine, which only ENGINE_LAYER may use.
    """

    ours: frozenset[str]
    others: frozenset[str] | None = None


def _layer(*ours: str, others: frozenset[str] | None = None) -> Layer:
    return Layer(frozenset(ours), others)


ENGINE = "vllm"
ENGINE_LAYER = "vtoken.vllm"
NOTHING: frozenset[str] = frozenset()
NUMPY = frozenset({"numpy"})
BASE = ("vtoken", "vtoken.errors", "vtoken.models")
"""Open to every layer above the spec."""
LOW = ("vtoken_spec", "vtoken.core", "vtoken.kv", "vtoken.policies")
MIDDLE = (*LOW, "vtoken.config", "vtoken.checks", "vtoken.trace")

LAYERS = {
    "vtoken_spec": _layer(others=NOTHING),
    "vtoken": _layer(others=NOTHING),  # vtoken/__init__.py itself: the version, nothing heavy
    "vtoken.errors": _layer(others=NOTHING),
    "vtoken.models": _layer("vtoken.errors"),
    "vtoken.core": _layer(*BASE, "vtoken_spec", others=NUMPY),
    "vtoken.kv": _layer(*BASE, "vtoken_spec", "vtoken.core"),
    "vtoken.policies": _layer(*BASE, "vtoken_spec", "vtoken.core", others=NUMPY),
    "vtoken.config": _layer(
        *BASE, "vtoken.core", "vtoken.policies"
    ),  # options, as users write them
    "vtoken.checks": _layer(*BASE, *LOW),
    "vtoken.trace": _layer(*BASE, *LOW, "vtoken.checks"),
    "vtoken.testing": _layer(*BASE, *LOW, "vtoken.checks", "vtoken.trace"),
    "vtoken.options": _layer(*BASE, *LOW, "vtoken.config"),  # what a user gives
    "vtoken.evaluation": _layer(*BASE),  # of any engine that answers requests
    "vtoken.vllm": _layer(
        *(*BASE, *MIDDLE, "vtoken.options", "vtoken.testing", "vtoken.evaluation")
    ),
    "vtoken.report": _layer(*BASE, "vtoken.config"),  # what a user sees
    "vtoken.flags": _layer(*BASE, "vtoken.policies"),  # the options as the command line has them
    "vtoken.trace_commands": _layer(*BASE, "vtoken_spec", "vtoken.options", "vtoken.trace"),
    "vtoken.environment": _layer(others=NOTHING),
    "vtoken.fuzz_command": _layer(
        *BASE,
        "vtoken_spec",
        "vtoken.environment",
        "vtoken.options",
        "vtoken.testing",
        "vtoken.trace",
        "vtoken.vllm",
    ),
    "vtoken.eval_command": _layer(
        *(*BASE, "vtoken.policies", "vtoken.config", "vtoken.flags", "vtoken.options"),
        *("vtoken.environment", "vtoken.evaluation", "vtoken.report", "vtoken.vllm"),
    ),
    "vtoken.serve_command": _layer(
        *(*BASE, "vtoken.flags", "vtoken.options", "vtoken.report"),
        *("vtoken.environment", "vtoken.vllm"),
    ),
    "vtoken.cli": _layer(
        *(*BASE, *MIDDLE, "vtoken.flags", "vtoken.options", "vtoken.report"),
        *("vtoken.environment", "vtoken.eval_command", "vtoken.fuzz_command"),
        *("vtoken.serve_command", "vtoken.trace_commands", "vtoken.vllm"),
    ),
}


def layer_of(module: str) -> str | None:
    """The layer that a module of ours belongs to, or None if the table has no row for it."""
    parts = module.split(".")
    if parts[0] == "vtoken" and len(parts) > 1:
        name = ".".join(parts[:2])
        return name if name in LAYERS else None
    return parts[0] if parts[0] in LAYERS else None


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything the module imports.

    `from vtoken import core` yields "vtoken.core", and `from vtoken.core import table` yields
    "vtoken.core.table": whether the last part is a module or a name in one makes no difference to
    the layer, except right below `vtoken`, where a lower-case name that is a row counts as one.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, *([base] if base else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                plain = base == "vtoken" and not (name in LAYERS or _exists(name))
                yield node.lineno, base if plain else name
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            if (
                called in {"import_module", "__import__"}
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                yield node.lineno, first.value


def _exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def findings(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One line for each import in `source` that its layer does not allow."""
    own = layer_of(module)
    if own is None:
        return [f"{module}: has no row in LAYERS; add one, and to CONTRIBUTING.md"]
    found = []
    for line, name in imported(ast.parse(source), module, is_package=is_package):
        top = name.split(".")[0]
        if top in {"vtoken", "vtoken_spec"}:
            target = layer_of(name)
            allowed = target == own or target in LAYERS[own].ours
        elif top == "spec":
            allowed = False  # one module under two names is two modules
        elif top == ENGINE:
            allowed = own == ENGINE_LAYER
        else:
            others = LAYERS[own].others
            allowed = top in sys.stdlib_module_names or others is None or top in others
        if not allowed:
            found.append(f"{module}:{line}: {own} must not import {name}")
    return found


def modules() -> list[tuple[Path, str, bool]]:
    """Path, dotted name and whether it is a package, of every module of ours."""
    found = []
    for folder, package in (("spec", "vtoken_spec"), ("vtoken", "vtoken")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join([package, *(parts[:-1] if is_package else parts)])
            found.append((path, name, is_package))
    return found


def test_every_module_imports_in_the_allowed_direction_only() -> None:
    checked = modules()
    assert {layer_of(name) for _, name, _ in checked} >= {"vtoken_spec", "vtoken.core"}
    wrong = [
        line
        for path, name, is_package in checked
        for line in findings(path.read_text(encoding="utf-8"), name, is_package=is_package)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vtoken_spec.laws", "import numpy"),
        ("vtoken_spec.laws", "from vtoken import errors"),
        ("vtoken_spec.laws", "from vtoken.errors import Rejected"),
        ("vtoken.errors", "import numpy"),
        ("vtoken.core.table", "import torch"),
        ("vtoken.core.table", "import vllm"),
        ("vtoken.core.table", "from vllm.v1.core.block_pool import BlockPool"),
        ("vtoken.core.table", "def f():\n    import torch.nn as nn"),
        ("vtoken.core.table", "if TYPE_CHECKING:\n    from vtoken.kv.layout import Layout"),
        ("vtoken.core.table", "from ..policies import registry"),
        ("vtoken.core.table", "from .. import kv"),
        ("vtoken.core", "from ..kv import layout"),
        ("vtoken.core.table", "import importlib\nimportlib.import_module('vtoken.kv')"),
        ("vtoken.core.table", "import spec.laws"),
        ("vtoken.kv.mover", "import vtoken.policies"),
        ("vtoken.kv.mover", "__import__('vllm')"),
        ("vtoken.policies.random_eviction", "import torch"),
        ("vtoken.policies.random_eviction", "from vtoken.kv import layout"),
        ("vtoken.checks.online", "from vtoken.trace import recorder"),
        ("vtoken.checks.online", "import vllm"),
        ("vtoken.trace.replay", "from vtoken.vllm import plugin"),
        ("vtoken.models.tiny", "from vtoken.core import table"),
        ("vtoken.vllm.plugin", "from vtoken import cli"),
        ("vtoken.cli", "import vllm"),
        ("vtoken", "import numpy"),
        ("vtoken.something_new", "import os"),
    ],
)
def test_a_seeded_wrong_import_is_caught(module: str, source: str) -> None:
    is_package = module in {"vtoken", "vtoken.core"}
    assert len(findings(source, module, is_package=is_package)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vtoken_spec.laws", "import dataclasses\nfrom .view import View"),
        ("vtoken_spec.laws", "from vtoken_spec.view import View"),
        ("vtoken.core.table", "import numpy as np\nfrom vtoken_spec import laws"),
        ("vtoken.core.table", "from vtoken import __version__\nfrom .planner import plan"),
        ("vtoken.core.table", "from ..errors import Rejected"),
        ("vtoken.kv.mover", "import torch\nfrom vtoken.core.table import TokenTable"),
        ("vtoken.policies.window", "import numpy\nfrom vtoken.errors import Rejected"),
        ("vtoken.vllm.plugin", "import vllm.v1\nimport torch\nfrom vtoken.checks import online"),
        ("vtoken.cli", "import typer\nfrom vtoken.vllm import config\nfrom vtoken import models"),
    ],
)
def test_a_right_import_is_let_through(module: str, source: str) -> None:
    assert findings(source, module) == []
