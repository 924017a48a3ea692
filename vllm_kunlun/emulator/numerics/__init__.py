"""Float32 arithmetic of the emulated callables, one module per family of the contract table."""

from vllm_kunlun.emulator.numerics import activation as _activation  # noqa: F401
from vllm_kunlun.emulator.numerics import attention as _attention  # noqa: F401
from vllm_kunlun.emulator.numerics import gemm as _gemm  # noqa: F401
from vllm_kunlun.emulator.numerics import kv_cache as _kv_cache  # noqa: F401
from vllm_kunlun.emulator.numerics import moe as _moe  # noqa: F401
from vllm_kunlun.emulator.numerics import norm as _norm  # noqa: F401
from vllm_kunlun.emulator.numerics import rotary as _rotary  # noqa: F401
from vllm_kunlun.emulator.numerics import runtime as _runtime  # noqa: F401
from vllm_kunlun.emulator.numerics import sampling as _sampling  # noqa: F401
