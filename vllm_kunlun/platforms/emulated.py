"""The platform of the target emulated: the p800 code path with the emulator in the place of card and vendor."""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from vllm_kunlun import emulator
from vllm_kunlun.platforms import emulated_policy
from vllm_kunlun.platforms.p800 import P800Platform
from vllm_kunlun.targets.p800.profile import EMULATED
from vllm_kunlun.targets.profile import Profile


class EmulatedPlatform(P800Platform):
    """Tensors on the CPU that stand for the card's; only what follows from that differs from P800Platform."""

    profile: ClassVar[Profile] = EMULATED
    default_rules = emulated_policy.DEFAULTS
    rules = emulated_policy.RULES

    def __init__(self) -> None:
        """Installs the emulator: nothing of the vendor has been imported yet in this process."""
        emulator.install()
        super().__init__()

    @classmethod
    def device_of(cls, index: int) -> torch.device:
        """The CPU, whichever card it stands for."""
        return torch.device(cls.profile.torch_device)

    @classmethod
    def host_buffer(cls, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [size], marked as the host's."""
        return emulator.host(super().host_buffer(size, dtype))

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """The emulator's first card: each process has a machine of its own.

        torch gets one thread unless OMP_NUM_THREADS says otherwise: threads that wait for each other after every small
        operator cost more than they save, most of all where the machine has other work.
        """
        torch.cuda.set_device(0)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        """Bytes this process has grown by."""
        return float(torch.cuda.memory_allocated())

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """No: torch pins memory for real devices only."""
        return False
