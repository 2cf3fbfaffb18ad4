"""Runs a plan on an engine: tasks into requests, answers into figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vtoken.evaluation import passkey, perplexity, rouge
from vtoken.evaluation.passkey import Retrieval
from vtoken.evaluation.perplexity import Perplexity
from vtoken.evaluation.plan import Plan
from vtoken.evaluation.requests import Answer, Cell, Engine, Request
from vtoken.evaluation.rouge import Agreement, Similarity
from vtoken.evaluation.texts import Text, excerpts

#: called as `progress(task, tokens)` when that many more tokens of a task have been produced
Progress = Callable[[str, int], None]
Asked = list[tuple[Request, Answer]]


@dataclass
class Row:
    """One row's figures; None for a task that was not run, or says nothing about this row."""

    cell: Cell
    passkey: Retrieval | None = None
    perplexity: Perplexity | None = None
    rouge: Similarity | None = None


@dataclass
class Evaluation:
    """What came out.

    Attributes:
        rows: the full cache first.
        agreement: vToken against naive over all rows, if ROUGE-L was run.
        retrievals: every pass key prompt: row, key, depth, and what the model said.
        served: what the engine did for each task, and in which mode.
        text_tokens: length of the text; 0 if no task needed it.
        warnings: why requests ended early, each reason once.
    """

    plan: Plan
    text: Text
    rows: list[Row]
    agreement: Agreement | None = None
    retrievals: list[dict[str, Any]] = field(default_factory=list)
    served: list[dict[str, Any]] = field(default_factory=list)
    text_tokens: int = 0
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a figure without samples is null."""
        return {
            "plan": self.plan.as_dict(),
            "text": {
                "source": self.text.source,
                "sha256": self.text.sha256,
                "tokens": self.text_tokens,
            },
            "rows": [
                {
                    "policy": row.cell.policy,
                    "budget_ratio": row.cell.budget_ratio,
                    **{task: _plain(getattr(row, task)) for task in self.plan.tasks},
                }
                for row in self.rows
            ],
            "agreement": _plain(self.agreement),
            "retrievals": self.retrievals,
            "served": self.served,
            "warnings": self.warnings,
        }


def _plain(figure: Any) -> Any:
    if figure is None:
        return None
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(figure).items()
    }


class Tasks:
    """A plan's requests, made before any is served, so that a short text is told at once.

    Raises:
        Rejected: the text or the pass key prompts are too short.
    """

    def __init__(self, plan: Plan, text: Text, engine: Engine) -> None:
        self.plan = plan
        self.text = text
        opening = engine.opening
        wants_text = any(task != "passkey" for task in plan.tasks)
        token_ids = engine.encode(text.content) if wants_text else []
        self.text_tokens = len(token_ids)
        self.samples: list[passkey.Sample] = []
        self.requests: dict[str, list[Request]] = {}
        if "passkey" in plan.tasks:
            self.samples = passkey.make_samples(
                engine.encode,
                opening=opening,
                length=plan.length,
                count=plan.samples["passkey"],
                seed=plan.seed,
            )
            self.requests["passkey"] = passkey.requests_for(
                self.samples, plan.rows, share_unit=engine.share_unit
            )
        if "perplexity" in plan.tasks:
            size = perplexity.excerpt_size(opening, plan.scored)
            count = plan.samples["perplexity"]
            self.requests["perplexity"] = perplexity.requests_for(
                excerpts(token_ids, size, count, what="perplexity"),
                plan.rows,
                opening=opening,
                share_unit=engine.share_unit,
            )
        if "rouge" in plan.tasks:
            size, count = rouge.excerpt_size(opening), plan.samples["rouge"]
            self.requests["rouge"] = rouge.requests_for(
                excerpts(token_ids, size, count, what="rouge"), plan.rows, opening=opening
            )

    def tokens(self, task: str) -> int:
        """Tokens that a task has the engine produce; what is evicted in `rouge` runs twice."""
        twice = task == "rouge"
        return sum(r.max_tokens * (1 + (twice and r.cell.evicts)) for r in self.requests[task])

    def run(self, engine: Engine, progress: Progress) -> Evaluation:
        """Serve everything; minutes."""
        found = Evaluation(
            self.plan, self.text, [Row(cell) for cell in self.plan.rows], None, [], []
        )
        found.text_tokens = self.text_tokens
        server = _Server(engine, found, progress)
        if "passkey" in self.plan.tasks:
            self._passkey(server, found)
        if "perplexity" in self.plan.tasks:
            asked = server.ask("perplexity", self.requests["perplexity"], self.plan.reclaim)
            for row in found.rows:
                row.perplexity = perplexity.figure(_of(row.cell, asked))
        if "rouge" in self.plan.tasks:
            self._rouge(server, found)
        return found

    def _passkey(self, server: _Server, found: Evaluation) -> None:
        asked = server.ask("passkey", self.requests["passkey"], self.plan.reclaim)
        for row in found.rows:
            row.passkey = passkey.figure(self.samples, _of(row.cell, asked))
        for request, answer in asked:
            sample = self.samples[request.sample]
            found.retrievals.append(
                {
                    "policy": request.cell.policy,
                    "budget_ratio": request.cell.budget_ratio,
                    "key": sample.key,
                    "depth": round(sample.depth, 4),
                    "answer": answer.text,
                    "found": answer.error is None and passkey.is_found(answer.text, sample.key),
                }
            )

    def _rouge(self, server: _Server, found: Evaluation) -> None:
        # Three runs, so that vToken's and the naive one see the same requests in the same batches:
        # with others beside them, rounding could differ and be taken for an effect.
        whole = [r for r in self.requests["rouge"] if not r.cell.evicts]
        evicted = [r for r in self.requests["rouge"] if r.cell.evicts]
        full = [answer for _, answer in server.ask("rouge", whole, self.plan.reclaim)]
        vtoken = server.ask("rouge", evicted, self.plan.reclaim)
        naive = server.ask("rouge", evicted, "off")
        pairs: dict[Cell, list[rouge.Pair]] = {row.cell: [] for row in found.rows[1:]}
        for (request, ours), (_, theirs) in zip(vtoken, naive, strict=True):
            pair = rouge.pair_of(ours, theirs, full[request.sample])
            if pair is not None:
                pairs[request.cell].append(pair)
        for row in found.rows[1:]:
            row.rouge = rouge.figure(pairs[row.cell])
        found.agreement = rouge.agreement([pair for of in pairs.values() for pair in of])


class _Server:
    """Has requests served, and keeps what there is to tell about it."""

    def __init__(self, engine: Engine, found: Evaluation, progress: Progress) -> None:
        self._engine = engine
        self._found = found
        self._progress = progress

    def ask(self, task: str, requests: Sequence[Request], reclaim: str) -> Asked:
        begin = time.monotonic()
        answers, counts = self._engine.serve(
            requests, reclaim=reclaim, on_tokens=lambda tokens: self._progress(task, tokens)
        )
        served = {
            "task": task,
            "reclaim": reclaim if any(r.cell.evicts for r in requests) else "none",
            "requests": len(requests),
            "seconds": round(time.monotonic() - begin, 3),
        }
        self._found.served.append(served | dict(counts))
        for reason in _reasons(answers):
            if reason not in self._found.warnings:
                self._found.warnings.append(reason)
        return list(zip(requests, answers, strict=True))


def _reasons(answers: Iterable[Answer]) -> list[str]:
    return [answer.error for answer in answers if answer.error is not None]


def _of(cell: Cell, asked: Asked) -> Asked:
    return [(request, answer) for request, answer in asked if request.cell == cell]
