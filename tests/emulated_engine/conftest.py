"""One process of emulated engines for the whole package, and tiny checkpoints with their references."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import pytest

from tests.support.checkpoints import SMALL, structure_checkpoint
from tests.support.emulated import EmulatedEngines
from tests.support.reference import Reference


@pytest.fixture(scope="package")
def engines() -> Iterator[EmulatedEngines]:
    made = EmulatedEngines()
    yield made
    made.close()


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The reference of a structure's checkpoint, by the structure's name."""
    folder = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda name: Reference(structure_checkpoint(name, folder)))


@pytest.fixture(scope="package")
def batches() -> list[list[list[int]]]:
    """One prompt, three, and twenty of all lengths, more than run at once and longer together than one step."""
    generator = random.Random(0)

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [[generator.randrange(3, SMALL["vocab_size"]) for _ in range(length)] for length in lengths]

    return [prompts([20]), prompts([1, 17, 40]), prompts([1, 2, 5, 15, 16, 17, 31, 32, 33, 100, *range(6, 16)])]
