"""Text to evaluate on: the user's own, or what every Python brings along."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vtoken.errors import Rejected

# The chapters of the language reference that are prose rather than tables; about 100 kB.
_TOPICS = (
    *("objects", "execmodel", "types", "calls", "function", "class", "assignment"),
    *("try", "with", "raise", "import", "exceptions", "compound"),
)


@dataclass(frozen=True)
class Text:
    """A text and where it came from."""

    source: str
    content: str

    @property
    def sha256(self) -> str:
        """Of the UTF-8 bytes: figures of two runs compare only where this is equal."""
        return hashlib.sha256(self.content.encode("utf-8")).hexdigest()


def default_text() -> Text:
    """English prose from the language reference that `help()` shows (`pydoc_data.topics`).

    Its wording differs a little between versions of Python.

    Raises:
        Rejected: this Python was installed without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise Rejected("this Python has no pydoc_data.topics; give a text with --text") from None
    chapters = [topics[name] for name in _TOPICS if name in topics]
    return Text("pydoc_data.topics", "\n\n".join(chapters))


def read_text(file: Path) -> Text:
    """The user's own text, UTF-8.

    Raises:
        Rejected: it cannot be read, or is empty.
    """
    try:
        content = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Rejected(f"cannot read the text {file}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise Rejected(f"cannot read the text {file}: it is not UTF-8") from None
    if not content.strip():
        raise Rejected(f"the text {file} is empty")
    return Text(str(file), content)


def excerpts(token_ids: Sequence[int], size: int, count: int, *, what: str) -> list[list[int]]:
    """Up to `count` pieces of exactly `size` tokens that do not overlap, spread over the text.

    Raises:
        Rejected: the text is shorter than one of them.
    """
    count = min(count, len(token_ids) // size)
    if count < 1:
        raise Rejected(
            f"the text has {len(token_ids)} tokens and {what} needs at least {size}; give a "
            "longer one with --text, or leave the task out with --tasks"
        )
    stride = len(token_ids) // count
    return [list(token_ids[i * stride : i * stride + size]) for i in range(count)]
