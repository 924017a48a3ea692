"""The emulator with no faults, and random numbers that repeat."""

import pytest
import torch

from tests.emulated.provider import single_threaded
from vllm_kunlun import emulator


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of small operators: threads that wait for each other would take most of the time."""
    with single_threaded():
        yield


@pytest.fixture(autouse=True)
def no_emulator_is_left_behind():
    yield
    emulator.uninstall()


@pytest.fixture
def stack():
    """An installed emulator of the torch 2.9 stack without its device surface."""
    with emulator.running(device=False) as session:
        yield session


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261130)


@pytest.fixture
def randn(generator):
    """Normal numbers of a shape in a dtype."""

    def make(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    return make
