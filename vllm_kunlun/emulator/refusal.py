"""How the emulator refuses a call."""

from __future__ import annotations


class VendorRefusal(ValueError):
    """A call breaks a rule of the contract. The first line is what the vendor's library says, the second is ours."""

    def __init__(self, op: str, rule: str) -> None:
        short = op.rpartition(".")[2]
        super().__init__(f"Check 0 == ret failed at {op}: {short} failed\nVendor contract of {op}: {rule}")
        self.op = op
        self.rule = rule


class NotEmulatedYet(NotImplementedError):
    """The callable is in the vendor contract, but its arithmetic is not in the emulator."""

    def __init__(self, op: str, why: str = "its arithmetic is not written") -> None:
        super().__init__(
            f"{op} was called; the emulator does not emulate it yet: {why}. Use another vendor op on target emulated,"
            " or add it to vllm_kunlun/emulator/numerics."
        )
