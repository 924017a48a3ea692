"""vllm-kunlun: a vLLM platform plugin for the Kunlun3 P800, with a host target for plain x86 CPUs.

vLLM finds the functions below by their entry points and calls them in every process, more than once. Importing this
package imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
import multiprocessing

from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.probe import TargetChoice, current_choice
from vllm_kunlun.platforms.refusal import QUALIFIED_NAME as REFUSAL
from vllm_kunlun.platforms.start_error import shorten_start_errors
from vllm_kunlun.platforms.version import __version__
from vllm_kunlun.targets.p800 import environment

__all__ = ["__version__", "register", "register_model", "register_reasoning_parser", "register_tool_parser"]

PLATFORMS = {
    "host": "vllm_kunlun.platforms.host.HostPlatform",
    "p800": "vllm_kunlun.platforms.p800.P800Platform",
    "emulated": "vllm_kunlun.platforms.emulated.EmulatedPlatform",
}
"""The platform class of each target."""

logger = logging.getLogger("vllm.kunlun")
_announced: set[TargetChoice] = set()


def register() -> str | None:
    """Entry point `vllm.platform_plugins`: return the qualified name of the platform class, None when inactive.

    A target that cannot be used gives the name of a class whose constructor raises the error, because vLLM ignores
    exceptions of this function.
    """
    shorten_start_errors()
    choice = current_choice()
    _announce(choice)
    if choice.error is not None:
        return REFUSAL
    if choice.target is None:
        return None
    if choice.target != "host":
        environment.prepare(emulated=choice.target == "emulated")
    return PLATFORMS[choice.target]


def _announce(choice: TargetChoice) -> None:
    """Log the choice once: by the process that starts the others, not by the engine or the workers."""
    if choice in _announced or choice.error is not None or multiprocessing.parent_process() is not None:
        return
    _announced.add(choice)
    envs.warn_unknown()
    what = f"target {choice.target}" if choice.active else "inactive"
    logger.info("vllm-kunlun %s: %s, because %s.", __version__, what, choice.reason)


def _is_platform_ours() -> bool:
    """Tell whether vLLM runs on this plugin's platform; VLLM_PLUGINS may load one entry point without the other."""
    from vllm.platforms import current_platform

    cls = type(current_platform)
    return f"{cls.__module__}.{cls.__qualname__}" in PLATFORMS.values()


def register_model() -> None:
    """Entry point `vllm.general_plugins`: register this plugin's layers, where its platform is active.

    vLLM learns the names of this plugin's variables even where the plugin is inactive, since one of them may say so.
    An engine or a worker ends with its parent from here on.
    """
    from vllm_kunlun.upstream import patches
    from vllm_kunlun.upstream.ledger import apply

    apply(patches.KNOWN_VARIABLES)
    if _is_platform_ours():
        from vllm_kunlun import layers
        from vllm_kunlun.worker.lifetime import end_with_parent

        end_with_parent()
        _prepare_process()
        patches.apply_start_patches()
        layers.register()


def _prepare_process() -> None:
    from vllm.platforms import current_platform

    current_platform.prepare_process()


def register_reasoning_parser() -> None:
    """Entry point `vllm.general_plugins`: register this plugin's reasoning parsers, where its platform is active."""
    if _is_platform_ours():
        from vllm_kunlun import parsers

        parsers.register_reasoning_parsers()


def register_tool_parser() -> None:
    """Entry point `vllm.general_plugins`: register this plugin's tool parsers, where its platform is active."""
    if _is_platform_ours():
        from vllm_kunlun import parsers

        parsers.register_tool_parsers()
