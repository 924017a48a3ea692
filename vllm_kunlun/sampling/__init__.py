"""vLLM's sampler with the filters, the greedy and the random choice served by the op contract."""

from vllm_kunlun.sampling.min_p import use_min_p_op
from vllm_kunlun.sampling.sampler import KunlunSampler, build_sampler
from vllm_kunlun.sampling.topk_topp import KunlunTopKTopPSampler

__all__ = ["KunlunSampler", "KunlunTopKTopPSampler", "build_sampler", "use_min_p_op"]
