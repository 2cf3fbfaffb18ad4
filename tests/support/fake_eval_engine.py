"""An engine without a model for `vtoken.evaluation`: what it answers can be worked out by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vtoken.evaluation.requests import Answer, Request


class FakeEngine:
    """Words are tokens. It reads the newest `budget_ratio` of a prompt and nothing before.

    - A number asked for is answered if it stands there, otherwise with "99999".
    - Forced tokens get the log-probability log(budget_ratio / 2), the first of them log(1 / 1000).
    - Anything else is continued by its last word and "two three four", of which eviction keeps the
      first 4 x budget_ratio words; naive continuations get `naive_suffix` on top.

    Args:
        fails: policies whose requests end early.
    """

    opening: tuple[int, ...] = ()
    share_unit = 32

    def __init__(self, *, naive_suffix: str = "", fails: Sequence[str] = ()) -> None:
        self._words: list[str] = []
        self._ids: dict[str, int] = {}
        self._naive_suffix = naive_suffix
        self._fails = fails
        #: (requests, reclaim) of every run
        self.runs: list[tuple[list[Request], str]] = []

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in re.findall(r"\s*\S+", text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._words[token] for token in token_ids)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]

    def serve(
        self, requests: Sequence[Request], *, reclaim: str, on_tokens: Callable[[int], None]
    ) -> tuple[list[Answer], Mapping[str, Any]]:
        self.runs.append((list(requests), reclaim))
        answers = []
        for request in requests:
            answers.append(self._answer(request, reclaim))
            on_tokens(request.max_tokens)
        return answers, {"evicted": 7, "recycled": 0, "moved": 3, "checks": {"I2": 1}}

    def _answer(self, request: Request, reclaim: str) -> Answer:
        if request.cell.policy in self._fails:
            return Answer(error=f"policy {request.cell.policy} failed")
        share = request.cell.budget_ratio
        if request.forced:
            logprobs = [math.log(0.001)] + [math.log(share / 2)] * (len(request.forced) - 1)
            return Answer(list(request.forced), self.decode(request.forced), logprobs)
        seen = request.prompt[-max(1, round(share * len(request.prompt))) :]
        text = self.decode(seen)
        if text.endswith("The pass key is"):
            keys = re.findall(r"(\d{5}) is the pass key", text)
            text = f" {keys[0] if keys else '99999'}. Remember"
        else:
            text = " ".join([text.split()[-1], "two", "three", "four"][: round(4 * share)])
            if reclaim == "off":
                text += self._naive_suffix
        return Answer(self.encode(text), text)
