"""The demo model and its reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.demo import demo_checkpoint, demo_reference
from tests.support.reference import TextReference


@pytest.fixture(scope="package")
def checkpoint() -> Path:
    return demo_checkpoint()


@pytest.fixture(scope="package")
def reference() -> TextReference:
    return demo_reference()
