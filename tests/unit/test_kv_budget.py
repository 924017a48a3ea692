"""The KV cache's size follows from figures the user can see."""

from __future__ import annotations

import pytest

from vllm_kunlun.targets.host.memory import HostMemory
from vllm_kunlun.worker.kv_budget import KvBudget

GIB = 1 << 30


def budget(**changes: object) -> KvBudget:
    memory = HostMemory(total=20 * GIB, available=16 * GIB, limit="machine")
    figures: dict[str, object] = {
        "memory": memory,
        "utilization": 0.5,
        "ranks": 1,
        "resident": 2 * GIB,
        "activations": GIB,
        **changes,
    }
    return KvBudget(**figures)  # type: ignore[arg-type]


def test_utilization_is_a_fraction_of_usable_memory_less_everything_else() -> None:
    assert budget().kv_cache == 10 * GIB - 2 * GIB - GIB


def test_ranks_share_the_machine() -> None:
    assert budget(ranks=2).kv_cache == 5 * GIB - 2 * GIB - GIB


def test_never_more_than_can_be_allocated() -> None:
    assert budget(utilization=1.0).kv_cache == 16 * GIB - GIB


def test_asked_bytes_are_honoured_whatever_the_utilization() -> None:
    assert budget(utilization=0.01).check(3 * GIB) == 3 * GIB


def test_nothing_left_is_an_error_with_figures_and_flag() -> None:
    with pytest.raises(ValueError, match=r"No memory is left.*20\.00 GiB.*--gpu-memory-utilization"):
        budget(utilization=0.1).check(None)


def test_asking_for_too_much_is_an_error_with_figures_and_flag() -> None:
    with pytest.raises(ValueError, match=r"asks for 40\.00 GiB, but only 15\.00 GiB.*Lower --kv-cache-memory-bytes"):
        budget().check(40 * GIB)
