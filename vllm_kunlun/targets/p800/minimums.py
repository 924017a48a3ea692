"""Releases of the vendor's software that belong together, as data.

Driver and firmware: the least that a public serving stack for this card asks for (FastDeploy's installation page).
Wheels: the releases that public callers and runs name for each generation; the vendor publishes no such table.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_kunlun.platforms.version import VersionRange
from vllm_kunlun.targets.p800.contract import Generation

DRIVER = VersionRange("driver", "5.0.21.26", "6")
FIRMWARE = VersionRange("firmware", "1.48", "2")

TORCH = VersionRange("torch", "2.9.0", "2.9.1")
"""The torch that xpytorch is built for, of the only generation that this release's vLLM runs on."""

PYTHON = VersionRange("python", "3.10", "3.11")
"""The vendor's wheels are built for one release of Python."""

WHEELS: Mapping[Generation, tuple[VersionRange, ...]] = {
    Generation.TORCH25: (
        VersionRange("kunlun-ops", "0.1.50", "0.1.59"),
        VersionRange("xspeedgate-ops", "1.0", "1.2"),
        VersionRange("cocopod", "1.0", "2"),
    ),
    Generation.TORCH29: (
        VersionRange("kunlun-ops", "0.1.59", "0.2"),
        VersionRange("xspeedgate-ops", "1.5", "2"),
        VersionRange("cocopod", "1.1", "2"),
    ),
}
