"""Environment variables that the vendor's libraries read, set before they load; imports neither torch nor a vendor's.

Sources: public notes and command lines of runs on P800 cards. Who reads a variable inside the vendor's binaries is not
known, so that one which the user has set is left as it is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from importlib import metadata

from vllm_kunlun.platforms import envs

logger = logging.getLogger("vllm.kunlun")

VISIBLE = ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The driver reads the first and torch the second; both must name the same cards."""

_BOTH = ("torch25", "torch29")


@dataclass(frozen=True)
class VendorVariable:
    """A variable that is set where the user has not."""

    name: str
    value: str
    reason: str
    generations: tuple[str, ...] = _BOTH


@dataclass(frozen=True)
class ForbiddenVariable:
    """A variable that must not be set."""

    name: str
    reason: str


SET: tuple[VendorVariable, ...] = (
    VendorVariable("XPU_USE_DEFAULT_CTX", "1", "all libraries of a process share one context of the card"),
    VendorVariable("XMLIR_CUDNN_ENABLED", "1", "convolutions of vision models run on the card"),
    VendorVariable("XFT_USE_FAST_SWIGLU", "1", "the fast form of kunlun_ops.swiglu"),
    VendorVariable("XPU_USE_FAST_SWIGLU", "1", "the fast form inside the expert product"),
    VendorVariable("XMLIR_FORCE_USE_XPU_GRAPH", "1", "graphs of the vendor's own; captures may fail without it"),
    VendorVariable("XMLIR_DYNAMO_WORKAROUND", "1", "captures of graphs with torch 2.9", ("torch29",)),
    VendorVariable("VLLM_USE_V2_MODEL_RUNNER", "0", "vLLM's second model runner needs Triton"),
)

FORBIDDEN: tuple[ForbiddenVariable, ...] = (
    ForbiddenVariable("XPU_DUMMY_EVENT", "events that do not wait give wrong results with graphs"),
    ForbiddenVariable("XTORCHRUN_CLEAN", "it ends other processes that use the cards"),
)


class EnvironmentProblem(ValueError):
    """A variable of the vendor's is set to what cannot work."""


def problem(environ: MutableMapping[str, str]) -> str | None:
    """What is wrong with the vendor's variables and what to do, or None."""
    for forbidden in FORBIDDEN:
        if environ.get(forbidden.name, "") not in ("", "0"):
            return f"{forbidden.name} is set: {forbidden.reason}. Unset it."
    first, second = (environ.get(name) for name in VISIBLE)
    if first and second and first != second:
        return f"{VISIBLE[0]}={first} and {VISIBLE[1]}={second} name different cards. Set one of them, or both equal."
    return None


def variables(generation: str | None) -> tuple[VendorVariable, ...]:
    """What a generation of the vendor's libraries wants; what all want where it is not known."""
    return tuple(v for v in SET if generation in v.generations or v.generations == _BOTH)


def generation(emulated: bool) -> str | None:
    """The generation of the installed torch, or the emulator's; None where no wheels are known for it."""
    from vllm_kunlun.targets.p800.contract_load import load

    if emulated:
        return envs.EMULATOR_GENERATION.get()
    try:
        found = load().generation_of(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None
    return None if found is None else found.value


def same_cards(environ: MutableMapping[str, str], is_child: bool) -> None:
    """Gives both variables the value of the one that is set.

    In a child process vLLM has chosen the cards with the first one; what the second says comes from its parent.
    """
    first, second = (environ.get(name) for name in VISIBLE)
    if first and (is_child or not second):
        environ[VISIBLE[1]] = first
    elif second and not first:
        environ[VISIBLE[0]] = second


def prepare(emulated: bool, environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Sets what is missing in `environ` (default: this process's), for this process and its children; returns it."""
    environ = os.environ if environ is None else environ
    same_cards(environ, multiprocessing.parent_process() is not None)
    added = {v.name: v.value for v in variables(generation(emulated)) if v.name not in environ}
    environ.update(added)
    if added:
        logger.debug("Set for the vendor's libraries: %s", ", ".join(f"{k}={v}" for k, v in added.items()))
    return added
