"""Config rules for Kunlun Graph on the host target."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kunlun")

_LARGEST_STEP = 256
"""Tokens of the largest captured step: in larger ones what Python costs is small beside the kernels."""


def whole_steps(config: VllmConfig) -> None:
    """FULL unless the user asks for another mode without pieces.

    Every kernel of the target, attention included, reads what changes from step to step out of tensors, so that a step
    need not be cut into pieces around attention, whatever is in the batch.
    """
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    asked = compilation.cudagraph_mode
    if asked is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL
    elif asked.has_piecewise_cudagraphs():
        logger.info("Graph mode %s was resolved to FULL: the host target captures attention too", asked.name)
        compilation.cudagraph_mode = CUDAGraphMode.FULL


def capture_sizes(config: VllmConfig) -> None:
    """Steps are captured when they first come, so small sizes are all exact and few tokens are padding."""
    compilation = config.compilation_config
    if compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        largest = min(_LARGEST_STEP, config.scheduler_config.max_num_batched_tokens)
        sizes = {*range(1, 33), *range(40, 129, 8), *range(144, _LARGEST_STEP + 1, 16), largest}
        compilation.cudagraph_capture_sizes = sorted(size for size in sizes if size <= largest)


def only_where_steps_can_be_captured(config: VllmConfig) -> None:
    """No graphs for what Python decides in each step."""
    reason = _why_not(config)
    if reason is not None:
        no_graphs(config, reason)
    config.compilation_config.compile_sizes = []


def no_graphs(config: VllmConfig, reason: str) -> None:
    """Every step runs eagerly from now on; the log says why, unless that was asked for."""
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    if compilation.cudagraph_mode != CUDAGraphMode.NONE:
        logger.info("Graph mode %s was resolved to NONE: %s", compilation.cudagraph_mode.name, reason)
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []
    compilation.max_cudagraph_capture_size = 0


def _why_not(config: VllmConfig) -> str | None:
    if config.lora_config is not None:
        return "LoRA products are grouped by adapter in Python"
    if config.model_config is not None and config.model_config.runner_type == "pooling":
        return "a pooling model runs whole prompts"
    if config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
        return "the host target has no piecewise graphs"
    return None
