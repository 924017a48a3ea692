"""The platform and the config rules of the targets p800 and emulated, on an emulated card."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# vLLM resolves its platform on import; the rules are then importable in any order.
from vllm.config import CompilationMode, CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_kunlun import emulator
from vllm_kunlun.attention.p800 import P800AttentionBackend
from vllm_kunlun.platforms import emulated_policy, p800_policy
from vllm_kunlun.platforms.emulated import EmulatedPlatform
from vllm_kunlun.platforms.p800 import P800Platform
from vllm_kunlun.targets.p800 import environment


@pytest.fixture
def card() -> Iterator[Any]:
    with emulator.running() as session:
        yield session.device


def config(**parts: Any) -> Any:
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()})


def selector(**changes: Any) -> AttentionSelectorConfig:
    plain = {"head_size": 128, "dtype": torch.float16, "kv_cache_dtype": "auto", "block_size": 128}
    return AttentionSelectorConfig(**{**plain, **changes})


def graphs(mode: CUDAGraphMode | None, **changes: Any) -> Any:
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None}
    return config(
        compilation_config={**compilation, "mode": CompilationMode.NONE},
        model_config={"enforce_eager": False, "runner_type": "generate", **changes},
        scheduler_config={"max_num_seqs": 6},
    )


def test_vllms_words_for_the_device() -> None:
    words = [(p.device_type, p.device_name, p.dispatch_key, p.dist_backend) for p in (P800Platform, EmulatedPlatform)]
    assert words == [("cuda", "cuda", "CUDA", "nccl"), ("cpu", "cpu", "CPU", "gloo")]
    assert P800Platform.device_of(3) == torch.device("cuda:3")
    assert EmulatedPlatform.device_of(3) == torch.device("cpu")


def test_figures_are_the_cards_and_not_the_machines(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    assert P800Platform.get_device_total_memory() == card.memory.total == 4 * 2**30
    assert P800Platform.num_compute_units() == 12
    assert P800Platform.device_count() == 8
    assert P800Platform.get_device_capability() is None
    assert P800Platform.get_device_name() == "Kunlun P800"


GROWTH = """
import torch
from vllm.platforms import current_platform

before = current_platform.get_current_memory_usage()
block = torch.ones(64 << 20, dtype=torch.uint8)
print(type(current_platform).__name__, int(current_platform.get_current_memory_usage() - before))
"""


def test_the_emulated_cards_use_is_what_its_process_has_grown_by() -> None:
    """In a process of its own: in this one, what other tests left could be freed in between."""
    environ = {**os.environ, "VLLM_KUNLUN_TARGET": "emulated"}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120, check=True, env=environ
    )
    name, grown = done.stdout.split()[-2:]
    assert name == "EmulatedPlatform"
    assert int(grown) >= 48 << 20


def test_host_buffers_of_the_emulated_card_are_the_hosts(card: Any) -> None:
    buffer = EmulatedPlatform.host_buffer(4, torch.int32)
    with emulator.guard():
        assert buffer.tolist() == [0, 0, 0, 0]
        with pytest.raises(emulator.HostRoundTrip):
            torch.zeros(4).tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"head_size": 72}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
    ],
)
def test_attention_that_is_missing_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"p800 target: {reason}"):
        P800Platform.get_attn_backend_cls(None, selector(**changes), 8)


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_attention_of_usual_heads_gets_our_backend(head_size: int) -> None:
    path = P800Platform.get_attn_backend_cls(None, selector(head_size=head_size), 8)
    assert path == "vllm_kunlun.attention.p800.P800AttentionBackend"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.float16, 128), (torch.bfloat16, 128)])
def test_blocks_are_small_where_decode_wants_them(dtype: torch.dtype, size: int) -> None:
    with set_current_vllm_config(SimpleNamespace(model_config=SimpleNamespace(dtype=dtype)), check_compile=False):
        assert P800AttentionBackend.get_preferred_block_size(16) == size


def test_keys_lie_before_values_and_both_are_contiguous() -> None:
    cache = torch.zeros(P800AttentionBackend.get_kv_cache_shape(5, 16, 2, 64))
    assert cache.shape == (2, 5, 2, 16, 64)
    assert cache[1].is_contiguous()


@pytest.mark.parametrize("asked", [None, CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_graphs_hold_decode_steps_and_another_wish_is_answered(
    asked: CUDAGraphMode | None, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    c = graphs(asked)
    with caplog.at_level(logging.INFO, "vllm.kunlun"):
        p800_policy.whole_decode_steps(c)
    assert c.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert ("was resolved to FULL_DECODE_ONLY: prefill" in caplog.text) is (asked is not None)


@pytest.mark.parametrize("changes", [{"enforce_eager": True}, {"runner_type": "pooling"}])
def test_eager_is_eager(changes: dict[str, Any]) -> None:
    c = graphs(CUDAGraphMode.FULL_DECODE_ONLY, **changes)
    p800_policy.eager_if_asked(c)
    assert c.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert c.compilation_config.cudagraph_capture_sizes == []


def test_the_emulator_captures_few_sizes_unless_asked() -> None:
    c = graphs(None)
    emulated_policy.few_graphs(c)
    assert c.compilation_config.cudagraph_capture_sizes == [1, 2, 4]
    c.compilation_config.cudagraph_capture_sizes = [3]
    emulated_policy.few_graphs(c)
    assert c.compilation_config.cudagraph_capture_sizes == [3]


def test_workers_are_spawned_whatever_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    p800_policy.spawned_workers(config())
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_speculation_is_refused() -> None:
    with pytest.raises(ValueError, match="Drop --speculative-config"):
        p800_policy.no_speculation(config(speculative_config={}))
