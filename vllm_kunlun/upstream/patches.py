"""The entries of the patch ledger."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.machine import installed_version
from vllm_kunlun.upstream import interruption, priority
from vllm_kunlun.upstream.ledger import Gap, Patch, apply, fill


class Launcher:
    """Stands in for a Triton kernel: ``kernel[grid](*args, **kwargs)`` calls a plain function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.function


def _compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Any,
    positions: Any,
    block_table: Any,
    block_table_stride: int,
    block_size: int,
    slot_mapping: Any,
    *,
    TOTAL_CP_WORLD_SIZE: int,
    PAD_ID: int,
    **launch_options: Any,
) -> None:
    import torch

    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError(
            f"context parallelism over {TOTAL_CP_WORLD_SIZE} ranks was asked for, vllm-kunlun has none;"
            " drop --decode-context-parallel-size and --prefill-context-parallel-size"
        )
    torch.ops.kunlun.slot_mapping(
        slot_mapping[:max_num_tokens], query_start_loc, positions[:num_tokens], block_table, block_size, PAD_ID
    )


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """The host target has no accelerator to wait for and no device cache to empty."""


def _mask_tokens(
    logits: Any, bitmask: Any, *, vocab_size: int | None = None, indices: Any = None, **options: Any
) -> None:
    """Sets logits, float [B, V], to minus infinity where `bitmask`, int32 [B, V / 32], has no bit.

    `indices` would spare rows without a grammar; all their bits are set, so that they need no exception.
    """
    import torch

    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.size(1)]
    logits.masked_fill_(allowed == 0, float("-inf"))


def _memory_info() -> Callable[..., tuple[int, int]]:
    import torch

    return torch.cuda.mem_get_info


def _with_own_variables(known: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    return {**known, **{variable.name: partial(os.environ.get, variable.name) for variable in envs.VARIABLES}}


KNOWN_VARIABLES = Patch(
    target="vllm.envs:environment_variables",
    reason="vLLM warns of every VLLM_* variable that is not in its own table, or refuses to start because of it",
    distribution="vllm",
    versions=">=0.25,<0.26",
    test="tests/upstream/test_ledger.py::test_vllm_still_warns_of_variables_that_plugins_read",
    make=_with_own_variables,
)

START_SOCKET = Patch(
    target="vllm.v1.engine.utils:zmq_socket_ctx",
    reason="it swallows the interrupt that SIGTERM or Ctrl-C raises while the engine starts, and the server lives on",
    distribution="vllm",
    versions=">=0.25,<0.26",
    test="tests/upstream/test_ledger.py::test_start_socket_still_swallows_an_interrupt",
    make=interruption.interruptible,
)

SERVE_COMMAND = Patch(
    target="vllm.entrypoints.cli.serve:ServeSubcommand.cmd",
    reason="an interrupted start ends with a traceback, and Ctrl-C waits until the engine is up",
    distribution="vllm",
    versions=">=0.25,<0.26",
    test="tests/upstream/test_ledger.py::test_serve_command_still_lets_an_interrupt_out",
    make=interruption.leaving_quietly,
)

SLOT_MAPPING = Patch(
    target="vllm.v1.worker.block_table:_compute_slot_mapping_kernel",
    reason="a Triton kernel without a hook for platforms that have no Triton",
    distribution="vllm",
    versions=">=0.25,<0.26",
    test="tests/upstream/test_ledger.py::test_slot_mapping_kernel_still_needs_triton",
    make=lambda original: Launcher(_compute_slot_mapping),
)

EMPTY_CACHE = Patch(
    target="torch:accelerator.empty_cache",
    reason="vLLM calls it without asking whether there is an accelerator, at shutdown and around graph capture",
    distribution="torch",
    versions=">=2.9",
    test="tests/upstream/test_ledger.py::test_accelerator_calls_still_fail_without_accelerator",
    make=lambda original: _do_nothing,
)

SYNCHRONIZE = Patch(
    target="torch:accelerator.synchronize",
    reason="vLLM's model runner calls it after profiling and for prompt log probabilities",
    distribution="torch",
    versions=">=2.9",
    test="tests/upstream/test_ledger.py::test_accelerator_calls_still_fail_without_accelerator",
    make=lambda original: _do_nothing,
)

TRITON_DRIVERS = Patch(
    target="triton.backends:backends",
    reason="vLLM calls Triton kernels where a driver of Triton is active, which is so wherever torch.cuda is available",
    distribution="triton",
    versions=">=2",
    test="tests/upstream/test_p800_entries.py::test_vllm_still_looks_for_active_triton_drivers",
    make=lambda original: {},
)

TOKEN_BITMASK = Patch(
    target="xgrammar:apply_token_bitmask_inplace",
    reason="on a `cuda` device it launches a Triton kernel",
    distribution="xgrammar",
    versions=">=0.1",
    test="tests/upstream/test_p800_entries.py::test_xgrammar_still_wants_triton_on_cuda",
    make=lambda original: _mask_tokens,
)

TORCH_PATCHES = (EMPTY_CACHE, SYNCHRONIZE)
HOST_PATCHES = (SLOT_MAPPING, *TORCH_PATCHES)
ENGINE_OUTPUT = Patch(
    target="vllm.v1.engine.core_client:AsyncMPClient.get_output_async",
    reason="ending the engine is reported as its loss, with a traceback, when the server's event loop is slow to end",
    distribution="vllm",
    versions=">=0.25,<0.26",
    test="tests/upstream/test_ledger.py::test_client_still_reports_the_end_it_ordered_as_a_loss",
    make=interruption.knowing_the_end,
)

SERVE_HTTP = Patch(
    target="vllm.entrypoints.openai.api_server:serve_http",
    reason="there is no hook between the start of the engine and the first request",
    distribution="vllm",
    versions=">=0.25,<0.26",
    test="tests/upstream/test_ledger.py::test_vllm_still_serves_at_the_priority_it_was_started_with",
    make=priority.behind_the_kernels,
)

START_PATCHES = (START_SOCKET, SERVE_COMMAND, ENGINE_OUTPUT, SERVE_HTTP)
PATCHES = (KNOWN_VARIABLES, *START_PATCHES, *HOST_PATCHES, TRITON_DRIVERS, TOKEN_BITMASK)

GET_MEMORY_INFO = Gap(
    target="torch:accelerator.get_memory_info",
    reason="vLLM measures the card with it, and torch 2.9 does not have it yet",
    test="tests/upstream/test_p800_entries.py::test_a_function_that_torch_lacks_is_added",
    make=_memory_info,
)

GAPS = (GET_MEMORY_INFO,)


def apply_torch_patches() -> None:
    """Applies what every process of the host target needs, the engine's included."""
    for patch in TORCH_PATCHES:
        apply(patch)


def apply_start_patches() -> None:
    """Applies what a process needs that starts an engine: not the engine's own, nor a worker's."""
    if multiprocessing.parent_process() is not None:
        return
    apply(START_SOCKET)
    apply(ENGINE_OUTPUT)
    logging.getLogger("vllm.v1.engine.async_llm").addFilter(interruption.is_news)
    if "vllm.entrypoints.cli.serve" in sys.modules:  # it belongs to the command line, and is slow to import
        apply(SERVE_COMMAND)


def put_server_behind_kernels() -> None:
    """Where this process is an API server, it gives way to kernels once it serves."""
    if "vllm.entrypoints.openai.api_server" in sys.modules:  # slow to import, and only servers have it
        apply(SERVE_HTTP)


def apply_host_patches() -> None:
    """Applies what the host target needs, once per process."""
    for patch in HOST_PATCHES:
        apply(patch)


def apply_p800_patches() -> None:
    """Applies what workers of the targets p800 and emulated need, once per process."""
    apply(SLOT_MAPPING)


def apply_grammar_patch() -> None:
    """Applies what structured output on a card needs; imports xgrammar, hence only where a request asks for it."""
    apply(TOKEN_BITMASK)


def hide_triton_drivers() -> None:
    """No driver of Triton is found from here on; to be called before vLLM looks for them."""
    if installed_version("triton") is not None:
        apply(TRITON_DRIVERS)


def fill_torch_gaps() -> None:
    """Adds the functions of torch that vLLM calls and the installed release lacks."""
    for gap in GAPS:
        fill(gap)
