"""Whole engines with known faults of the vendor's kernels switched on, and with callables missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.emulated_engine.test_tokens import MODES, QWEN3, assert_tokens
from tests.support.emulated import EmulatedEngines, Job
from tests.support.reference import Reference

Batches = Sequence[Sequence[Sequence[int]]]
WINDOW = "mistral-sliding-window"
# Fault, structure, flags.
FAULTS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "float32 in large blocks": ("decode-float32-block-64", QWEN3, {"block_size": 64, **MODES["graphs"]}),
    "values in wrong slots": ("value-slots-several-kv-heads", QWEN3, MODES["graphs"]),
    "int32 slots only": ("slot-mapping-int32-only", QWEN3, MODES["graphs"]),
    "the window is one key too wide": ("sliding-window-off-by-one", WINDOW, MODES["graphs"]),
    "the paged prefill sees no window": ("prefix-path-ignores-window-and-sinks", WINDOW, MODES["eager"]),
    "decode has no window": ("max-window-size-absent", WINDOW, MODES["eager"]),
    "no weak references": ("weak-ref-tensor-absent", QWEN3, MODES["graphs"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tokens_are_right_with_the_fault_on(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches, name: str
) -> None:
    fault, structure, flags = FAULTS[name]
    reference = tiny(structure)
    job = Job(reference.checkpoint, batches[1:], flags=flags, num_tokens=4, settings={"FAULTS": fault})
    assert_tokens(reference, batches[1:], engines.run(job))


def test_more_requests_than_one_decode_call_may_have(
    engines: EmulatedEngines, tiny: Callable[[str], Reference]
) -> None:
    """In the warm-up, captured in a graph, and in service; every prompt is there many times over.

    Prompts of one token make the first step look like a decode, so that all three steps are replays.
    """
    reference = tiny(QWEN3)
    requests = 1100
    prompts = [[3 + number % 20] for number in range(requests)]
    flags = {
        "max_num_seqs": requests,
        "max_num_batched_tokens": requests,
        "max_model_len": 16,
        "kv_cache_memory_bytes": 64 << 20,
        "compilation_config": {"cudagraph_capture_sizes": [requests]},
    }
    job = Job(reference.checkpoint, [prompts], flags=flags, num_tokens=3, settings={"FAULTS": "decode-batch-limit"})
    outcome = engines.run(job)
    (tokens,) = outcome.tokens
    assert outcome.replays == 3
    assert_tokens(reference, [prompts[:20]], replace(outcome, tokens=[tokens[:20]]))
    assert tokens == (tokens[:20] * 55)


def test_missing_callables_are_listed_at_once_before_weights_load(
    engines: EmulatedEngines, tiny: Callable[[str], Reference]
) -> None:
    missing = {"MISSING": "kunlun_ops.swiglu,kunlun_ops.prefill_attention,kunlun_ops.rmsnorm"}
    outcome = engines.attempt(Job(tiny(QWEN3).checkpoint, [], flags=MODES["eager"], settings=missing))
    assert outcome.error is not None
    assert outcome.error.startswith("StartError")
    assert "3 vendor ops that this configuration needs are not installed" in outcome.error
    for name in missing["MISSING"].split(","):
        assert f"{name}: install kunlun_ops" in outcome.error
    assert "Starting to load model" not in outcome.log


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"enable_lora": True}, "LoRA was asked for"),
        ({"enable_sleep_mode": True}, "[Ss]leep mode is not supported"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_what_the_target_lacks_is_refused(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], flags: dict[str, Any], reason: str
) -> None:
    outcome = engines.attempt(Job(tiny(QWEN3).checkpoint, [], flags=flags))
    with pytest.raises(ValueError, match=reason):
        raise ValueError(outcome.error)
    assert "Starting to load model" not in outcome.log
