"""One engine in this process, with vToken on, and a report of what it did: behind `vtoken run`.

In-process, so that scheduler, tables and pool can be read directly afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import EngineFailed, Rejected
from vtoken.options import reason_of
from vtoken.vllm.engine_errors import refused_start, vtoken_error_in
from vtoken.vllm.request_options import announce
from vtoken.vllm.version import check_version


@dataclass
class PromptOutput:
    """What one prompt produced, so far; `finish_reason` is None until it is complete."""

    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


#: called as `on_text(prompt_index, output, new_text)` whenever a prompt produced something
OnText = Callable[[int, PromptOutput, str], None]


class Session:
    """A vLLM engine of this process.

    Args:
        model: checkpoint folder or hub name.
        config: vToken's configuration.
        processors: logits processors beside vToken's own, as `module:Class`.
        engine: further `EngineArgs` of vLLM.

    Raises:
        UnsupportedConfiguration: a guard refused; nothing was started.
        Rejected: vLLM refuses the model or the options.
    """

    def __init__(
        self,
        model: Path | str,
        config: VTokenConfig,
        *,
        processors: Sequence[str] = (),
        **engine: Any,
    ) -> None:
        # Before vLLM is imported: one process, so that its state can be read.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        check_version()
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        from vtoken.vllm.enable import engine_defaults, engine_kwargs
        from vtoken.vllm.guards import check_config
        from vtoken.vllm.score_support import announce_no_scores, why_no_scores

        args = {**engine_defaults(config), **{k: v for k, v in engine.items() if v is not None}}
        args |= {**engine_kwargs(config), "model": str(model)}
        if processors:
            args["logits_processors"] = [*args.get("logits_processors", ()), *processors]
        self.config = config
        try:
            # The guards run on vLLM's finished configuration before weights are loaded, so a
            # refusal is one line and not an engine's stack trace.
            settled = EngineArgs(**args).create_engine_config()
            check_config(settled)
            announce_no_scores(why_no_scores(settled))
            self.llm = LLM(**args)
        except Exception as error:
            known = vtoken_error_in(error)
            if known is not None:
                raise known from error
            raise refused_start(error) from error
        self._core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.free_before: int = self.report()["pool"]["free"]

    @property
    def scheduler(self) -> Any:
        return self._core.scheduler

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        chat: bool = True,
        ignore_eos: bool = False,
        on_text: OnText | None = None,
    ) -> list[PromptOutput]:
        """Run all prompts to the end, handing text on as it comes.

        Raises:
            Rejected: a prompt does not fit the model's context.
            InvariantViolation: an online check failed; the engine must not be used again.
            EngineFailed: the engine stopped for another reason.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
        engine = self.llm.llm_engine
        outputs = [PromptOutput(prompt) for prompt in prompts]
        # All before the first is admitted: a rejection leaves nothing behind in the engine.
        encoded = [self._checked(i, self._encode(p, chat=chat)) for i, p in enumerate(prompts)]
        for index, token_ids in enumerate(encoded):
            engine.add_request(str(index), {"prompt_token_ids": token_ids}, params)
        while engine.has_unfinished_requests():
            for step in self.step():
                index = int(step.request_id)
                output = outputs[index]
                for part in step.outputs:
                    output.text += part.text
                    output.token_ids.extend(part.token_ids)
                    output.finish_reason = part.finish_reason
                    if on_text is not None:
                        on_text(index, output, part.text)
        return outputs

    def step(self) -> list[Any]:
        """One step of the engine; vLLM's `RequestOutput`s of it.

        Raises:
            InvariantViolation: an online check failed; the engine must not be used again.
            EngineFailed: the engine stopped for another reason.
        """
        try:
            return list(self.llm.llm_engine.step())
        except Exception as error:
            known = vtoken_error_in(error)
            if known is error:
                raise
            if known is not None:
                raise known from error
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise EngineFailed(f"vLLM's engine failed ({reason}); see --verbose") from error

    def _checked(self, index: int, token_ids: list[int]) -> list[int]:
        limit = self.llm.llm_engine.model_config.max_model_len
        if len(token_ids) >= limit:
            raise Rejected(
                f"prompt {index + 1} has {len(token_ids)} tokens and the context is {limit}; "
                "shorten it, or raise --max-model-len if the model allows"
            )
        return token_ids

    def _encode(self, prompt: str, *, chat: bool) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        if chat and getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            return list(tokenizer.encode(text, add_special_tokens=False))
        return list(tokenizer.encode(prompt))

    def submit(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        salt: str | None = None,
        **params: Any,
    ) -> None:
        """Add a greedy request that runs for `max_tokens` tokens; the caller steps the engine.

        Args:
            salt: only requests of the same one share prefixes with it.
            params: further `SamplingParams`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **params,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
        self.llm.llm_engine.add_request(name, prompt, sampling)

    def reconfigure(self, config: VTokenConfig) -> None:
        """Another configuration, with an empty prefix cache and counters from zero.

        Raises:
            Rejected: requests are being served.
            UnsupportedConfiguration: this engine cannot take it.
        """
        # Workers may refuse, and the scheduler not after its check: nothing is left half done.
        self.scheduler.vtoken_check(config)
        self.llm.collective_rpc("vtoken_configure", args=(config.as_dict(),))
        self.scheduler.vtoken_configure(config)
        self.llm.reset_prefix_cache()
        announce(config)
        self.config = config

    def report(self) -> dict[str, Any]:
        """Counts since start, scheduler and workers together."""
        report: dict[str, Any] = self.scheduler.vtoken_report()
        workers = self.llm.collective_rpc("vtoken_report")
        checks = dict(report["checks"])
        for law, count in workers[0]["checks"].items():
            checks[law] = checks.get(law, 0) + count
        report["checks"] = dict(sorted(checks.items()))
        report["moved_bytes"] = workers[0]["moved_bytes"]
        return report

    def close(self) -> None:
        """Shut the engine down; idempotent."""
        self._core.shutdown()
