"""Config policy of the p800 target: one small named rule per concern."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from vllm_kunlun.platforms import policy
from vllm_kunlun.targets.p800.profile import P800

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "vllm_kunlun.worker.p800_worker.P800Worker"

logger = logging.getLogger("vllm.kunlun")


def whole_decode_steps(config: VllmConfig) -> None:
    """Graphs of decode steps, unless the user wants none.

    A graph keeps the host numbers of its capture. Decode kernels need of them only that none is exceeded; a prefill's
    offsets differ from step to step, so that steps with one run eagerly.
    """
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    asked = compilation.cudagraph_mode
    if asked in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY):
        return
    if asked is not None:
        logger.info(
            "Graph mode %s was resolved to FULL_DECODE_ONLY: prefill attention takes its offsets from the host, and"
            " pieces between attention layers would need torch.compile, which the vendor's torch replaces",
            asked.name,
        )
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def eager_if_asked(config: VllmConfig) -> None:
    """--enforce-eager and pooling models run without graphs."""
    from vllm.config import CUDAGraphMode

    model = config.model_config
    if model is not None and (model.enforce_eager or model.runner_type == "pooling"):
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        config.compilation_config.cudagraph_capture_sizes = []
        config.compilation_config.max_cudagraph_capture_size = 0
    config.compilation_config.compile_sizes = []


def own_worker(config: VllmConfig) -> None:
    """The P800 worker, unless the user names one."""
    policy.use_worker(config, WORKER)


def spawned_workers(config: VllmConfig) -> None:
    """A forked process cannot use a card that its parent has opened."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def supported_dtype(config: VllmConfig) -> None:
    """Refuses a model dtype that no kernel takes."""
    if config.model_config is not None:
        policy.check_dtype(config.model_config.dtype, P800)


def no_lora(config: VllmConfig) -> None:
    """Refuses LoRA."""
    if config.lora_config is not None:
        raise ValueError(
            "LoRA was asked for; the p800 target has no kernels for it yet. Drop --enable-lora, or set"
            " VLLM_KUNLUN_TARGET=host to run on the CPU."
        )


def no_speculation(config: VllmConfig) -> None:
    """Refuses speculative decoding."""
    if config.speculative_config is not None:
        raise ValueError(
            "speculative decoding was asked for; the p800 target has no kernels for it yet. Drop --speculative-config."
        )


DEFAULTS: tuple[policy.Rule, ...] = (policy.eager_torch, whole_decode_steps)
RULES: tuple[policy.Rule, ...] = (
    policy.no_triton,
    supported_dtype,
    no_lora,
    no_speculation,
    policy.eager_torch,
    eager_if_asked,
    policy.no_fusion_passes,
    own_worker,
    spawned_workers,
)
