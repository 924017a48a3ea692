"""Memory figures of the emulated device, in bytes: a total that is asked for, and what this process has taken since."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_kunlun.targets.host import memory


@dataclass
class DeviceMemory:
    """`total` is the card's memory. Tensors are in this process's own, so its growth stands for what is allocated."""

    total: int
    baseline: int
    peak: int = 0

    @classmethod
    def start(cls, total: int) -> DeviceMemory:
        """A card of `total` bytes, with nothing allocated."""
        return cls(total, memory.resident())

    def restart(self) -> None:
        """Nothing is allocated from here on: what this process has taken so far is its own."""
        self.baseline, self.peak = memory.resident(), 0

    def allocated(self) -> int:
        """Bytes in use, at most the total."""
        used = min(self.total, max(0, memory.resident() - self.baseline))
        self.peak = max(self.peak, used)
        return used

    def peak_allocated(self) -> int:
        """Highest use since the last reset."""
        grown = min(self.total, max(0, memory.peak_resident() - self.baseline))
        self.peak = max(self.peak, grown)
        return self.peak

    def reset_peak(self) -> None:
        """Makes the peak start again from the present use."""
        memory.reset_peak_resident()
        self.peak = self.allocated()

    def free(self) -> int:
        """Bytes that could be allocated."""
        return self.total - self.allocated()

    def stats(self) -> dict[str, int]:
        """The figures that torch's allocator gives and vLLM reads."""
        used, peak = self.allocated(), self.peak_allocated()
        return {
            "allocated_bytes.all.current": used,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": used,
            "reserved_bytes.all.peak": peak,
        }
