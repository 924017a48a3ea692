"""Config policy of the host target: one small named rule per concern."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_kunlun.platforms import graph_policy as graphs
from vllm_kunlun.targets.host import threads
from vllm_kunlun.targets.host.profile import HOST

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

# vLLM's config modules import the current platform, so they are imported inside the rules, not here.

logger = logging.getLogger("vllm.kunlun")

Rule = Callable[["VllmConfig"], None]

_BACKEND = "vllm_kunlun.attention.host.HostAttentionBackend"
_WORKER = "vllm_kunlun.worker.host_worker.HostWorker"


def no_compilation(config: VllmConfig) -> None:
    """Dynamo costs seconds at start and brings nothing where every op is a kernel of ours."""
    from vllm.config import CompilationMode

    asked = config.compilation_config.mode
    if asked not in (None, CompilationMode.NONE) and not config.model_config.enforce_eager:
        logger.info("Compilation mode %s was resolved to NONE: the host target runs kernels directly", asked.name)
    config.compilation_config.mode = CompilationMode.NONE


def no_fusion_passes(config: VllmConfig) -> None:
    """vLLM's fusion passes import classes that exist for its own devices only."""
    passes = config.compilation_config.pass_config
    for name, value in vars(passes).items():
        if value is True and name.startswith(("fuse_", "enable_")):
            setattr(passes, name, False)


def own_worker(config: VllmConfig) -> None:
    """The host worker, unless the user names one."""
    if config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = _WORKER


def synchronous_scheduling(config: VllmConfig) -> None:
    """There is no device to run ahead of: a step's result is ready when the step returns."""
    config.scheduler_config.async_scheduling = False


def block_size(config: VllmConfig) -> None:
    """Blocks of the profile's size unless the user asks for another."""
    if not config.cache_config.user_specified_block_size:
        config.cache_config.block_size = HOST.default_block_size


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
        check_dtype(config.model_config.dtype)


def cpu_profiler(config: VllmConfig) -> None:
    """The torch profiler has no device times to dump."""
    config.profiler_config.torch_profiler_dump_cuda_time_total = False


def spawned_workers(config: VllmConfig) -> None:
    """A forked worker would inherit kernel threads that do not exist in it; whoever forks knows that there are none."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def no_triton(config: VllmConfig) -> None:
    """No Triton kernel may be chosen, whatever is installed."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        raise ValueError(
            "vLLM found an active Triton driver, but the host target has no device for it. Uninstall triton from this"
            " environment, or hide the device it found."
        )


DEFAULTS: tuple[Rule, ...] = (no_compilation, graphs.whole_steps, graphs.capture_sizes)
RULES: tuple[Rule, ...] = (
    no_triton,
    supported_dtype,
    ranks_fit_cpus,
    no_compilation,
    graphs.only_where_steps_can_be_captured,
    no_fusion_passes,
    own_worker,
    synchronous_scheduling,
    block_size,
    share_the_machine,
    cpu_profiler,
    spawned_workers,
)


def apply_defaults(config: VllmConfig) -> None:
    """Rules that vLLM's own derived defaults depend on."""
    for rule in DEFAULTS:
        rule(config)


def apply_rules(config: VllmConfig) -> None:
    """All rules, in order. Raises ValueError from the first that cannot be met."""
    for rule in RULES:
        rule(config)


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError unless kernels take `dtype`."""
    if dtype not in HOST.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in HOST.dtypes)
        wrong = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"dtype {wrong} was asked for; the host target computes in {names}. Set --dtype to one of them."
        )


def refuse_quantization(quant: str) -> None:
    """Raises ValueError: no quantized layer has a kernel on this target yet."""
    raise ValueError(
        f"{quant} quantization was asked for (by --quantization or the checkpoint's quantization_config); the host"
        " target serves unquantized checkpoints only. Use the bfloat16 or float16 checkpoint of this model."
    )


def attention_backend(selected: Any, selector: AttentionSelectorConfig) -> str:
    """Class path of the backend for these layers. Raises ValueError naming every feature that is missing."""
    from vllm_kunlun.attention.host import HostAttentionBackend

    if selected is not None and selected.name != HostAttentionBackend.get_name():
        logger.info("Attention backend %s was resolved to %s", selected.name, HostAttentionBackend.get_name())
    reasons = HostAttentionBackend.validate_configuration(device_capability=None, **selector._asdict())
    if reasons:
        raise ValueError(f"This model's attention cannot run on the host target: {'; '.join(reasons)} ({selector})")
    return _BACKEND
