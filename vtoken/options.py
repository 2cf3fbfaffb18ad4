"""Reads what a user gives on the command line and in files, and writes results safely."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import Rejected


def _why(error: Exception) -> str:
    """An operating system error without the path, which the message names already."""
    return getattr(error, "strerror", None) or str(error)


def load_config(file: Path | None, **flags: Any) -> VTokenConfig:
    """Configuration from a file, overridden by the flags that are not None.

    A budget of one kind on the command line replaces one of the other kind in the file.

    Raises:
        Rejected: the file cannot be read or an option is unknown or out of range.
    """
    values = {} if file is None else _read_mapping(file)
    given = {name: value for name, value in flags.items() if value is not None}
    if ("budget" in given) != ("budget_ratio" in given):
        values.pop("budget", None)
        values.pop("budget_ratio", None)
    return VTokenConfig.from_mapping({**values, **given})


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Rejected(f"cannot read configuration {file}: {_why(error)}") from error
    try:
        if file.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif file.suffix == ".json":
            values = json.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            import yaml

            values = yaml.safe_load(text)
        else:
            raise Rejected(
                f"configuration {file} has an unknown format; name it .toml, .json or .yaml"
            )
    except Rejected:
        raise
    except Exception as error:
        reason = reason_of(error)  # YAML's come over several lines
        raise Rejected(f"configuration {file} is not valid {file.suffix[1:]}: {reason}") from error
    if isinstance(values, dict) and set(values) == {"vtoken"}:
        values = values["vtoken"]
    if not isinstance(values, dict):
        raise Rejected(f"configuration {file} must hold a mapping of options")
    return values


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Prompts from arguments, a file, or standard input ('-', or neither of the others).

    Raises:
        Rejected: none is given, one is empty, or the file cannot be read.
    """
    prompts = [prompt for prompt in arguments if prompt != "-"]
    if file is not None:
        try:
            prompts += _prompts_of(file.read_text(encoding="utf-8-sig"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise Rejected(f"cannot read prompts from {file}: {_why(error)}") from error
    if "-" in arguments or (not prompts and file is None and not sys.stdin.isatty()):
        try:
            prompts += _prompts_of(sys.stdin.read(), "standard input")
        except UnicodeDecodeError as error:
            raise Rejected(f"cannot read prompts from standard input: {error}") from error
    if not prompts:
        raise Rejected("no prompt; give one as an argument, with --file, or on standard input")
    if any(not prompt.strip() for prompt in prompts):
        raise Rejected("a prompt is empty; leave it out")
    return prompts


def _prompts_of(text: str, where: str) -> list[str]:
    prompts = []
    # Not `splitlines`: it also splits at separators that may stand within a line of JSON.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(line)
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError) as error:
            raise Rejected(
                f"{where}, line {number}: not a JSON object with a 'prompt' ({error})"
            ) from error
        if not isinstance(prompt, str):
            raise Rejected(f"{where}, line {number}: 'prompt' is not a string")
        prompts.append(prompt)
    return prompts


def check_model_folder(model: str) -> None:
    """Refuse a local checkpoint that is not there, before vLLM takes its name for a hub's.

    Raises:
        Rejected: what looks like a folder is none, or holds no model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        # Mistral's own checkpoints have params.json.
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise Rejected(f"the folder {model} holds no model (no config.json)")
    elif not path.exists() and (model.startswith(("/", ".", "~")) or model.count("/") > 1):
        raise Rejected(f"there is no model folder {model}")


def reason_of(error: BaseException) -> str:
    """One line that says what another library refused, without that library's decoration."""
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's: a list, each with the refused value at length
        details = [str(detail.get("msg", "")) for detail in errors()]
        text = "; ".join(detail.removeprefix("Value error, ") for detail in details)
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def check_writable(file: Path) -> None:
    """Refuse, before minutes of work, a result file that could not be written after them.

    A file is made and removed again: permissions alone do not tell, for instance of `/proc`.

    Raises:
        Rejected: its folder is missing or takes no files, or it is a folder itself.
    """
    folder = file.resolve().parent
    if not folder.is_dir():
        raise Rejected(f"cannot write {file}: there is no folder {folder}")
    if file.is_dir():
        raise Rejected(f"cannot write {file}: it is a folder; give the name of a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Rejected(
            f"cannot write {file}: the folder {folder} takes no files ({_why(error)})"
        ) from error


def write_json_atomically(file: Path, value: Any) -> None:
    """Write a whole JSON file or none: a reader never sees half of it.

    Raises:
        Rejected: the file cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_bytes_atomically(file, text.encode("utf-8"))


def write_bytes_atomically(file: Path, content: bytes) -> None:
    """Write a whole file or none.

    Raises:
        Rejected: the file cannot be written.
    """
    file = file.resolve()
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            # mkstemp makes private files; a result is as readable as any other file.
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
            Path(temporary).replace(file)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Rejected(f"cannot write {file}: {_why(error)}") from error


def vtoken_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that are options of `VTokenConfig`.

    Raises:
        Rejected: the trace's file cannot be written.
    """
    found = {field.name: arguments[field.name] for field in fields(VTokenConfig)}
    return {**found, "trace": _trace_file(found["trace"])}


def _trace_file(trace: Path | None) -> str | None:
    """Absolute, because the process that records may have another folder."""
    if trace is None:
        return None
    check_writable(trace)
    return str(trace.resolve())
