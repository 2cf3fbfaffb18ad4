"""What a user hands over in files, arguments and on standard input, and what is written back."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from vtoken.errors import Rejected
from vtoken.options import (
    check_model_folder,
    check_writable,
    load_config,
    read_prompts,
    reason_of,
    write_json_atomically,
)


def one_line(caught: pytest.ExceptionInfo[Rejected]) -> str:
    assert "\n" not in caught.value.reason
    return caught.value.reason


# Configuration files ----------------------------------------------------------------------------

FORMATS = {
    "a.toml": 'policy = "streaming-llm"\nbudget = 32\nsinks = 2\n',
    "b.toml": '[vtoken]\npolicy = "streaming-llm"\nbudget = 32\nsinks = 2\n',
    "a.json": '{"policy": "streaming-llm", "budget": 32, "sinks": 2}',
    "b.json": '{"vtoken": {"policy": "streaming-llm", "budget": 32, "sinks": 2}}',
    "a.yaml": "policy: streaming-llm\nbudget: 32\nsinks: 2\n",
    "b.yml": "vtoken:\n  policy: streaming-llm\n  budget: 32\n  sinks: 2\n",
    "bom.json": '\ufeff{"policy": "streaming-llm", "budget": 32, "sinks": 2}',
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_gives_the_options_in_it(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(FORMATS[name], encoding="utf-8")
    config = load_config(file)
    assert (config.policy, config.budget, config.sinks) == ("streaming-llm", 32, 2)
    assert config.reclaim == "eager"


def test_flags_win_over_the_file_and_none_is_no_flag(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(FORMATS["a.toml"])
    config = load_config(file, sinks=7, reclaim="off", policy=None, budget=None)
    assert (config.policy, config.budget, config.sinks) == ("streaming-llm", 32, 7)
    assert config.reclaim == "off"


def test_a_budget_of_one_kind_replaces_one_of_the_other(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(FORMATS["a.toml"])
    config = load_config(file, budget_ratio=0.5)
    assert (config.budget, config.budget_ratio) == (None, 0.5)
    with pytest.raises(Rejected, match="both"):
        load_config(file, budget=8, budget_ratio=0.5)


def test_without_a_file_the_flags_are_all() -> None:
    assert load_config(None, policy="random", budget=9, seed=None).budget == 9
    assert load_config(None).policy == "none"


BAD_FILES = {
    "broken.toml": ("policy = ", "is not valid toml"),
    "broken.json": ('{"policy": ', "is not valid json"),
    "broken.yaml": ("policy: [", "is not valid yaml"),
    "list.json": ("[1, 2]", "must hold a mapping"),
    "empty.yaml": ("", "must hold a mapping"),
    "nested.json": ('{"vtoken": 5}', "must hold a mapping"),
    "file.ini": ("policy=random", "unknown format; name it .toml, .json or .yaml"),
    "unknown.toml": ("bugdet = 3", "unknown vtoken option 'bugdet'"),
    "text.yaml": ("policy: random\nbudget: '9'", "budget must be a whole number"),
    "zero.toml": ('policy = "random"\nbudget = 0', "budget must be positive"),
    "latin.toml": (b"policy = '\xff'", "cannot read configuration"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_rejected_with_its_reason(tmp_path: Path, name: str) -> None:
    content, reason = BAD_FILES[name]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Rejected) as caught:
        load_config(file)
    assert reason in one_line(caught)
    if "option" not in reason and "budget" not in reason:
        assert name in one_line(caught)


def test_a_missing_file_and_a_folder_are_rejected_by_name(tmp_path: Path) -> None:
    for file in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(Rejected, match="cannot read configuration") as caught:
            load_config(file)
        assert str(file) in one_line(caught)


# Prompts ----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(text: str, *, terminal: bool = False) -> None:
        monkeypatch.setattr("sys.stdin", Terminal(text) if terminal else io.StringIO(text))

    set_to("", terminal=True)
    return set_to


@pytest.mark.usefixtures("stdin")
def test_arguments_are_prompts_as_they_stand() -> None:
    assert read_prompts(["one", " two\nlines "], None) == ["one", " two\nlines "]


@pytest.mark.usefixtures("stdin")
def test_a_file_holds_one_prompt_a_line_as_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = ["plain text", "", '{"prompt": "in JSON\\nwith a break", "id": 3}', "  ", "last\r"]
    file.write_bytes("\n".join(lines).encode())
    assert read_prompts([], file) == ["plain text", "in JSON\nwith a break", "last"]
    assert read_prompts(["first"], file)[0] == "first"


@pytest.mark.usefixtures("stdin")
def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """Claim: separators that Unicode also counts as line ends stay inside a prompt."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\nform\x0cfeed\n', encoding="utf-8")
    assert read_prompts([], file) == ["a\u2028b", "form\x0cfeed"]


@pytest.mark.usefixtures("stdin")
def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("\ufeffhello\n", encoding="utf-8")
    assert read_prompts([], file) == ["hello"]


def test_standard_input_is_read_when_asked_for_or_piped(stdin: Any, tmp_path: Path) -> None:
    stdin("piped one\npiped two\n")
    assert read_prompts([], None) == ["piped one", "piped two"]
    stdin("more\n")
    assert read_prompts(["given", "-"], None) == ["given", "more"]
    stdin("more\n", terminal=True)
    assert read_prompts(["-"], None) == ["more"]
    stdin("not wanted\n")
    assert read_prompts(["given"], None) == ["given"]
    file = tmp_path / "p.txt"
    file.write_text("of the file\n")
    stdin("not wanted\n")
    assert read_prompts([], file) == ["of the file"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'ok\n{"text": 1}\n', "line 2: not a JSON object with a 'prompt'"),
        (b'{"prompt": \n', "line 1: not a JSON object"),
        (b'\n\n{"prompt": 5}\n', "line 3: 'prompt' is not a string"),
        (b'{"prompt": "  "}\n', "a prompt is empty"),
        (b"\n \n", "no prompt"),
        (b"", "no prompt"),
        (b"\xff\xfe\n", "cannot read prompts"),
    ],
)
@pytest.mark.usefixtures("stdin")
def test_a_bad_prompt_file_is_rejected_with_the_line(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(Rejected) as caught:
        read_prompts([], file)
    assert reason in one_line(caught)


@pytest.mark.usefixtures("stdin")
def test_no_prompt_and_an_empty_one_are_rejected(tmp_path: Path) -> None:
    for arguments in ([], ["ok", ""], [" \n"]):
        with pytest.raises(Rejected, match=r"no prompt|a prompt is empty"):
            read_prompts(arguments, None)
    with pytest.raises(Rejected, match="cannot read prompts"):
        read_prompts([], tmp_path / "absent")


def test_standard_input_that_is_no_text_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xff"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", broken)
    with pytest.raises(Rejected, match="cannot read prompts from standard input"):
        read_prompts(["-"], None)


# Results ----------------------------------------------------------------------------------------


def test_a_result_is_written_whole_and_readable(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    mask = os.umask(0o022)
    try:
        write_json_atomically(file, {"text": "é\u2028", "n": [1, 2]})
    finally:
        os.umask(mask)
    assert json.loads(file.read_text(encoding="utf-8")) == {"text": "é\u2028", "n": [1, 2]}
    assert file.read_text(encoding="utf-8").endswith("}\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [file]


def test_a_failing_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    write_json_atomically(file, {"old": 1})
    with pytest.raises(TypeError):
        write_json_atomically(file, {"new": object()})
    assert json.loads(file.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    write_json_atomically(file, {"old": 1})

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json_atomically(file, {"new": 2})
    assert json.loads(file.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_is_followed_and_not_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    write_json_atomically(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}


def test_a_place_that_cannot_be_written_is_rejected_before_and_at_the_write(
    tmp_path: Path,
) -> None:
    for file in (tmp_path / "absent" / "out.json", tmp_path):
        for write in (check_writable, lambda path: write_json_atomically(path, {})):
            with pytest.raises(Rejected, match="cannot write") as caught:
                write(file)
            assert str(file) in one_line(caught)
    check_writable(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_found_out_whoever_asks() -> None:
    """Claim: also by root, to whom permissions say that `/proc` can be written."""
    with pytest.raises(Rejected, match=r"cannot write /proc/out.json: the folder /proc takes no"):
        check_writable(Path("/proc/out.json"))


def test_a_model_folder_that_is_none_is_rejected(tmp_path: Path) -> None:
    for model in (str(tmp_path / "absent"), "./absent", "a/b/c", "~/absent-model"):
        with pytest.raises(Rejected, match="no model folder"):
            check_model_folder(model)
    with pytest.raises(Rejected, match="holds no model"):
        check_model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model_folder(str(tmp_path))
    check_model_folder("org/name")  # a name on a hub


def test_the_reason_of_another_library_s_error_is_one_line() -> None:
    class Listed(Exception):
        def errors(self) -> list[dict[str, str]]:
            return [{"msg": "Value error, too\n  long"}, {"msg": "odd"}]

    assert reason_of(Listed()) == "too long; odd"
    assert reason_of(ValueError("a\n  b")) == "a b"
    assert reason_of(KeyError()) == "KeyError"
