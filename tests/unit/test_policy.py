"""Each config rule alone, on the smallest config it reads."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# vLLM resolves its platform on import; the rules are then importable in any order.
from vllm.config import CacheConfig, CompilationMode
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_kunlun.platforms import host_policy, policy
from vllm_kunlun.platforms.host import HostPlatform


def config(**parts: dict[str, Any]) -> Any:
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()})


def selector(**changes: Any) -> AttentionSelectorConfig:
    plain = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    return AttentionSelectorConfig(**{**plain, **changes})


def test_compilation_is_resolved_to_none_and_said(caplog: pytest.LogCaptureFixture) -> None:
    c = config(compilation_config={"mode": CompilationMode.VLLM_COMPILE}, model_config={"enforce_eager": False})
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, "vllm.kunlun"):
        policy.eager_torch(c)
    assert c.compilation_config.mode is CompilationMode.NONE
    assert "VLLM_COMPILE was resolved to NONE" in caplog.text


def test_fusion_passes_are_off() -> None:
    passes = {"fuse_norm_quant": True, "enable_sp": True, "eliminate_noops": True, "fuse_gemm_comms": None}
    c = SimpleNamespace(compilation_config=SimpleNamespace(pass_config=SimpleNamespace(**passes)))
    policy.no_fusion_passes(c)
    found = vars(c.compilation_config.pass_config)
    assert found == {"fuse_norm_quant": False, "enable_sp": False, "eliminate_noops": True, "fuse_gemm_comms": None}


@pytest.mark.parametrize(("before", "after"), [("auto", host_policy.WORKER), ("my.Worker", "my.Worker")])
def test_worker_is_ours_unless_named(before: str, after: str) -> None:
    c = config(parallel_config={"worker_cls": before})
    host_policy.own_worker(c)
    assert c.parallel_config.worker_cls == after


@pytest.mark.parametrize(("specified", "size"), [(False, 32), (True, 128)])
def test_block_size_is_the_users_when_given(specified: bool, size: int) -> None:
    c = config(cache_config={"user_specified_block_size": specified, "block_size": 128})
    host_policy.block_size(c)
    assert c.cache_config.block_size == size


def test_more_ranks_than_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KUNLUN_CPU_BIND", "0,1")
    with pytest.raises(ValueError, match="--tensor-parallel-size"):
        host_policy.ranks_fit_cpus(config(parallel_config={"local_world_size": 64}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
def test_unsupported_dtype_names_the_supported_ones(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"bfloat16, float16, float32\. Set --dtype"):
        host_policy.supported_dtype(config(model_config={"dtype": dtype}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_supported_dtypes_pass(dtype: torch.dtype) -> None:
    host_policy.supported_dtype(config(model_config={"dtype": dtype}))


def test_active_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    with pytest.raises(ValueError, match="Uninstall triton"):
        policy.no_triton(config())


def test_plain_attention_gets_our_backend() -> None:
    assert HostPlatform.get_attn_backend_cls(None, selector(), 8) == "vllm_kunlun.attention.host.HostAttentionBackend"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"head_size": 1024}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
    ],
)
def test_attention_that_is_missing_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HostPlatform.get_attn_backend_cls(None, selector(**changes), 8)


@pytest.mark.parametrize(("given", "used"), [(CacheConfig.gpu_memory_utilization, 0.5), (0.9, 0.9), (0.1, 0.1)])
def test_default_memory_is_half_and_an_explicit_fraction_is_kept(given: float, used: float) -> None:
    c = config(cache_config={"gpu_memory_utilization": given})
    host_policy.share_the_machine(c)
    assert c.cache_config.gpu_memory_utilization == used


@pytest.mark.parametrize("quant", ["fp8", "awq", "compressed-tensors"])
def test_quantized_checkpoints_are_refused_by_name(quant: str) -> None:
    with pytest.raises(ValueError, match=f"{quant} quantization was asked for.*bfloat16"):
        HostPlatform.verify_quantization(quant)


@pytest.mark.parametrize(
    ("variables", "method"),
    [
        ({}, "fork"),
        ({"OMP_NUM_THREADS": "4"}, "spawn"),
        ({"VLLM_KUNLUN_OPS_PROVIDER": "torch"}, "spawn"),
        ({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "spawn"),
    ],
    ids=str,
)
def test_processes_are_forked_where_no_pool_of_threads_can_run(
    variables: dict[str, str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "OMP_NUM_THREADS", "VLLM_KUNLUN_OPS_PROVIDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    host_policy.forked_processes(config())
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == method
