"""Makes a request's output a given one, token by token, so that its likelihood can be measured.

A request says so by `SamplingParams(extra_args={FORCED: [...]}, temperature=0, logprobs=0)`. vLLM
takes log-probabilities before it asks logits processors (`logprobs_mode="raw_logprobs"`, its
default), so they are those of the model that nothing was forced upon.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.logits_process import LogitsProcessor as RowProcessor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

#: name of the request's extra argument: token ids, `max_tokens` of them
FORCED = "forced_token_ids"
FORCED_TOKENS = "vtoken.vllm.forced_tokens:ForcedTokens"


class ForcedTokens(AdapterLogitsProcessor):
    """Leaves a request no choice but its next forced token; others are not touched."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        forced = (sampling_params.extra_args or {}).get(FORCED)
        if forced is None:
            return
        if not isinstance(forced, list) or not all(type(token) is int for token in forced):
            raise VLLMValidationError(f"{FORCED} must be a list of token ids")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RowProcessor | None:
        forced: list[int] | None = (params.extra_args or {}).get(FORCED)
        if not forced:
            return None

        def force(output_ids: list[int], row: torch.Tensor) -> torch.Tensor:
            # By how many there are, not by a count of calls: the steps of a chunked prefill come
            # here too, and what they sample is thrown away.
            position = len(output_ids)
            if position < len(forced):
                row.fill_(float("-inf"))
                row[forced[position]] = 0.0
            return row

        return force


def forced_args(token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The extra argument that forces these tokens; none for none."""
    return {FORCED: list(token_ids)} if token_ids else {}
