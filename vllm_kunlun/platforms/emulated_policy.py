"""Config policy of the target emulated: the p800's, and what makes it bearable on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kunlun.platforms import p800_policy, policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LARGEST_GRAPH = 16


def few_graphs(config: VllmConfig) -> None:
    """Small graphs only, unless the user chose sizes: the emulator computes each one at its capture."""
    compilation = config.compilation_config
    if compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        largest = min(_LARGEST_GRAPH, config.scheduler_config.max_num_seqs)
        compilation.cudagraph_capture_sizes = sorted({size for size in (1, 2, 4, 8, _LARGEST_GRAPH) if size <= largest})


def cpu_profiler(config: VllmConfig) -> None:
    """The torch profiler has no device times to dump."""
    config.profiler_config.torch_profiler_dump_cuda_time_total = False


DEFAULTS: tuple[policy.Rule, ...] = (*p800_policy.DEFAULTS, few_graphs)
RULES: tuple[policy.Rule, ...] = (*p800_policy.RULES, cpu_profiler)
