"""Keeps the requests' policies: asks them for victims, shows them scores, contains their faults.

A policy is foreign code on the path of every step, so whatever it does is judged before anything
comes of it. A fault concerns the one request whose policy it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from vtoken.config import VTokenConfig
from vtoken.core.arrays import IntArray
from vtoken.core.request_table import RequestTable
from vtoken.errors import InvariantViolation, PolicyError, Rejected
from vtoken.policies import Policy, ScoreNeed, StepScores
from vtoken.policies.judging import Unfit, judged, view_to_ask
from vtoken.vllm.score_support import no_scores_for

logger = init_logger("vllm.vtoken.policy")

_MOST_MESSAGES = 16
_NONE = np.empty(0, dtype=np.int32)
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Served:
    """What is known of one request, from its first step until it has finished.

    Attributes:
        settings: the engine's, with what the request asked for itself.
        policy_class: None evicts nothing.
        policy: its instance; a new one after each preemption.
        stream: its place among the requests, kept over preemptions.
        failed: the policy failed, and is not called again.
    """

    settings: VTokenConfig
    policy_class: type[Policy] | None
    policy: Policy | None = None
    stream: int = -1
    failed: bool = False


class PolicyHost:
    """The policies of all requests of one engine.

    Args:
        settings: the engine's configuration.
        requests: vLLM's requests by id, for what they ask for themselves; without them, every
            request is served by the settings.
        why_no_scores: why no request can have a policy that asks for attention weights; empty if
            they can.
    """

    def __init__(
        self,
        settings: VTokenConfig,
        *,
        requests: Mapping[str, Request] | None = None,
        why_no_scores: str = "",
    ) -> None:
        self.settings = settings
        self._why_no_scores = why_no_scores
        #: policy of the requests that choose none
        self.policy_class = settings.policy_class
        #: how often a policy was asked for victims
        self.calls = 0
        #: requests whose policy failed
        self.failures = 0
        #: what was said about the first of them
        self.messages: list[str] = []
        self._requests = requests
        self._served: dict[str, _Served] = {}
        self._num_streams = 0
        self._stops: dict[str, PolicyError] = {}
        self._warned: set[str] = set()

    def __len__(self) -> int:
        """Requests that something is known of."""
        return len(self._served)

    @property
    def active(self) -> bool:
        """Whether any request may have a policy."""
        return self.policy_class is not None

    def needs(self, req_id: str) -> ScoreNeed:
        """Which attention weights the request's policy asks for."""
        if not self.active:
            return ScoreNeed.NONE
        served = self._of(req_id)
        if served.failed or served.policy_class is None:
            return ScoreNeed.NONE
        return served.policy_class.needs

    def settings_of(self, req_id: str) -> VTokenConfig:
        """The engine's settings, with what the request asked for itself."""
        return self._of(req_id).settings

    def observe(self, req_id: str, scores: StepScores) -> None:
        """Show attention weights to the request's policy; ignored if it is gone or preempted."""
        if self._requests is not None:
            request = self._requests.get(req_id)
            if request is None or request.status == RequestStatus.PREEMPTED:
                return
        if self.needs(req_id) is ScoreNeed.NONE:
            return
        served = self._of(req_id)
        self._guarded(req_id, served, lambda: self._policy(served).observe(scores))

    def evicts(self, request: Request) -> bool:
        """Whether tokens of this request may be evicted now."""
        params = request.sampling_params
        if (
            params is not None
            and params.prompt_logprobs is not None
            and request.num_computed_tokens < request.num_prompt_tokens
        ):
            # Prompt logprobs promise the full context; eviction starts with the decode.
            return False
        if request.resumable:
            self._warn_once(
                "streaming-input sessions are served without eviction: vToken does not "
                "support appending input to an evicted context"
            )
            return False
        return True

    def victims(self, request: Request, table: RequestTable) -> IntArray:
        """Ids to evict before this step, int32 `[n]`: distinct, live, not protected; may be empty.

        The step's first new token counts; the newest computed token always stays.
        """
        req_id = request.request_id
        served = self._of(req_id)
        if served.failed or served.policy_class is None:
            return _NONE
        settings = served.settings
        view = view_to_ask(
            table.live,
            table.num_live,
            budget=settings.budget_for(table.logical_len + 1),
            protection=settings,
            num_prompt=request.num_prompt_tokens,
        )
        if view is None:
            return _NONE
        self.calls += 1
        found = self._guarded(
            req_id, served, lambda: judged(self._policy(served).victims(view), view)
        )
        return _NONE if found is None else found

    def drop(self, req_id: str, finished: bool) -> None:
        """Forget a request's policy (preemption), or all of the request (finish, abort)."""
        if finished:
            self._served.pop(req_id, None)
            self._stops.pop(req_id, None)
        elif req_id in self._served:
            # A preempted request comes back with all its tokens, and a fresh policy.
            self._served[req_id].policy = None

    def stops(self, req_id: str) -> bool:
        """Whether the request is about to end because its policy failed."""
        return req_id in self._stops

    def take_stops(self) -> dict[str, PolicyError]:
        """The requests that have to end, with the reason; each is given once."""
        stops, self._stops = self._stops, {}
        return stops

    # ---- one request

    def _of(self, req_id: str) -> _Served:
        served = self._served.get(req_id)
        if served is None:
            served = self._served[req_id] = self._admit(req_id)
        return served

    def _admit(self, req_id: str) -> _Served:
        plain = _Served(self.settings, self.policy_class)
        request = None if self._requests is None else self._requests.get(req_id)
        params = None if request is None else request.sampling_params
        if params is None or not params.extra_args:
            return plain
        try:
            settings = self.settings.for_request(params.extra_args)
            if why_not := no_scores_for(settings, self._why_no_scores):
                raise Rejected(f"this request's vtoken options: {why_not}")
        except Rejected as refused:
            # Validated at the door, but what is known there may be less than what is known here.
            plain.failed = True
            error = PolicyError(refused.reason, req_id=req_id, reason=refused.reason)
            self._stops[req_id] = error
            self._say(f"request {req_id} ends: {error}")
            return plain
        if settings is self.settings:
            return plain
        return _Served(settings, settings.policy_class)

    def _policy(self, served: _Served) -> Policy:
        if served.policy is None:
            if served.stream < 0:
                served.stream = self._num_streams
                self._num_streams += 1
            assert served.policy_class is not None
            made: Policy = served.policy_class(served.settings.params, stream=served.stream)
            served.policy = made
        return served.policy

    def _guarded(self, req_id: str, served: _Served, call: Callable[[], _Answer]) -> _Answer | None:
        """What the call answers; None if the policy failed in it."""
        begin = time.perf_counter()
        try:
            answer = call()
        except InvariantViolation:
            raise  # never contained: whatever it concerns, it is not one request's matter
        except Unfit as unfit:
            return self._fail(req_id, served, str(unfit))
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).split())
            return self._fail(
                req_id, served, f"it raised {type(error).__name__}" + (f": {text}" if text else "")
            )
        limit = served.settings.policy_time_limit_ms
        took_ms = 1000 * (time.perf_counter() - begin)
        if limit is not None and took_ms > limit:
            return self._fail(
                req_id,
                served,
                f"a call took {took_ms:.1f} ms, more than policy_time_limit_ms {limit:g}",
            )
        return answer

    def _fail(self, req_id: str, served: _Served, reason: str) -> None:
        """Contain a fault: the policy is not called again, and the request ends or keeps all."""
        served.failed, served.policy = True, None
        self.failures += 1
        name = getattr(served.policy_class, "name", None) or "none"
        ends = served.settings.on_policy_error == "stop-request"
        error = PolicyError(
            f"policy {name} failed for request {req_id}: {reason}",
            policy=str(name),
            req_id=req_id,
            reason=reason,
        )
        outcome, other = "the request ends", "keep-tokens would let it go on without eviction"
        if not ends:
            outcome, other = "nothing more of it is evicted", "stop-request would end it"
        self._say(
            f"{error}; {outcome}; mend the policy or choose another (--on-policy-error {other})"
        )
        if ends:
            self._stops[req_id] = error

    def _say(self, message: str) -> None:
        logger.warning("%s", message)
        if len(self.messages) < _MOST_MESSAGES:
            self.messages.append(message)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)
