"""Build a local checkpoint folder once, atomically, and find it again.

A checkpoint is a folder in the cache whose name ends in a digest of its `Recipe` and which holds a
`manifest.json` with size and SHA-256 of every file. The folder appears by one rename, after all of
it is on disk: whoever sees it sees all of it. Whatever an interrupted build leaves behind lies in
a work folder of its own, which the next builder removes; it can tell that the folder is stale
because it holds the lock that every builder of this checkpoint must hold.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken.errors import ModelUnavailable

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
LOCK_WAIT_S = 900.0
"""Bound on waiting for another process that builds the same checkpoint."""
_LOCK_POLL_S = 0.1
_HASH_CHUNK_BYTES = 1 << 20

Progress = Callable[[str, float], None]
"""Called with the name of a stage and the fraction of it that is done, 0.0 to 1.0."""

Build = Callable[[Path, Path], None]
"""Called with two empty folders: the checkpoint to fill, and scratch that is removed after."""


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint is made from; two checkpoints with equal recipes are interchangeable.

    Attributes:
        name: readable start of the folder's name.
        inputs: everything that decides the contents (converter version, source checksum, sizes,
            seed), as JSON values.
    """

    name: str
    inputs: Mapping[str, str | int | float]

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe, 64 hex digits."""
        text = json.dumps({"name": self.name, "inputs": dict(self.inputs)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        """Name inside the cache. With the digest in it, two versions of vToken that share a cache
        keep one checkpoint each, and do not rebuild each other's for ever."""
        return f"{self.name}-{self.digest[:8]}"


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: the argument, else `$VTOKEN_CACHE`, else `$XDG_CACHE_HOME/vtoken`, else
    `~/.cache/vtoken`. Not created here."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if named := os.environ.get("VTOKEN_CACHE"):
        return Path(named).expanduser().absolute()
    # The XDG specification says that a relative path there is invalid and must be ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = xdg if xdg.is_absolute() else Path("~/.cache").expanduser()
    return base / "vtoken"


def ensure_checkpoint(
    recipe: Recipe,
    build: Build,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder of the checkpoint, built now unless a good one is there.

    A good one is found without taking the lock and without writing, so a read-only cache serves.
    Safe against other processes and threads that call this at the same time: one builds, the
    others wait (at most `LOCK_WAIT_S`).

    Args:
        recipe: what to build.
        build: fills the checkpoint folder; may raise anything, in which case nothing is left.
        cache_dir: see `cache_root`.
        verify: hash every file, not only compare sizes; a bad checkpoint is built anew.
        progress: told about stages.

    Raises:
        ModelUnavailable: the cache cannot be written, the lock stayed busy, or `build` said so.
    """
    root = cache_root(cache_dir)
    final = root / recipe.folder_name
    try:
        if checkpoint_problem(final, recipe, verify=verify) is None:
            return final
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{recipe.folder_name}.lock", progress):
            # Whoever held the lock before us may have built it meanwhile.
            if checkpoint_problem(final, recipe, verify=verify) is not None:
                _build_and_publish(recipe, build, final)
    except OSError as error:
        raise ModelUnavailable(
            f"cannot build {recipe.name} in {root}: {error.strerror or error}; make room there, or "
            "name another folder in the environment variable VTOKEN_CACHE"
        ) from error
    return final


def checkpoint_problem(folder: Path, recipe: Recipe, *, verify: bool = False) -> str | None:
    """Why the folder does not hold the recipe's checkpoint, in a few words; None if it does.

    Args:
        verify: compare the SHA-256 of every file; otherwise sizes only, which costs one `stat` a
            file and catches what a full disk, a partial copy or a stray edit leaves.
    """
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no manifest"
    except (OSError, ValueError):  # ValueError: not JSON, or not even text
        return "the manifest cannot be read"
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        return "the manifest has another format"
    if manifest.get("recipe_sha256") != recipe.digest:
        return "made from another recipe"
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        return "the manifest lists no files"
    for name, entry in files.items():
        problem = _file_problem(folder / name, entry, verify=verify)
        if problem is not None:
            return f"{name}: {problem}"
    return None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits, in constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _file_problem(path: Path, entry: object, *, verify: bool) -> str | None:
    if not isinstance(entry, dict):
        return "no entry in the manifest"
    try:
        size = path.stat().st_size
        if size != entry.get("bytes"):
            return f"{size} bytes instead of {entry.get('bytes')}"
        if verify and sha256_of(path) != entry.get("sha256"):
            return "checksum differs"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _build_and_publish(recipe: Recipe, build: Build, final: Path) -> None:
    """Build beside `final` and rename into place. The caller holds the lock."""
    prefix = f".{recipe.folder_name}.work-"
    for stale in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    # Beside `final`, because a rename is atomic within one file system only.
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        made, scratch = work / "checkpoint", work / "scratch"
        made.mkdir()
        scratch.mkdir()
        build(made, scratch)
        names = sorted(p.name for p in made.iterdir())
        files = {
            name: {"bytes": (made / name).stat().st_size, "sha256": sha256_of(made / name)}
            for name in names
        }
        manifest = {
            "format": MANIFEST_FORMAT,
            "name": recipe.name,
            "recipe": dict(recipe.inputs),
            "recipe_sha256": recipe.digest,
            "files": files,
        }
        write_json(made / MANIFEST, manifest)
        # safetensors writes files for the owner alone; give all of them what the umask gives.
        mode = (made / MANIFEST).stat().st_mode & 0o777
        for name in [*names, MANIFEST]:
            (made / name).chmod(mode)
            _fsync(made / name)
        _fsync(made)
        if os.path.lexists(final):
            # A folder cannot be renamed over a full one. A crash between the two renames leaves no
            # checkpoint, which the next call builds; it never leaves half of one.
            final.rename(work / "replaced")
        made.rename(final)
        _fsync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel drops it when the holder dies, however it dies,
    so no lock is ever stale; the empty file stays, because removing it would race."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    with path.open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ModelUnavailable(
                        f"another process has held {path} for more than {LOCK_WAIT_S:.0f} s; "
                        "end it, or name another folder in VTOKEN_CACHE"
                    ) from None
                if progress is not None:
                    progress("wait for another process", 0.0)
                time.sleep(_LOCK_POLL_S)
        yield
