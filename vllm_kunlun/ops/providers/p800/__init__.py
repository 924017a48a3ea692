"""The ``p800`` provider: the op contract served by the vendor's callables, called as the vendor contract wants them."""

from vllm_kunlun.ops.providers.p800.table import SERVICES, bind, implementations
from vllm_kunlun.ops.providers.p800.vendor import Refused

__all__ = ["SERVICES", "Refused", "bind", "implementations"]
