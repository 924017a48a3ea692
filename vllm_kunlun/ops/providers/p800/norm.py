"""RMS norms: kunlun_ops.rmsnorm and kunlun_ops.add_rmsnorm.

Both multiply by the weight. Weights that are stored minus one (Gemma) are shifted in float32, which the kernels take;
the vendor's own callables for them may not write in place, which costs a copy of the whole residual.
"""

from __future__ import annotations

from torch import Tensor

from vllm_kunlun.ops.providers.p800.dense import dense, settle
from vllm_kunlun.ops.providers.p800.vendor import Implementation, Vendor


def shifted(weight: Tensor, offset: float) -> Tensor:
    """weight + offset in float32, or the weight itself without an offset."""
    return weight.float() + offset if offset else weight


def rms_norm(vendor: Vendor) -> Implementation:
    """The op `rms_norm`."""
    rmsnorm = vendor.function("kunlun_ops.rmsnorm")

    def run(out: Tensor, input: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> None:
        written = dense(out)
        rmsnorm(input.contiguous(), shifted(weight, weight_offset), written, epsilon)
        settle(out, written)

    return run


def fused_add_rms_norm(vendor: Vendor) -> Implementation:
    """The op `fused_add_rms_norm`; the kernel may write over both of its inputs."""
    add_rmsnorm = vendor.function("kunlun_ops.add_rmsnorm")

    def run(out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> None:
        written, total = dense(out), residual.contiguous()
        add_rmsnorm(
            input.contiguous(), total, weight=shifted(weight, weight_offset), eps=epsilon, output=written,
            residual_output=total,
        )  # fmt: skip
        settle(residual, total)
        settle(out, written)

    return run
