"""What vLLM asks of a device and all targets answer alike; `host`, `p800` and `emulated` add the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_kunlun.platforms import policy
from vllm_kunlun.targets.profile import Profile

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig


class KunlunPlatform(Platform):
    """Out-of-tree platform. Values come from the target's profile, decisions from its rules.

    Each target is a subclass in a module of its own that sets ``profile``, ``default_rules`` (which must stand before
    vLLM derives other settings from them) and ``rules``.
    """

    profile: ClassVar[Profile]
    default_rules: ClassVar[Sequence[policy.Rule]]
    rules: ClassVar[Sequence[policy.Rule]]

    _enum = PlatformEnum.OOT
    device_control_env_var = "XPU_VISIBLE_DEVICES"
    # Inductor would need Triton or a C++ compiler at run time.
    simple_compile_backend = "eager"

    def __init_subclass__(cls) -> None:
        """Gives vLLM the profile's words for the device."""
        super().__init_subclass__()
        cls.device_name = cls.device_type = cls.profile.torch_device
        cls.dispatch_key = cls.profile.dispatch_key
        cls.dist_backend = cls.profile.dist_backend

    @classmethod
    def prepare_process(cls) -> None:
        """What every process of a server needs, called once vLLM's own modules are there."""

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Model dtypes, preferred first."""
        return list(self.profile.dtypes)

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's own compiled kernels are not there; the worker binds the op contract."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """No provider for vLLM's IR ops: layers are replaced instead."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Defaults that must stand before vLLM derives others from them."""
        policy.apply(cls.default_rules, vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Applies the target's rules in order; a rule that cannot be met raises ValueError."""
        policy.apply(cls.rules, vllm_config)

    @classmethod
    def attention_backend(cls) -> type[Any]:
        """The target's attention backend."""
        raise NotImplementedError(f"{cls.__name__} has no attention backend")

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """Class path of the attention backend. Raises ValueError naming what the target does not support."""
        return policy.attention_backend(selected_backend, attn_selector_config, cls.attention_backend(), cls.profile)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Name shown to users."""
        return cls.profile.name

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> None:
        """None: a number would be taken for an NVIDIA generation, and its kernels with it."""

    @classmethod
    def inference_mode(cls) -> Any:
        """Steps run under `torch.inference_mode`: no autograd bookkeeping."""
        return torch.inference_mode(mode=True)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype that no kernel takes."""
        policy.check_dtype(dtype, cls.profile)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raises ValueError: weights are served in the dtypes of the profile only."""
        policy.refuse_quantization(quant, cls.profile)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is called directly: nothing traces the model."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Sliding-window and full-attention layers may have KV cache groups of their own."""
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Yes: whole steps are captured."""
        return True

    def is_sleep_mode_available(self) -> bool:
        """No allocator that could give memory back and keep its addresses."""
        return False

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Several attention layers with one index are fine."""
