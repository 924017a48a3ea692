"""Only `vllm_kunlun.upstream` changes vLLM, torch or the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.boundaries import patch_scan

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_kunlun"
MODULES = [path for path in PACKAGE.rglob("*.py") if "upstream" not in path.relative_to(PACKAGE).parts]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_patches_nothing(path: Path) -> None:
    assert patch_scan.violations(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.accelerator.synchronize = print",
        "import torch.nn.functional as F\nF.linear = print",
        "from vllm.v1.worker import block_table\nblock_table.kernel = print",
        "from vllm.config import VllmConfig\nVllmConfig.check: object = print",
        "import vllm\nsetattr(vllm.envs, 'A', 1)",
        "import vllm\ndel vllm.envs.A",
        "import builtins\nbuiltins.__import__ = print",
        "import sys\nsys.modules['triton'] = None",
        "from unittest import mock",
        "def f():\n    import vllm.envs as e\n    e.A += 1",
    ],
)
def test_scan_finds_a_patch(source: str) -> None:
    assert len(patch_scan.violations(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.backends.mkldnn.enabled = False",
        "class A:\n    def __init__(self, torch_module):\n        self.torch = torch_module",
        "import torch\nx = torch.zeros(2)\nx.grad = None",
        "from vllm.config import VllmConfig\nconfig = VllmConfig()\nconfig.block_size = 16",
    ],
)
def test_scan_leaves_ordinary_code_alone(source: str) -> None:
    assert patch_scan.violations(source) == []
