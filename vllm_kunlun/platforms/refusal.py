"""Stands in for the platform when the choice of a target is an error.

vLLM ignores an exception of a platform plugin's entry point and would go on with another platform. It does not ignore
one of the platform's constructor, so the entry point names this class and the constructor raises.
"""

from __future__ import annotations

from vllm_kunlun.platforms.probe import current_choice
from vllm_kunlun.platforms.start_error import StartError

QUALIFIED_NAME = "vllm_kunlun.platforms.refusal.RefusedPlatform"


class RefusedPlatform:
    """Raises StartError, saying what is wrong with the target, when vLLM creates it."""

    def __init__(self) -> None:
        error = current_choice().error
        raise StartError(f"vllm-kunlun: {error or 'the target could not be used a moment ago; start again'}")
