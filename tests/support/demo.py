"""The demo model, and the reference of it that all tests of one run share."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tests.support.reference import TextReference
from vllm_kunlun.tools.demo_model import ensure_demo_model


@functools.cache
def demo_checkpoint() -> Path:
    return ensure_demo_model()


@functools.cache
def demo_reference() -> TextReference:
    return TextReference(demo_checkpoint())


def stretched(checkpoint: Path, folder: Path, max_positions: int) -> Path:
    """The same checkpoint, said to have been trained on `max_positions`: for command lines that ask for long contexts.

    Positions that stay within the trained length compute the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": max_positions}))
    return folder
