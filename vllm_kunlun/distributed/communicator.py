"""Collectives of the P800: BKCL under torch.distributed's backend name `nccl`, gloo where it is emulated."""

from __future__ import annotations

from vllm.distributed.device_communicators.xpu_communicator import XpuCommunicator


class P800Communicator(XpuCommunicator):
    """vLLM's communicator that knows torch.distributed alone, without custom kernels or symmetric memory.

    vLLM lets ranks capture graphs with this class or its CUDA one, which needs NVIDIA's library.
    """
