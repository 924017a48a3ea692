"""Worker of the targets p800 and emulated: one process per card."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_kunlun import ops
from vllm_kunlun.platforms.start_error import StartError
from vllm_kunlun.targets.p800.probe import MissingVendorOps, UnknownStack
from vllm_kunlun.targets.p800.questions import UnexpectedAnswer
from vllm_kunlun.upstream.extension import provide_extension_ops
from vllm_kunlun.upstream.patches import apply_p800_patches
from vllm_kunlun.worker.lifetime import end_with_parent
from vllm_kunlun.worker.p800_runner import P800ModelRunner
from vllm_kunlun.worker.start_line import start_line

logger = logging.getLogger("vllm.kunlun")

_NO_SLEEP = (
    "sleep mode was asked for; the p800 target has no allocator that gives a card's memory back and keeps its"
    " addresses. Drop --enable-sleep-mode."
)


def _activate_ops() -> Sequence[ops.OpRow]:
    try:
        return ops.activate()
    except (MissingVendorOps, UnknownStack, UnexpectedAnswer, ops.WrongProvider) as error:
        raise StartError(f"The vendor's kernels cannot be used: {error}") from error


class P800Worker(Worker):
    """Opens the card, binds the ops, and leaves the rest to vLLM's worker."""

    model_runner: P800ModelRunner

    def init_device(self) -> None:
        """Takes the card, binds the ops before anything is loaded, and makes the model runner."""
        end_with_parent()
        apply_p800_patches()
        self.local_rank += self._ranks_before()
        self.device = current_platform.device_of(
            current_platform.logical_device_id_to_visible_device_id(self.local_rank)
        )
        current_platform.set_device(self.device)
        self._start_ops()
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        self._measure_card()
        init_workspace_manager(self.device, 1)
        self.model_runner = P800ModelRunner(self.vllm_config, self.device)

    def _ranks_before(self) -> int:
        """Cards of this machine that other data-parallel replicas take first."""
        parallel = self.parallel_config
        replica = parallel.data_parallel_rank_local
        return (parallel.data_parallel_index if replica is None else replica) * parallel.world_size

    def _start_ops(self) -> None:
        rows = _activate_ops()
        provide_extension_ops(current_platform.dispatch_key)
        if self.rank == 0:
            logger.info("%s", start_line(rows))

    def _measure_card(self) -> None:
        """The card's memory before anything of the model is on it, from which vLLM's profiling starts."""
        gc.collect()
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Captures the graphs, then runs the largest sampling once, so that its memory is there when requests come.

        vLLM's own version warms up kernels that do not exist here, and cannot even be imported.
        """
        self.model_runner.capture_model()
        if get_pp_group().is_last_rank:
            self._warm_up_results()
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def _warm_up_results(self) -> None:
        scheduler, runner = self.scheduler_config, self.model_runner
        requests = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        hidden, last = runner._dummy_run(requests, skip_eplb=True, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        if runner.is_pooling_model:
            runner._dummy_pooler_run(hidden)
        else:
            runner._dummy_sampler_run(last)

    def sleep(self, level: int = 1) -> None:
        """Refused."""
        raise NotImplementedError(_NO_SLEEP)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Refused, as `sleep` is."""
        raise NotImplementedError(_NO_SLEEP)
