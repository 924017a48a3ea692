"""How many bytes the KV cache gets on the host target."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_kunlun.targets.host.memory import HostMemory

_GIB = 1 << 30


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"


@dataclass(frozen=True)
class KvBudget:
    """The figures the KV cache is sized from, in bytes.

    ``resident`` counts weights and libraries of this rank, ``activations`` the peak of one step. ``utilization`` is the
    fraction of the usable memory that all ranks of this machine together may take.
    """

    memory: HostMemory
    utilization: float
    ranks: int
    resident: int
    activations: int

    @property
    def share(self) -> int:
        """What this rank may use in all."""
        return int(self.memory.total * self.utilization) // self.ranks

    @property
    def room(self) -> int:
        """What this rank could still allocate now."""
        return self.memory.available // self.ranks - self.activations

    @property
    def kv_cache(self) -> int:
        """Bytes for the KV cache; not positive when nothing is left."""
        return min(self.share - self.resident - self.activations, self.room)

    def __str__(self) -> str:
        return (
            f"Memory of this rank: usable {_gib(self.memory.total)} ({self.memory.limit}) x {self.utilization:g} /"
            f" {self.ranks} rank(s) = {_gib(self.share)}; weights and libraries {_gib(self.resident)}, activations"
            f" {_gib(self.activations)}, available now {_gib(self.memory.available)}; KV cache {_gib(self.kv_cache)}"
        )

    def check(self, asked: int | None) -> int:
        """The KV cache's bytes: `asked` if given. Raises ValueError with the figures and the flag to change."""
        if asked is not None:
            return self._check_asked(asked)
        if self.kv_cache <= 0:
            raise ValueError(
                f"No memory is left for the KV cache. {self}. Raise --gpu-memory-utilization, lower"
                " --max-num-batched-tokens, or free memory on this machine."
            )
        return self.kv_cache

    def _check_asked(self, asked: int) -> int:
        if asked > self.room:
            raise ValueError(
                f"--kv-cache-memory-bytes asks for {_gib(asked)}, but only {_gib(self.room)} can be allocated."
                f" {self}. Lower --kv-cache-memory-bytes."
            )
        return asked
