"""A strict stand-in for the vendor's libraries, on CPU tensors, written from the vendor contract.

`install` puts it in the place of `kunlun_ops`, `torch.ops.xspeedgate_ops`, `cocopod` and the part of torch.cuda that
the driver uses; `uninstall` takes it out. It refuses what the contract forbids, leaves unwritten what the vendor leaves
unwritten, and reproduces the known faults that VLLM_KUNLUN_EMULATOR_FAULTS names.
"""

from vllm_kunlun.emulator.launch_record import HostRoundTrip, Launch, LaunchRecord
from vllm_kunlun.emulator.placement import host
from vllm_kunlun.emulator.refusal import NotEmulatedYet, VendorRefusal
from vllm_kunlun.emulator.session import (
    EmulatorStateError,
    Session,
    current,
    guard,
    install,
    launches,
    running,
    uninstall,
)
from vllm_kunlun.emulator.settings import EmulatorSettingError, Settings
from vllm_kunlun.emulator.vendor import emulated

__all__ = [
    "EmulatorSettingError",
    "EmulatorStateError",
    "HostRoundTrip",
    "Launch",
    "LaunchRecord",
    "NotEmulatedYet",
    "Session",
    "Settings",
    "VendorRefusal",
    "current",
    "emulated",
    "guard",
    "host",
    "install",
    "launches",
    "running",
    "uninstall",
]
