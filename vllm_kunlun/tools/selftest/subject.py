"""What is tested: the ops as this process serves them, and what it takes to call them on the target's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from vllm_kunlun import emulator, ops
from vllm_kunlun.ops.contract import Case
from vllm_kunlun.ops.providers.p800 import SERVICES, Refused
from vllm_kunlun.platforms.probe import TargetChoice
from vllm_kunlun.targets.p800.contract import KnownFault
from vllm_kunlun.targets.p800.probe import VendorStack, generation_here, probe
from vllm_kunlun.tools.selftest.judging import Arguments, unguarded


class NothingToTest(ValueError):
    """The plugin is inactive, or its target cannot be used."""


@dataclass(frozen=True)
class Subject:
    """`functions` serve the ops by name; `stack` is the vendor's, None on the host."""

    target: str
    reason: str
    device: torch.device
    rows: Mapping[str, ops.OpRow]
    functions: Mapping[str, Callable[..., None]]
    stack: VendorStack | None = None

    @property
    def generation(self) -> str | None:
        """The vendor's stack, ``torch25`` or ``torch29``; None on the host."""
        return self.stack.generation.value if self.stack is not None else None

    @property
    def refusal(self) -> type[Exception] | None:
        """What the provider raises for a call that its kernels are known not to serve."""
        return Refused if self.stack is not None else None

    def laid_out(self, case: Case) -> Case:
        """The case as the target lays its caches out: [2, num_blocks, Hk, block_size, D] with the vendor's kernels."""
        if self.stack is None or "key_cache" not in case.args:
            return case
        both = torch.stack([case.args["key_cache"], case.args["value_cache"]])
        return replace(case, args={**case.args, "key_cache": both[0], "value_cache": both[1]})

    def guard(self, args: Arguments) -> AbstractContextManager[None]:
        """A context for one call; on the emulator a way through the host is an error of the vendor's provider."""
        vendor = any(row.provider == "p800" for row in self.rows.values())
        return _guarded(args) if self.target == "emulated" and vendor else unguarded(args)

    def known_faults(self, name: str) -> tuple[KnownFault, ...]:
        """Known faults of the callables that serve an op in this generation."""
        if self.stack is None or self.rows[name].provider != "p800":
            return ()
        service, contract = SERVICES[name], self.stack.contract
        used = {*service.needs, *service.prefers}
        faults = [f for f in contract.faults.values() if used & set(f.ops) and self.stack.generation in f.generations]
        return tuple(fault for fault in faults if not fault.always)


@contextmanager
def _guarded(args: Arguments) -> Iterator[None]:
    for name, value in args.items():
        if name.endswith("_cpu") and isinstance(value, torch.Tensor):
            emulator.host(value)
    with emulator.guard():
        yield


def subject(choice: TargetChoice) -> Subject:
    """The ops of this process's target; installs the emulator on the target emulated.

    Raises NothingToTest, and what `ops.activate` raises.
    """
    if choice.error is not None:
        raise NothingToTest(choice.error)
    if choice.target is None:
        raise NothingToTest(
            f"the plugin is inactive here, because {choice.reason}. VLLM_KUNLUN_TARGET=host tests the CPU kernels."
        )
    emulated = choice.target == "emulated"
    if emulated:
        emulator.install()
    rows = {row.name: row for row in ops.table()}
    stack = probe(generation_here(emulated)) if choice.target in ("p800", "emulated") else None
    device = torch.device("cuda" if choice.target == "p800" else "cpu")
    functions = {name: op.call for name, op in ops.ops().items()}
    return Subject(choice.target, choice.reason, device, rows, functions, stack)
