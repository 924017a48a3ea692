"""Which vendor callables serve each op of the contract on the P800, and the binding of all of them at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kunlun.ops import contract
from vllm_kunlun.ops.providers.p800 import activation, attention, embedding, kv_cache, linear, norm, rotary, sampling
from vllm_kunlun.ops.providers.p800.vendor import Implementation, Vendor
from vllm_kunlun.targets.p800.probe import VendorStack
from vllm_kunlun.targets.p800.questions import ask

logger = logging.getLogger("vllm.kunlun")

_PREFIX = "kunlun_ops."


@dataclass(frozen=True)
class Service:
    """How an op is served: `needs` it cannot do without; without `prefers`, torch's operators take over."""

    make: Callable[[Vendor], Implementation]
    needs: tuple[str, ...] = ()
    prefers: tuple[str, ...] = ()

    def reason(self, stack: VendorStack) -> str:
        """What serves the op on this stack, for the table of ops."""
        absent = [name for name in self.prefers if not stack.has(name)]
        used = [name for name in (*self.needs, *self.prefers) if name not in absent]
        parts = [", ".join(used) if used else "torch's operators on the device"]
        return "; ".join(parts + [f"without {name}, which is not installed" for name in absent])


def _vendor(make: Callable[[Vendor], Implementation], *names: str) -> Service:
    return Service(make, tuple(_PREFIX + name for name in names))


_ROPE = ("split_norm_rope_neox", "rmsnorm", "rotary_embedding")
SERVICES: Mapping[str, Service] = {
    "argmax": Service(sampling.argmax),
    "embedding": Service(embedding.embedding),
    "fused_add_rms_norm": _vendor(norm.fused_add_rms_norm, "add_rmsnorm"),
    "gelu": Service(activation.gelu, prefers=("kunlun_ops.quick_gelu",)),
    "gelu_and_mul": Service(activation.gelu_and_mul),
    "linear": _vendor(linear.product, "matmul"),
    "logits": _vendor(linear.product, "matmul"),
    "min_p": Service(sampling.min_p),
    "paged_attention": _vendor(attention.paged_attention, "speculative_attention", "prefill_attention"),
    "reshape_and_cache": _vendor(kv_cache.reshape_and_cache, "reshape_and_cache", "reshape_and_cache_flash"),
    "rms_norm": _vendor(norm.rms_norm, "rmsnorm"),
    "rotary_embedding": _vendor(rotary.rotary_embedding, "rotary_embedding"),
    "sample": Service(sampling.sample),
    "silu_and_mul": _vendor(activation.silu_and_mul, "swiglu"),
    "slot_mapping": Service(kv_cache.slot_mapping),
    "split_norm_rope": _vendor(rotary.split_norm_rope, *_ROPE),
    "swiglu_oai": Service(activation.swiglu_oai),
    "temperature": Service(sampling.temperature),
    "top_k_top_p": Service(sampling.top_k_top_p),
    "varlen_attention": _vendor(attention.varlen_attention, "prefill_attention"),
    "vocab_parallel_mask": Service(embedding.vocab_parallel_mask, prefers=(embedding.MASK,)),
    "zero_blocks": Service(kv_cache.zero_blocks),
}


def implementations(stack: VendorStack, device: torch.device) -> dict[str, Implementation]:
    """A function for every op of the contract, made from the installed callables.

    Raises MissingVendorOps with all callables that are needed and not installed, each with the wheel that has it, and
    UnexpectedAnswer where a kernel behaves in no known way.
    """
    stack.require(name for service in SERVICES.values() for name in service.needs)
    vendor = Vendor(stack, ask(stack, device))
    return {name: _nothing_for_empty(SERVICES[name].make(vendor)) for name in contract.ops()}


def _nothing_for_empty(function: Implementation) -> Implementation:
    """`function`, but not called where its first argument is empty: kernels cannot be launched over nothing."""

    def run(first: torch.Tensor, *rest: Any) -> None:
        if first.numel():
            function(first, *rest)

    return run


def bind(stack: VendorStack, device: torch.device, dispatch_key: str) -> dict[str, str]:
    """Makes this provider serve every op of the contract for `dispatch_key`; returns what serves each, in words.

    The kernels are asked on `device`, which must be the process's own by then. Raises as `implementations` does.
    """
    for name, function in implementations(stack, device).items():
        contract.register(name, function, dispatch_key)
        if any(not stack.has(preferred) for preferred in SERVICES[name].prefers):
            logger.warning("The op %s is served by %s", name, SERVICES[name].reason(stack))
    return {name: SERVICES[name].reason(stack) for name in sorted(contract.ops())}
