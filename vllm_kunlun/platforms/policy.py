"""Config rules and refusals that all targets share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm_kunlun.targets.profile import Profile

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

# vLLM's config modules import the current platform, so they are imported inside the rules, not here.

logger = logging.getLogger("vllm.kunlun")

Rule = Callable[["VllmConfig"], None]


def no_fusion_passes(config: VllmConfig) -> None:
    """vLLM's fusion passes import classes that exist for its own devices only."""
    passes = config.compilation_config.pass_config
    for name, value in vars(passes).items():
        if value is True and name.startswith(("fuse_", "enable_")):
            setattr(passes, name, False)


def no_triton(config: VllmConfig) -> None:
    """No Triton kernel may be chosen, whatever is installed."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        raise ValueError(
            "vLLM found an active Triton driver, but no target of vllm-kunlun runs Triton kernels. Uninstall triton"
            " from this environment, or hide the device it found."
        )


def eager_torch(config: VllmConfig) -> None:
    """Dynamo costs seconds at start and brings nothing where every op is a kernel of the target."""
    from vllm.config import CompilationMode

    asked = config.compilation_config.mode
    if asked not in (None, CompilationMode.NONE) and not config.model_config.enforce_eager:
        logger.info("Compilation mode %s was resolved to NONE: kernels are called directly", asked.name)
    config.compilation_config.mode = CompilationMode.NONE


def use_worker(config: VllmConfig, worker: str) -> None:
    """The target's worker, unless the user names one."""
    if config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = worker


def use_block_size(config: VllmConfig, size: int) -> None:
    """KV cache blocks of `size` tokens unless the user asks for another."""
    if not config.cache_config.user_specified_block_size:
        config.cache_config.block_size = size


def check_dtype(dtype: torch.dtype, profile: Profile) -> None:
    """Raises ValueError unless kernels take `dtype`."""
    if dtype not in profile.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in profile.dtypes)
        wrong = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"dtype {wrong} was asked for; the {profile.target} target computes in {names}. Set --dtype to one of them."
        )


def refuse_quantization(quant: str, profile: Profile) -> None:
    """Raises ValueError: no quantized layer has a kernel yet."""
    raise ValueError(
        f"{quant} quantization was asked for (by --quantization or the checkpoint's quantization_config); the"
        f" {profile.target} target serves unquantized checkpoints only. Use the bfloat16 or float16 checkpoint of this"
        " model."
    )


def attention_backend(
    selected: Any, selector: AttentionSelectorConfig, backend: type[AttentionBackend], profile: Profile
) -> str:
    """Class path of `backend` for these layers. Raises ValueError naming every feature that it lacks."""
    if selected is not None and selected.name != backend.get_name():
        logger.info("Attention backend %s was resolved to %s", selected.name, backend.get_name())
    reasons = backend.validate_configuration(device_capability=None, **selector._asdict())
    if reasons:
        fields = selector._asdict()
        asked = ", ".join(f"{name} {fields[name]}" for name in ("head_size", "dtype", "kv_cache_dtype", "block_size"))
        raise ValueError(
            f"This model's attention cannot run on the {profile.target} target: {'; '.join(reasons)} (asked: {asked})"
        )
    return f"{backend.__module__}.{backend.__qualname__}"


def apply(rules: Iterable[Rule], config: VllmConfig) -> None:
    """All rules, in order. Raises ValueError from the first that cannot be met."""
    for rule in rules:
        rule(config)
