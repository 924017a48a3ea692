"""The P800 provider on an installed emulator, and the contract's cases as the target lays their caches out."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from vllm_kunlun import emulator
from vllm_kunlun.ops.providers import p800
from vllm_kunlun.targets.p800.probe import probe


def implementations():
    """The provider's function for each op, for the emulator that is installed now."""
    return p800.implementations(probe(emulator.current().settings.generation), torch.device("cpu"))


def with_host_copies(arguments):
    """Marks the arguments that a caller has in host memory."""
    for name, value in arguments.items():
        if name.endswith("_cpu") and value is not None:
            emulator.host(value)
    return arguments


def in_target_layout(case):
    """The case with its cache as [2, num_blocks, Hk, block_size, D], or as it is where it has none."""
    if "key_cache" not in case.args:
        return case
    stacked = torch.stack([case.args["key_cache"], case.args["value_cache"]])
    return replace(case, args={**case.args, "key_cache": stacked[0], "value_cache": stacked[1]})


@contextmanager
def single_threaded():
    """torch computes on one thread until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
