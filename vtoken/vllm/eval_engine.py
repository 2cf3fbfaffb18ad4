"""One engine in this process that serves every policy and budget of an evaluation.

Policies are chosen by request, and modes between runs, so that an engine has to start once only.
Prompts are never computed in chunks: eviction would set in between them, at places that depend on
what else is in the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import EngineFailed, Rejected
from vtoken.evaluation.requests import Answer, Request
from vtoken.vllm.forced_tokens import FORCED_TOKENS, forced_args
from vtoken.vllm.session import Session

_LEAST_BATCH = 2048
_MOST_REQUESTS = 32


class EvalEngine:
    """`vtoken.evaluation.requests.Engine` on vLLM.

    Args:
        model: checkpoint folder or hub name.
        config: with some policy; each request names its own.
        longest: most tokens that a request will have at its end.
        engine: further `EngineArgs` of vLLM.

    Raises:
        Rejected, UnsupportedConfiguration: as for `Session`; or the pool holds no such request.
    """

    def __init__(
        self, model: Path | str, config: VTokenConfig, *, longest: int, **engine: Any
    ) -> None:
        # One more than the last token of a request needs, as vLLM counts.
        context = longest + 1
        self.session = Session(
            model,
            replace(config, request_policies="any"),
            processors=[FORCED_TOKENS],
            max_model_len=context,
            max_num_batched_tokens=max(_LEAST_BATCH, context),
            max_num_seqs=_MOST_REQUESTS,
            enable_chunked_prefill=False,
            logprobs_mode="raw_logprobs",
            **engine,
        )
        self._tokenizer = self.session.llm.get_tokenizer()
        self._names = 0

    @property
    def share_unit(self) -> int:
        """See `vtoken.evaluation.requests.may_share`."""
        block = int(self.session.report()["block_size"])
        return block if self.session.config.score_window <= block else 0

    @property
    def opening(self) -> list[int]:
        """The beginning-of-text token, if this tokenizer puts one in front of texts."""
        first = self._tokenizer.bos_token_id
        return [first] if first is not None and self._tokenizer.encode("")[:1] == [first] else []

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def serve(
        self, requests: Sequence[Request], *, reclaim: str, on_tokens: Callable[[int], None]
    ) -> tuple[list[Answer], Mapping[str, Any]]:
        """See `Engine.serve`. Counters, prefix cache and policies' seeds start anew.

        Raises:
            InvariantViolation: an online check failed.
            EngineFailed: the engine stopped, or had to preempt a request, which would have been
                computed anew with all its tokens and so answered a different question.
        """
        session = self.session
        session.reconfigure(replace(session.config, reclaim=reclaim))
        answers = [Answer() for _ in requests]
        waiting = deque(enumerate(requests))
        running: dict[str, int] = {}
        at_once = self._at_once(requests)
        while waiting or running:
            while waiting and len(running) < at_once:
                index, request = waiting.popleft()
                running[self._submit(request)] = index
            for step in session.step():
                answer = answers[running[step.request_id]]
                (part,) = step.outputs
                answer.token_ids.extend(part.token_ids)
                for token, found in zip(part.token_ids, part.logprobs or (), strict=False):
                    answer.logprobs.append(found[token].logprob)
                on_tokens(len(part.token_ids))
                if part.finish_reason is not None:
                    del running[step.request_id]
                    if part.finish_reason == "abort":
                        answer.error = str(part.stop_reason or "the request was aborted")
        for answer in answers:
            answer.text = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return answers, self._counts()

    def _submit(self, request: Request) -> str:
        self._names += 1
        name = str(self._names)
        self.session.submit(
            name,
            request.prompt,
            max_tokens=request.max_tokens,
            # A salt of its own keeps a prompt's blocks apart from all others'.
            salt=None if request.shares else name,
            logprobs=0 if request.forced else None,
            extra_args=_asked(request) | forced_args(request.forced),
        )
        return name

    def _at_once(self, requests: Sequence[Request]) -> int:
        """How many requests fit the pool with all their tokens, so that none is preempted."""
        report = self.session.report()
        block, blocks = report["block_size"], report["pool"]["total"]
        longest = max((len(r.prompt) + r.max_tokens for r in requests), default=1)
        # A block more each: relocation needs it at times.
        fit = blocks // (-(-longest // block) + 1)
        if fit < 1:
            raise Rejected(
                f"the KV pool of {blocks} blocks holds no request of {longest} tokens; raise "
                "--kv-memory-mb or lower --length"
            )
        return min(fit, _MOST_REQUESTS)

    def _counts(self) -> dict[str, Any]:
        report = self.session.report()
        tokens = report["tokens"]
        if tokens["recomputed_requests"]:
            raise EngineFailed(
                f"{tokens['recomputed_requests']} requests were preempted, so their figures would "
                "be of something else; raise --kv-memory-mb"
            )
        names = ("evicted", "recycled", "moved")
        return {**{name: tokens[name] for name in names}, "checks": report["checks"]}

    def close(self) -> None:
        """Shut the engine down; idempotent."""
        self.session.close()


def _asked(request: Request) -> dict[str, Any]:
    asked: dict[str, Any] = {"vtoken_policy": request.cell.policy}
    if request.cell.evicts:
        asked["vtoken_budget_ratio"] = request.cell.budget_ratio
    return asked
