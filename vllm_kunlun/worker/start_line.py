"""The line of the log that says what runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import torch
from vllm.platforms import current_platform

from vllm_kunlun.ops import OpRow


def start_line(rows: Sequence[OpRow]) -> str:
    """Target, device, who serves how many ops, and the versions underneath."""
    served = Counter(
        row.provider if row.provider == "torch" else f"{row.provider} ({row.instruction_set})" for row in rows
    )
    providers = ", ".join(f"{count} ops by {provider}" for provider, count in served.most_common())
    target, device = current_platform.profile.target, current_platform.get_device_name()
    return f"Target {target} on {device}: {providers}; vLLM {version('vllm')}, torch {torch.__version__}"
