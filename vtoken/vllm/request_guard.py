"""Refuses requests that eviction would make inexact, or whose own options are not valid, with
HTTP 400 and the reason.

vLLM's official place to validate a request from outside is a logits processor's
`validate_params`; this one never touches logits.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from vtoken.errors import Rejected
from vtoken.vllm.request_options import check_request


class RequestGuard(LogitsProcessor, LogitsProcessorV2):
    """Validates requests at admission; installed whenever a policy is. Each of vLLM's model
    runners has an interface of its own; this is a processor of both."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if sampling_params.prompt_logprobs is not None:
            raise VLLMValidationError(
                "prompt_logprobs cannot be combined with token eviction: a prompt's later tokens "
                "are computed on a pruned context; leave prompt_logprobs out, or serve without "
                "a policy"
            )
        try:
            check_request(sampling_params.extra_args)
        except Rejected as refused:
            raise VLLMValidationError(refused.reason) from None

    def __init__(self, *_: Any) -> None:
        """Keeps no state."""

    def apply(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return logits

    def add_request(self, *_: Any) -> bool:
        return False

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        del batch_update
