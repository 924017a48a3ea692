"""Worker of the host target: one process (or thread of control) per rank on the CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_kunlun import ops
from vllm_kunlun.ops.native import library
from vllm_kunlun.ops.native.build import BuildError
from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.graph_policy import no_graphs
from vllm_kunlun.platforms.start_error import StartError
from vllm_kunlun.targets.host import memory, threads
from vllm_kunlun.upstream.patches import apply_host_patches
from vllm_kunlun.worker.host_runner import HostModelRunner
from vllm_kunlun.worker.kv_budget import KvBudget
from vllm_kunlun.worker.lifetime import end_with_parent
from vllm_kunlun.worker.start_line import start_line

logger = logging.getLogger("vllm.kunlun")

# Activations grow with the tokens of a step, so a step of this many is measured and scaled up.
_PROFILED_TOKENS = 512


def _activate_ops() -> Sequence[ops.OpRow]:
    try:
        return ops.activate()
    except (BuildError, library.HostKernelsUnavailable) as error:
        raise StartError(
            f"The op kernels cannot be used: {error}. To serve with torch instead: VLLM_KUNLUN_OPS_PROVIDER=torch"
        ) from error


class HostWorker(Worker):
    """Initialises threads and memory, loads the model, and runs steps."""

    model_runner: HostModelRunner

    def init_device(self) -> None:
        """Binds the ops, starts the kernel threads and makes the model runner."""
        end_with_parent()
        apply_host_patches()
        self.device = torch.device("cpu")
        self._start_ops()
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        self._memory_before = memory.resident()
        init_workspace_manager(self.device, 1)
        self.model_runner = HostModelRunner(self.vllm_config, self.device)

    def _start_ops(self) -> None:
        rows = _activate_ops()
        if self.rank == 0:
            logger.info("%s", start_line(rows))
        if all(row.provider == "torch" for row in rows):
            no_graphs(self.vllm_config, "only the compiled kernels come with a recorder")
        self._start_threads(rows)

    def _start_threads(self, rows: Sequence[ops.OpRow]) -> None:
        plan = threads.plan(self.local_rank, self.parallel_config.local_world_size)
        if any(row.provider == "host" for row in rows):
            library.configure_threads(list(plan.cpus), plan.num_threads, envs.SPIN_US.get())
        # torch's own threads would spin against the kernel threads; an explicit OMP_NUM_THREADS is obeyed.
        served_by_torch = all(row.provider == "torch" for row in rows)
        if "OMP_NUM_THREADS" not in os.environ or served_by_torch:
            torch.set_num_threads(plan.num_threads if served_by_torch else 1)
        logger.info("Rank %d: %d kernel threads, CPUs %s", self.rank, plan.num_threads, list(plan.cpus) or "not pinned")

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: the user's figure, or what --gpu-memory-utilization leaves after everything else."""
        budget = KvBudget(
            memory=memory.read(),
            utilization=self.cache_config.gpu_memory_utilization,
            ranks=self.parallel_config.local_world_size,
            resident=memory.resident(),
            activations=self._measure_activations(),
        )
        logger.info("%s", budget)
        return budget.check(self.cache_config.kv_cache_memory_bytes)

    def _measure_activations(self) -> int:
        """Peak bytes of activations and workspaces in the largest step, scaled from a smaller one."""
        runner = self.model_runner
        largest = runner.max_num_tokens
        runner.max_num_tokens = min(largest, _PROFILED_TOKENS)
        before = memory.resident()
        memory.reset_peak_resident()
        try:
            runner.profile_run()
        finally:
            profiled, runner.max_num_tokens = runner.max_num_tokens, largest
        return max(0, memory.peak_resident() - before) * largest // profiled

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """There is nothing to compile: the profile run has already touched every kernel."""
        self.model_runner.capture_model()
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def sleep(self, level: int = 1) -> None:
        """Refused: the host target has no device memory to give back."""
        raise NotImplementedError("sleep mode was asked for; the host target has none. Drop --enable-sleep-mode.")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Refused, as `sleep` is."""
        raise NotImplementedError("sleep mode was asked for; the host target has none. Drop --enable-sleep-mode.")
