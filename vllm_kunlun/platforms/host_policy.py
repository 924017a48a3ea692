"""Config policy of the host target: one small named rule per concern."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_kunlun.platforms import envs, policy
from vllm_kunlun.platforms import graph_policy as graphs
from vllm_kunlun.targets.host import threads
from vllm_kunlun.targets.host.profile import HOST
from vllm_kunlun.upstream import patches
from vllm_kunlun.worker import lifetime

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "vllm_kunlun.worker.host_worker.HostWorker"


def own_worker(config: VllmConfig) -> None:
    """The host worker, unless the user names one."""
    policy.use_worker(config, WORKER)


def synchronous_scheduling(config: VllmConfig) -> None:
    """There is no device to run ahead of: a step's result is ready when the step returns."""
    config.scheduler_config.async_scheduling = False


def block_size(config: VllmConfig) -> None:
    """Blocks of the profile's size unless the user asks for another."""
    policy.use_block_size(config, HOST.default_block_size)


def share_the_machine(config: VllmConfig) -> None:
    """Half of the memory instead of vLLM's default, which is meant for a device that serves nothing else."""
    from vllm.config import CacheConfig

    cache = config.cache_config
    if cache.gpu_memory_utilization == CacheConfig.gpu_memory_utilization:
        cache.gpu_memory_utilization = HOST.default_memory_utilization


def ranks_fit_cpus(config: VllmConfig) -> None:
    """Refuses more ranks than CPUs before any of them starts."""
    threads.plan(0, config.parallel_config.local_world_size)


def supported_dtype(config: VllmConfig) -> None:
    """Refuses a model dtype that no kernel takes."""
    if config.model_config is not None:
        policy.check_dtype(config.model_config.dtype, HOST)


def cpu_profiler(config: VllmConfig) -> None:
    """The torch profiler has no device times to dump."""
    config.profiler_config.torch_profiler_dump_cuda_time_total = False


def forked_processes(config: VllmConfig) -> None:
    """Processes are forked unless the user chose: they need not import everything, nor the program a main guard.

    What a fork must not inherit is a running pool of threads. The kernels' own pool ends in a child by itself; torch's
    is not used where it has one thread, as in every worker that runs the kernels.
    """
    one_thread = envs.OPS_PROVIDER.get() != "torch" and os.environ.get("OMP_NUM_THREADS", "1") == "1"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork" if one_thread else "spawn")
    lifetime.separate_forked_processes()


def kernels_first(config: VllmConfig) -> None:
    """The API server and the kernels share the machine: a kernel that is interrupted holds up all of its threads."""
    patches.put_server_behind_kernels()


DEFAULTS: tuple[policy.Rule, ...] = (policy.eager_torch, graphs.whole_steps, graphs.capture_sizes)
RULES: tuple[policy.Rule, ...] = (
    policy.no_triton,
    supported_dtype,
    ranks_fit_cpus,
    policy.eager_torch,
    graphs.only_where_steps_can_be_captured,
    policy.no_fusion_passes,
    own_worker,
    synchronous_scheduling,
    block_size,
    share_the_machine,
    cpu_profiler,
    forked_processes,
    kernels_first,
)
