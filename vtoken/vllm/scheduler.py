"""Scheduler mixin: evict and reclaim first, then vLLM schedules, then the step's layout is told.

One mixin over vLLM's `Scheduler` and `AsyncScheduler`: a plain subclass of `Scheduler` would
silently disable async scheduling. All decisions of vToken are taken here, in one process, so
every tensor-parallel rank executes the same ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vtoken import __version__
from vtoken.checks.online import OnlineChecker
from vtoken.config import VTokenConfig
from vtoken.core.observer import Observer, Observers
from vtoken.core.reclaimer import Reclaimer
from vtoken.errors import PolicyError, Rejected
from vtoken.policies import Policy, ScoreNeed
from vtoken.policies.ledger import ScoreLedger
from vtoken.trace import Recorder
from vtoken.vllm.guards import check_engine, check_pool, refuse
from vtoken.vllm.kv_manager import VTokenManager
from vtoken.vllm.metadata import Sequence, StepMetadata, attach, news_of
from vtoken.vllm.policy_host import PolicyHost
from vtoken.vllm.pool import EngineView
from vtoken.vllm.score_support import no_scores_for, why_no_scores
from vtoken.vllm.settings import asked_of, settings_of

logger = init_logger("vllm.vtoken.scheduler")


class VTokenSchedulerMixin:
    """What vToken adds to a vLLM scheduler. Mixed in before the scheduler class."""

    # Provided by vLLM's scheduler, named here for readers and type checkers.
    running: list[Request]
    requests: dict[str, Request]
    kv_cache_manager: Any
    finish_requests: Any

    vtoken_recorder: Recorder | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        check_engine(vllm_config)
        settings, asked = settings_of(vllm_config), asked_of(vllm_config)
        if settings != asked:
            logger.warning(
                "holes are filled eagerly instead of in the background: this attention backend has "
                "no view that skips them until then; start with --attention-backend TRITON_ATTN, "
                "which has one, or with --reclaim %s",
                settings.reclaim,
            )
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        check_pool(settings, vllm_config, manager)
        context = vllm_config.model_config.max_model_len
        if settings.budget is not None and settings.budget >= context:
            logger.warning(
                "nothing will be evicted: the budget of %d tokens is not below the context of %d; "
                "lower --budget",
                settings.budget,
                context,
            )
        self.vtoken_manager: VTokenManager = manager
        group = self.kv_cache_manager.kv_cache_config.kv_cache_groups[0]
        page = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        self._token_bytes: int = page // manager.block_size
        self._why_no_scores: str = why_no_scores(vllm_config) or group.kv_cache_spec.why_no_scores
        self._stopped: list[tuple[Request, PolicyError]] = []
        self.vtoken_scores = ScoreLedger()
        self.vtoken_configure(settings)

    def vtoken_check(self, settings: VTokenConfig) -> None:
        """Whether a configuration can be taken.

        Raises:
            Rejected: requests are being served with the present one.
            UnsupportedConfiguration: its policy asks for attention weights, and there are none.
        """
        if self.requests:
            raise Rejected(f"{len(self.requests)} requests are being served; drain them first")
        if why_not := no_scores_for(settings, self._why_no_scores):
            raise refuse(f"vToken cannot serve this: {why_not}")

    def vtoken_configure(self, settings: VTokenConfig) -> None:
        """Take a configuration; all counters start anew.

        Raises:
            Rejected, UnsupportedConfiguration: as `vtoken_check`.
        """
        self.vtoken_check(settings)
        manager = self.vtoken_manager
        self.vtoken_config = settings
        self._vtoken_sequence = Sequence()
        self.vtoken_scores.configure(settings)
        self.vtoken_checker = OnlineChecker(level=settings.checks)
        self.vtoken = Reclaimer(
            block_size=manager.block_size,
            mode=settings.mode,
            pool=manager,
            background=settings.background(
                block_size=manager.block_size, token_bytes=self._token_bytes
            ),
        )
        manager.reclaimer = self.vtoken
        view = EngineView(manager, self.vtoken)
        self.vtoken_checker.bind(view, background=self.vtoken.background)
        if self.vtoken_recorder is not None:
            self.vtoken_recorder.close()
            self.vtoken_recorder = None
        if settings.trace is not None:
            about = {"vtoken": __version__, "vllm": vllm.__version__, "config": settings.as_dict()}
            self.vtoken_recorder = Recorder(Path(settings.trace), view.pool, about=about)
        observers: list[Observer] = []
        if self.vtoken_recorder is not None:
            observers.append(self.vtoken_recorder)
        if settings.checks:
            observers.append(self.vtoken_checker)
        self.vtoken.observer = (
            Observers(*observers) if len(observers) > 1 else next(iter(observers), None)
        )
        self.vtoken_policies = PolicyHost(
            settings, requests=self.requests, why_no_scores=self._why_no_scores
        )

    @property
    def _policy_class(self) -> type[Policy] | None:
        return self.vtoken_policies.policy_class

    @_policy_class.setter
    def _policy_class(self, policy_class: type[Policy] | None) -> None:
        self.vtoken_policies.policy_class = policy_class

    # ---- overrides of vLLM

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.vtoken.begin_step()
        self.vtoken_manager.starved = False
        if self.vtoken_policies.active:
            for request in self.running:
                self._evict_and_reclaim(request)
            self._stop_failed()
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._register_step(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        news = news_of(model_runner_output)
        for number in news.failed:
            logger.warning("a copy of plan %d failed; the plan is aborted", number)
            self.vtoken.abort_flight(number)
        for step in news.scores:
            for req_id, scores in self.vtoken_scores.arrived(step, self.vtoken.tables):
                self.vtoken_policies.observe(req_id, scores)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._tell_stopped(outputs)
        return outputs

    def _free_request_blocks(self, request: Request) -> None:
        # Finish, abort and preemption: the policy's state goes with the table. A preempted
        # request comes back with all its tokens (on_resume = readmit) and a fresh policy.
        self.vtoken_policies.drop(request.request_id, finished=request.is_finished())
        if not request.is_finished() and request.request_id in self.vtoken.tables:
            self.vtoken.counters.recomputed_requests += 1
        # The manager drops the table as well, but cannot tell the two apart.
        self.vtoken.drop(request.request_id, preempted=not request.is_finished())
        super()._free_request_blocks(request)  # type: ignore[misc]

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        # With a step in flight when the turn ended, vLLM takes back a token that is registered
        # already. A table never forgets a token, so the session computes its context anew; the
        # prefix cache has most of it.
        table = self.vtoken.tables.get(session.request_id)
        if table is not None and table.logical_len > session.num_computed_tokens:
            self._free_request_blocks(session)
            session.num_computed_tokens = 0

    def shutdown(self) -> None:
        idle = self.vtoken_config.idle_reason(
            evicted=self.vtoken.counters.evicted, asked=self.vtoken_policies.calls
        )
        if idle is not None and self.vtoken.meter.peak.native:
            logger.warning("%s", idle)
        if self.vtoken_recorder is not None:
            self.vtoken_recorder.close()
        super().shutdown()  # type: ignore[misc]

    # ---- one step

    def _evict_and_reclaim(self, request: Request) -> None:
        pending = (
            request.num_tokens_with_spec
            + request.num_output_placeholders
            - request.num_computed_tokens
        )
        if pending <= 0:
            return  # a plan of it that is due is committed when it goes on
        req_id = request.request_id
        table = self.vtoken.tables.get(req_id)
        if table is None or not self.vtoken_policies.evicts(request):
            return
        victims = self.vtoken_policies.victims(request, table)
        if self.vtoken_policies.stops(req_id):
            return
        if len(victims):
            self.vtoken.evict(req_id, victims)
        if table.num_holes or self.vtoken.background is not None:
            self.vtoken.prepare(req_id, pending=pending)

    def _stop_failed(self) -> None:
        """End the requests whose policies failed, as aborts, before anything is scheduled."""
        for req_id, error in self.vtoken_policies.take_stops().items():
            for request in self.finish_requests(req_id, RequestStatus.FINISHED_ABORTED):
                self._stopped.append((request, error))

    def _tell_stopped(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Give each request that was ended here its last output: vLLM expects aborts from its
        clients, who know already."""
        for request, error in self._stopped:
            mine = outputs.setdefault(request.client_index, EngineCoreOutputs())
            last = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=str(error),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            mine.outputs = [*mine.outputs, last]
        self._stopped.clear()

    def _register_step(self, output: SchedulerOutput) -> None:
        """Register what vLLM scheduled and attach the step's layout to its output."""
        reclaimer, manager, checker = self.vtoken, self.vtoken_manager, self.vtoken_checker
        step = StepMetadata(orders=reclaimer.take_orders())
        for req_id, count in output.num_scheduled_tokens.items():
            total = self.requests[req_id].num_computed_tokens
            table = reclaimer.tables.get(req_id)
            known = 0 if table is None else table.num_blocks
            gained = manager.block_count(req_id) - known
            new_blocks = manager.block_ids_from(req_id, known) if gained else ()
            adopted = total - count if table is None else 0
            layout = reclaimer.schedule(req_id, new_blocks, total, adopted=adopted)
            if layout.reclaimed or layout.holes:
                step.layouts[req_id] = layout
            if checker.watches_reads(req_id):
                step.expected[req_id] = reclaimer.tables[req_id].snapshot()
            need = self.vtoken_policies.needs(req_id)
            if need is not ScoreNeed.NONE:
                request = self.requests[req_id]
                # A context that is computed anew counts as a prompt, like its first time.
                prompt = count > 1 or total <= request.num_prompt_tokens
                table = reclaimer.tables[req_id]
                own = self.vtoken_policies.settings_of(req_id)
                self.vtoken_scores.row(table, need, count=count, prompt=prompt, settings=own)
        step.taps = self.vtoken_scores.end_step()
        reclaimer.end_step(pressure=manager.starved)
        checker.end_step()
        if not step.empty:
            step.number = self._vtoken_sequence.next()
            attach(output, step)

    # ---- for reports

    def vtoken_report(self) -> dict[str, Any]:
        """Counts since start: tokens, blocks, checks by law, pool."""
        pool = self.kv_cache_manager.block_pool
        return {
            "reclaim": self.vtoken_config.reclaim,
            "block_size": self.vtoken_manager.block_size,
            "tokens": self.vtoken.counters.as_dict(),
            "policy_calls": self.vtoken_policies.calls,
            "policy_failures": self.vtoken_policies.failures,
            "policy_errors": list(self.vtoken_policies.messages),
            "blocks_now": self.vtoken.meter.now.as_dict(),
            "blocks_peak": self.vtoken.meter.peak.as_dict(),
            "checks": self.vtoken_checker.counts(),
            "pool": {"total": pool.num_gpu_blocks - 1, "free": pool.get_num_free_blocks()},
            "tables": len(self.vtoken.tables),
            "late_scores": self.vtoken_scores.dropped,
        }


class VTokenScheduler(VTokenSchedulerMixin, Scheduler):
    """vLLM's scheduler with vToken."""


class VTokenAsyncScheduler(VTokenSchedulerMixin, AsyncScheduler):
    """vLLM's async scheduler with vToken."""
