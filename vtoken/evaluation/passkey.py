"""Passkey retrieval: a number is hidden in a long text about nothing, and asked for at its end.

The task and its wording are from Mohtashami and Jaggi, "Landmark Attention" (2023). The question
is part of the prompt, and the prompt is computed with all its tokens; what is evicted, from the
first decode step on, is missing when the digits are copied out of the cache.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vtoken.errors import Rejected
from vtoken.evaluation.requests import Answer, Cell, Request, may_share

HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
FILLER = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "\nWhat is the pass key? The pass key is"

#: room for a space and five digits, and a token to see that no sixth follows
NEW_TOKENS = 8


@dataclass(frozen=True)
class Sample:
    """One hidden number.

    Attributes:
        key: five digits.
        depth: where it stands, as a share of the text around it; 0 is the beginning.
        prompt: token ids.
    """

    key: str
    depth: float
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Retrieval:
    """The figure of one row: keys found, of so many samples."""

    found: int
    samples: int

    @property
    def share(self) -> float:
        return self.found / self.samples if self.samples else float("nan")


def make_samples(
    encode: Callable[[str], list[int]],
    *,
    opening: Sequence[int],
    length: int,
    count: int,
    seed: int,
) -> list[Sample]:
    """Prompts of exactly `length` tokens each.

    Depths are stratified: sample i of n lies at random within the i-th of n equal parts, so that a
    policy that keeps the newest half finds about half of the keys.

    Raises:
        Rejected: the question does not fit into `length` tokens.
    """
    rng = random.Random(f"{seed}/passkey")
    head, unit, question = [*opening, *encode(HEAD)], encode(FILLER), encode(QUESTION)
    samples = []
    for index in range(count):
        key = str(rng.randrange(10_000, 100_000))
        needle = encode(NEEDLE.format(key=key))
        room = length - len(head) - len(needle) - len(question)
        if room < len(unit):
            least = length - room + len(unit)
            raise Rejected(
                f"a pass key prompt of {length} tokens has no room for text around the key; "
                f"--length must be at least {least} here"
            )
        whole = room // len(unit)
        before = int((index + rng.random()) / count * (whole + 1))
        after = room - before * len(unit)
        # The last repetition may break off in mid-sentence: the length has to be exact.
        filler = (unit * (whole + 1))[:after]
        prompt = (*head, *unit * before, *needle, *filler, *question)
        samples.append(Sample(key, before * len(unit) / room, prompt))
    return samples


def requests_for(
    samples: Sequence[Sample], cells: Sequence[Cell], *, share_unit: int
) -> list[Request]:
    """All rows of one sample after each other, so that they find its prompt in the prefix cache.

    Args:
        share_unit: see `may_share`.
    """
    shares = may_share(samples[0].prompt, share_unit) if samples else False
    return [
        Request(
            cell,
            index,
            sample.prompt,
            NEW_TOKENS,
            shares=shares,
        )
        for index, sample in enumerate(samples)
        for cell in cells
    ]


def is_found(text: str, key: str) -> bool:
    """Whether the first number in the text is the key, all of it and no digit more."""
    number = re.search(r"\d+", text)
    return number is not None and number.group() == key


def figure(samples: Sequence[Sample], asked: Sequence[tuple[Request, Answer]]) -> Retrieval:
    """Of one row's requests; those that ended early do not count as samples."""
    ended = [(request, answer) for request, answer in asked if answer.error is None]
    found = sum(is_found(answer.text, samples[request.sample].key) for request, answer in ended)
    return Retrieval(found, len(ended))
