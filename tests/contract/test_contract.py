"""Every case of every op, for each provider, against the float32 reference."""

from __future__ import annotations

import pytest
import torch

from tests.contract.checking import check, poisoned
from vllm_kunlun import ops
from vllm_kunlun.ops.native import library
from vllm_kunlun.ops.providers import torch_provider

SEED = 20261130
OPS_AND_DTYPES = [
    pytest.param(op, dtype, id=f"{op.name}-{dtype}".replace("torch.", ""))
    for op in ops.ops().values()
    for dtype in op.dtypes
]


def cases(op: ops.Op, dtype: torch.dtype) -> list[ops.Case]:
    found = list(op.cases(torch.Generator().manual_seed(SEED), dtype))
    assert found, f"{op.name} has no cases for {dtype}"
    return found


@pytest.mark.parametrize(("op", "dtype"), OPS_AND_DTYPES)
def test_torch_provider_matches_reference(op: ops.Op, dtype: torch.dtype) -> None:
    for case in cases(op, dtype):
        check(op, case, torch_provider.implementation(op.name))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "amx"])
@pytest.mark.parametrize(("op", "dtype"), OPS_AND_DTYPES)
def test_host_provider_matches_reference(op: ops.Op, dtype: torch.dtype, isa: str, host_isa: None) -> None:
    rows = {row.name: row for row in ops.table()}
    assert rows[op.name].provider == "host", rows[op.name].reason
    for case in cases(op, dtype):
        check(op, case, op.call)


@pytest.fixture
def host_isa(isa: str):
    functions = library.load()
    functions.set_isa_limit(isa)
    if functions.instruction_set() != isa:
        functions.set_isa_limit("amx")
        pytest.skip(f"this CPU has no {isa}")
    yield
    functions.set_isa_limit("amx")


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in ops.ops().values()])
def test_schema_declares_every_write(op: ops.Op) -> None:
    ops.table()
    for case in cases(op, op.dtypes[0])[:4]:
        torch.library.opcheck(
            op.call, tuple(poisoned(op, case).values()), test_utils=("test_schema", "test_faketensor")
        )
