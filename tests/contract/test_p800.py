"""Every case of every op against the P800 provider on the emulator: right, or refused for a reason of the contract."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.contract.checking import check
from tests.emulated.provider import implementations, in_target_layout, single_threaded, with_host_copies
from vllm_kunlun import emulator, ops
from vllm_kunlun.ops.providers import p800

SEED = 20261130
OPS_AND_DTYPES = [
    pytest.param(op, dtype, id=f"{op.name}-{dtype}".replace("torch.", ""))
    for op in ops.ops().values()
    for dtype in op.dtypes
]
SOFTCAP = "no soft cap of the logits"
MORE_QUERIES = "more queries than keys"


def head_size(size: int) -> str:
    return rf"D = {size}, but D in \(32, 64, .*\) must hold \(head sizes the existing plugin accepts"


# What the vendor's kernels cannot do, by op and case, and the words of the refusal.
REFUSED = {
    "paged_attention": {
        "head size 72": head_size(72),
        "odd head size": head_size(33),
        "softcap": SOFTCAP,
        "everything": SOFTCAP,
        "more queries than keys": MORE_QUERIES,
        "more queries than keys, sinks": MORE_QUERIES,
    },
    "varlen_attention": {"softcap and alibi": SOFTCAP},
}


@pytest.fixture(params=["torch25", "torch29"])
def served(request: pytest.FixtureRequest) -> Iterator[dict[str, Callable[..., None]]]:
    """The provider's functions on each generation, with every default of the emulator."""
    with single_threaded(), emulator.running(request.param):
        yield implementations()


def cases(op: ops.Op, dtype: torch.dtype) -> list[ops.Case]:
    return list(op.cases(torch.Generator().manual_seed(SEED), dtype))


def on_device(function: Callable[..., None], op: ops.Op) -> Callable[..., None]:
    """`function`, in which nothing may go through the host; host copies are marked as such."""

    def run(*values: object) -> None:
        names = [argument.name for argument in op.call._schema.arguments]
        arguments = with_host_copies(dict(zip(names, values, strict=False)))
        with emulator.guard():
            function(*arguments.values())

    return run


def judge(op: ops.Op, case: ops.Case, function: Callable[..., None]) -> None:
    """Right where the vendor can do the case; else refused for the reason listed, and in no other way."""
    reason = REFUSED.get(op.name, {}).get(case.name)
    if reason is None:
        check(op, case, on_device(function, op))
    else:
        with pytest.raises(p800.Refused, match=f"^{op.name} on the P800: .*{reason}"):
            check(op, case, on_device(function, op))


@pytest.mark.parametrize(("op", "dtype"), OPS_AND_DTYPES)
def test_p800_provider_matches_reference(
    op: ops.Op, dtype: torch.dtype, served: dict[str, Callable[..., None]]
) -> None:
    for case in cases(op, dtype):
        judge(op, in_target_layout(case), served[op.name])


def test_every_op_has_an_implementation_and_every_refusal_a_case(served: dict[str, Callable[..., None]]) -> None:
    assert served.keys() == ops.ops().keys() == p800.SERVICES.keys()
    for name, refusals in REFUSED.items():
        op = ops.ops()[name]
        assert refusals.keys() <= {case.name for case in cases(op, op.dtypes[0])}


def test_cache_writes_in_other_layouts(served: dict[str, Callable[..., None]]) -> None:
    op = ops.ops()["reshape_and_cache"]
    outcomes = set()
    for case in cases(op, torch.float16):
        layout, heads = case.name.split()[-1], case.args["key_cache"].size(1)
        if case.args["key"].size(0) and layout == "halves" and heads > 1:
            with pytest.raises(p800.Refused, match="value-slots-several-kv-heads"):
                check(op, case, on_device(served[op.name], op))
        else:
            check(op, case, on_device(served[op.name], op))
        outcomes.add((layout, heads > 1))
    assert {("halves", True), ("tokens", True), ("stacked", False)} <= outcomes


def test_attention_refuses_caches_that_the_kernel_would_read_wrong(served: dict[str, Callable[..., None]]) -> None:
    op = ops.ops()["paged_attention"]
    layouts = [
        case
        for case in cases(op, torch.float16)
        if case.args["out"].numel() and not case.args["key_cache"].is_contiguous()
    ]
    assert len(layouts) > 20
    for case in layouts:
        if case.name not in REFUSED[op.name]:
            with pytest.raises(p800.Refused, match=r"caches must be contiguous.*paged-view-address"):
                check(op, case, on_device(served[op.name], op))


@pytest.mark.parametrize("name", ["paged_attention", "varlen_attention"])
def test_attention_without_host_copies_is_refused(name: str, served: dict[str, Callable[..., None]]) -> None:
    op = ops.ops()[name]
    case = in_target_layout(cases(op, torch.float16)[0])
    for missing in [argument for argument in case.args if argument.endswith("_cpu")]:
        arguments = {**case.args, missing: None}
        with pytest.raises(p800.Refused, match=re.escape(missing)):
            served[name](*arguments.values())
        with pytest.raises(p800.Refused, match=f"{missing} must be int32 in host memory"):
            served[name](*{**case.args, missing: case.args[missing].long()}.values())
