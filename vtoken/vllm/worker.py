"""Worker classes: CPU and GPU share everything but how the runner comes to be."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vtoken.config import VTokenConfig
from vtoken.vllm.guards import check_config
from vtoken.vllm.kv_manager import register_spec
from vtoken.vllm.runner import VTokenCPUModelRunner, VTokenGPUModelRunner


class VTokenWorkerMixin:
    """What vToken adds to a vLLM worker. Mixed in before the worker class."""

    model_runner: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_config(vllm_config)
        register_spec()
        super().__init__(vllm_config, *args, **kwargs)

    def vtoken_configure(self, values: dict[str, Any]) -> None:
        """Take a configuration from the next step on, for `collective_rpc`."""
        self.model_runner.vtoken_configure(VTokenConfig.from_mapping(values))

    def vtoken_report(self) -> dict[str, Any]:
        """Counts of this rank since start, for `collective_rpc`."""
        runner = self.model_runner
        return {
            "checks": runner.vtoken_checker.counts(),
            "view_rebuilds": runner.vtoken_translation.rebuilds,
            "view_updates": runner.vtoken_translation.updates,
            "failed_copies": runner.vtoken_relocator.failed_copies,
            "moved_tokens": runner.vtoken_relocator.mover.moved_tokens,
            "moved_bytes": runner.vtoken_relocator.mover.moved_bytes,
        }


class VTokenCPUWorker(VTokenWorkerMixin, CPUWorker):
    """vLLM's CPU worker with vToken."""

    def init_device(self) -> None:
        super().init_device()
        # The CPU worker has no factory for its runner; the subclass adds methods only, so
        # the class of the finished object can be changed.
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2

            from vtoken.vllm.runner_v2 import VTokenCPUModelRunnerV2

            assert type(self.model_runner) is CPUModelRunnerV2
            self.model_runner.__class__ = VTokenCPUModelRunnerV2
        else:
            assert type(self.model_runner) is CPUModelRunner
            self.model_runner.__class__ = VTokenCPUModelRunner


class VTokenGPUWorker(VTokenWorkerMixin, Worker):
    """vLLM's GPU worker with vToken."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from vtoken.vllm.runner_v2 import VTokenGPUModelRunnerV2

            return VTokenGPUModelRunnerV2(self.vllm_config, self.device)
        return VTokenGPUModelRunner(self.vllm_config, self.device)
