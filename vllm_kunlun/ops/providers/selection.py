"""Chooses, at start, which provider serves each op, and tells why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from vllm_kunlun.ops import contract
from vllm_kunlun.ops.native import library
from vllm_kunlun.ops.providers import torch_provider
from vllm_kunlun.platforms import envs

logger = logging.getLogger("vllm.kunlun")


@dataclass(frozen=True)
class OpRow:
    """Who serves one op: ``instruction_set`` is that of the compiled kernel, or ``torch``."""

    name: str
    provider: str
    reason: str
    instruction_set: str


def _torch_row(name: str, reason: str) -> OpRow:
    contract.register(name, torch_provider.implementation(name), "CPU")
    return OpRow(name, "torch", reason, "torch")


def _all_torch(reason: str) -> list[OpRow]:
    return [_torch_row(name, reason) for name in contract.ops()]


def _bind_host(reason: str) -> list[OpRow]:
    functions = library.load()
    compiled = set(functions.op_names())
    served = [name for name in contract.ops() if name in compiled]
    functions.bind(served)
    isa = functions.instruction_set()
    rows = [OpRow(name, "host", reason, isa) for name in served]
    rows += [_torch_row(name, "no compiled kernel") for name in contract.ops() if name not in compiled]
    return sorted(rows, key=lambda row: row.name)


def _automatic() -> list[OpRow]:
    try:
        return _bind_host("compiled kernel for this CPU")
    except library.HostKernelsUnavailable as error:
        logger.warning("Ops are served by torch, which is several times slower: %s", error)
        return _all_torch("no compiled library")


@cache
def activate() -> tuple[OpRow, ...]:
    """Binds every op for CPU tensors, once per process, as ``VLLM_KUNLUN_OPS_PROVIDER`` says.

    ``auto`` takes the compiled kernels, or torch with a warning where there is no compiler. A compiler that fails is an
    error (BuildError), and so is ``host`` without a compiler (HostKernelsUnavailable).
    """
    wanted = envs.OPS_PROVIDER.get()
    if wanted == "torch":
        return tuple(_all_torch("VLLM_KUNLUN_OPS_PROVIDER=torch"))
    if wanted == "host":
        return tuple(_bind_host("VLLM_KUNLUN_OPS_PROVIDER=host"))
    return tuple(_automatic())


__all__ = ["OpRow", "activate"]
