"""Stand-in for the vendor's matrix product, which xpytorch puts in the place of torch's linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.emulator import runtime
from vllm_kunlun.emulator.call import dtype_name
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.targets.p800.contract_load import load

NAME = "torch.nn.functional.linear"
FAULT = "linear-wide-output"
Linear = Callable[..., Tensor]


@dataclass(frozen=True)
class LinearCall:
    """One product, computed by torch's own function."""

    original: Linear
    settings: Settings
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    name: str = NAME
    kind: runtime.CallKind = "vendor"

    def run(self, replay: bool = False) -> Tensor:
        """input · weightᵀ + bias; wrong where the fault says so."""
        out = self.original(self.input, self.weight, self.bias)
        return out.roll(1, -1) if self._faulty() else out

    def captured(self) -> LinearCall:
        """All of its tensors are on the device."""
        return self

    def _faulty(self) -> bool:
        thresholds = self.settings.faults.get(FAULT)
        region = load().fault(FAULT).region
        if thresholds is None or region is None:
            return False
        rows = self.input.numel() // max(self.input.shape[-1], 1)
        names = {"M": rows, "N": self.weight.shape[0], "K": self.weight.shape[-1], **thresholds}
        return bool(region.value({**names, "dtype": _Dtype(dtype_name(self.input.dtype))}))


@dataclass(frozen=True)
class _Dtype:
    input: str


def stand_in(original: Linear, settings: Settings) -> Linear:
    """A function that counts as a launch; what torch traces or differentiates goes to the original."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        plain = type(input) is Tensor and type(weight) in (Tensor, torch.nn.Parameter) and input.device.type == "cpu"
        traced = torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        )
        if not plain or traced:
            return original(input, weight, bias)
        return runtime.submit(LinearCall(original, settings, input, weight, bias))

    return linear
