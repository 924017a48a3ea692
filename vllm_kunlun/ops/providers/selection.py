"""Chooses, at start, which provider serves each op, and tells why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from vllm_kunlun.ops import contract
from vllm_kunlun.ops.native import library
from vllm_kunlun.ops.providers import torch_provider
from vllm_kunlun.platforms import envs, probe

logger = logging.getLogger("vllm.kunlun")


class WrongProvider(ValueError):
    """The asked provider cannot serve this target."""


@dataclass(frozen=True)
class OpRow:
    """Who serves one op: ``instruction_set`` is that of the compiled kernel, the vendor's stack, or ``torch``."""

    name: str
    provider: str
    reason: str
    instruction_set: str


def _torch_row(name: str, reason: str, dispatch_key: str = "CPU") -> OpRow:
    contract.register(name, torch_provider.implementation(name), dispatch_key)
    return OpRow(name, "torch", reason, "torch")


def _all_torch(reason: str, dispatch_key: str = "CPU") -> list[OpRow]:
    return [_torch_row(name, reason, dispatch_key) for name in contract.ops()]


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


def _bind_p800(emulated: bool) -> list[OpRow]:
    """The P800's ops on its device, or on CPU tensors with the emulator, which must be installed by then."""
    from vllm_kunlun.ops.providers import p800
    from vllm_kunlun.targets.p800.probe import generation_here, probe

    device, key = (torch.device("cpu"), "CPU") if emulated else (torch.device("cuda"), "CUDA")
    wanted = envs.OPS_PROVIDER.get()
    if wanted == "host":
        raise WrongProvider(f"{envs.OPS_PROVIDER.name}=host has kernels for the host target only; unset it")
    if wanted == "torch":
        return _all_torch(f"{envs.OPS_PROVIDER.name}=torch", key)
    generation = generation_here(emulated)
    reasons = p800.bind(probe(generation), device, key)
    return [OpRow(name, "p800", reason, generation.value) for name, reason in reasons.items()]


@cache
def activate() -> tuple[OpRow, ...]:
    """Binds every op for the target's tensors, once per process, as ``VLLM_KUNLUN_OPS_PROVIDER`` says.

    On the host target ``auto`` takes the compiled kernels, or torch with a warning where there is no compiler. A
    compiler that fails is an error (BuildError), and so is ``host`` without a compiler (HostKernelsUnavailable). On the
    targets p800 and emulated ``auto`` takes the vendor's callables; those that are needed and not installed are one
    error (MissingVendorOps), so that a server stops before it loads weights. A setting that cannot be used is an
    EnvironmentVariableError: no target can be chosen then.
    """
    envs.validate()
    target = probe.current_choice().target
    if target in ("p800", "emulated"):
        return tuple(_bind_p800(emulated=target == "emulated"))
    wanted = envs.OPS_PROVIDER.get()
    if wanted == "torch":
        return tuple(_all_torch("VLLM_KUNLUN_OPS_PROVIDER=torch"))
    if wanted == "host":
        return tuple(_bind_host("VLLM_KUNLUN_OPS_PROVIDER=host"))
    return tuple(_automatic())


__all__ = ["OpRow", "WrongProvider", "activate"]
