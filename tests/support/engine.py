"""vLLM's offline engine in this process, one after another."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_KUNLUN_TARGET": os.environ.get("VLLM_KUNLUN_TARGET", "host"),
}
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 256 << 20,
    "disable_log_stats": True,
}


@contextmanager
def engine(checkpoint: Path, **changes: Any) -> Iterator[LLM]:
    """An engine with few batched tokens, prefix caching and chunked prefill; torn down with all it held."""
    cores = os.sched_getaffinity(0)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        llm = LLM(str(checkpoint), **{**DEFAULTS, **changes})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
            os.sched_setaffinity(0, cores)


def greedy(num_tokens: int, **changes: Any) -> SamplingParams:
    """Greedy decoding that runs past any end token."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **changes})


def generate(llm: LLM, prompts: Sequence[Sequence[int]], parameters: Any) -> list[list[int]]:
    """The tokens of each prompt's first output; all prompts are given at once."""
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
