"""The vLLM platform of this plugin: what vLLM asks of a device, answered for the active target."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_kunlun.platforms import policy
from vllm_kunlun.targets.host import memory, threads
from vllm_kunlun.targets.host.profile import HOST

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

# On the host target GPUs of this machine are not ours to use. Hidden before vLLM looks for Triton drivers: with none
# active vLLM uses no Triton kernel, whether or not a triton package is installed.
for _variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
    os.environ[_variable] = "-1"


class KunlunPlatform(Platform):
    """Out-of-tree platform. Values come from the target's profile, decisions from `platforms.policy`."""

    _enum = PlatformEnum.OOT
    device_name = HOST.torch_device
    device_type = HOST.torch_device
    dispatch_key = HOST.dispatch_key
    dist_backend = HOST.dist_backend
    device_control_env_var = "XPU_VISIBLE_DEVICES"
    # Inductor would need Triton or a C++ compiler at run time.
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Model dtypes, preferred first."""
        return list(HOST.dtypes)

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's own compiled kernels are not there; the worker binds the op contract."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """No provider for vLLM's IR ops: layers are replaced instead."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Defaults that must stand before vLLM derives others from them."""
        policy.apply_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Applies the target's rules in order; a rule that cannot be met raises ValueError."""
        policy.apply_rules(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """Class path of the attention backend. Raises ValueError naming what the target does not support."""
        return policy.attention_backend(selected_backend, attn_selector_config)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Name shown to users."""
        return HOST.name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Usable bytes, control group limits respected."""
        return memory.read().total

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Resident bytes of this process."""
        return float(memory.resident())

    @classmethod
    def device_count(cls) -> int:
        """Ranks that fit: a worker needs a CPU of its own."""
        return len(threads.usable_cpus())

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """CPUs this process may use."""
        return len(threads.usable_cpus())

    @classmethod
    def inference_mode(cls) -> Any:
        """Steps run under `torch.inference_mode`: no autograd bookkeeping."""
        return torch.inference_mode(mode=True)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one CPU device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """torch's CPU generator is seeded by vLLM itself."""

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype that no kernel takes."""
        policy.check_dtype(dtype)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raises ValueError: weights are served in the dtypes of the profile only."""
        policy.refuse_quantization(quant)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """No: nothing is copied to a device."""
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is called directly: nothing traces the model on this target."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Sliding-window and full-attention layers may have KV cache groups of their own."""
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Yes: the host runner wraps the model itself."""
        return True

    def graph_pool_handle(self) -> Any:
        """Graphs of the host target have memory of their own."""
        return None

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA products, grouped by adapter."""
        return "vllm_kunlun.lora.host_punica.HostPunicaWrapper"

    def is_sleep_mode_available(self) -> bool:
        """No device memory to give back."""
        return False

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Several attention layers with one index are fine."""
