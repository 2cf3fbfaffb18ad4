"""Lets the device's tests run from a checkout in which nothing is installed, and reports them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _spec_from_the_checkout() -> None:
    """The folder `spec` is imported as `vtoken_spec`, which installing the project arranges."""
    if importlib.util.find_spec("vtoken_spec") is not None:
        return
    folder = ROOT / "spec"
    found = importlib.util.spec_from_file_location(
        "vtoken_spec", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["vtoken_spec"] = module
    found.loader.exec_module(module)


_spec_from_the_checkout()

from support.device_report import DeviceReport  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("VTOKEN_GPU_JSON")
    if path and not config.pluginmanager.has_plugin("vtoken-gpu-report"):
        config.pluginmanager.register(DeviceReport(Path(path)), "vtoken-gpu-report")
