"""The op contract and its providers. Importing this package defines every ``torch.ops.kunlun`` op."""

from vllm_kunlun.ops import activation as _activation  # noqa: F401
from vllm_kunlun.ops import attention as _attention  # noqa: F401
from vllm_kunlun.ops import embedding as _embedding  # noqa: F401
from vllm_kunlun.ops import kv_cache as _kv_cache  # noqa: F401
from vllm_kunlun.ops import linear as _linear  # noqa: F401
from vllm_kunlun.ops import norm as _norm  # noqa: F401
from vllm_kunlun.ops import rotary as _rotary  # noqa: F401
from vllm_kunlun.ops import sampling as _sampling  # noqa: F401
from vllm_kunlun.ops.contract import Case, Op, ops
from vllm_kunlun.ops.providers.selection import OpRow, WrongProvider, activate


def table() -> list[OpRow]:
    """Who serves each op in this process and why; activates the providers if that has not happened yet."""
    return list(activate())


__all__ = ["Case", "Op", "OpRow", "WrongProvider", "activate", "ops", "table"]
