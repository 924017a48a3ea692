"""What holds for products and embeddings beyond the contract's cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_kunlun import ops
from vllm_kunlun.ops.native import library

FEATURES, ROWS = 576, 100


@pytest.fixture(params=["generic", "avx2", "avx512", "amx"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.activate()
    functions = library.load()
    functions.set_isa_limit(request.param)
    if functions.instruction_set() != request.param:
        functions.set_isa_limit("amx")
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    functions.set_isa_limit("amx")


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    torch.ops.kunlun.linear(out, x, weight, None)
    return out


def batch_independent_up_to(isa: str, dtype: torch.dtype) -> int:
    """Tokens up to which a sum's order is the same: from there on weights are transposed, see kernels/linear.cpp."""
    if isa == "generic" or (dtype == torch.bfloat16 and isa != "avx2"):
        return 300
    return 47 if dtype == torch.float16 and isa in ("avx512", "amx") else 95


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tokens_result_does_not_depend_on_its_batch(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(20261130)
    weight = torch.randn(ROWS, FEATURES, generator=generator).to(dtype)
    x = torch.randn(batch_independent_up_to(isa, dtype), FEATURES, generator=generator).to(dtype)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(x.shape[0])])
    for tokens in (2, 3, 5, 16, 17, 33, x.shape[0]):
        assert torch.equal(linear(x[:tokens], weight), alone[:tokens]), f"{tokens} tokens differ from one at a time"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_outside_the_embedding_table_is_named(isa: str, dtype: torch.dtype) -> None:
    weight, out = torch.randn(10, 8), torch.zeros(3, 8)
    for bad in (10, -1):
        with pytest.raises(RuntimeError, match=rf"embedding: ids\[1\] is {bad}, but the table has 10 rows"):
            torch.ops.kunlun.embedding(out, torch.tensor([0, bad, 2], dtype=dtype), weight)
    assert not out.any(), "rows were written although an id is wrong"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": torch.empty(2, 5)}, r"out \[2, 5\] does not fit input \[2, 8\] and weight \[4, 8\]"),
        ({"weight": torch.empty(4, 8, dtype=torch.bfloat16)}, "weight is BFloat16 and input Float"),
        ({"bias": torch.empty(3)}, r"bias must be contiguous and of shape \[4\], not \[3\]"),
        ({"input": torch.empty(8, 2).T}, "the last dimension of input must be contiguous"),
        ({"out": torch.empty(2, 4, dtype=torch.float16)}, "out is Half and input Float"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed: dict[str, torch.Tensor], message: str) -> None:
    ops.activate()
    args = {"out": torch.empty(2, 4), "input": torch.empty(2, 8), "weight": torch.empty(4, 8), "bias": torch.empty(4)}
    with pytest.raises(RuntimeError, match=f"linear: .*{message}"):
        torch.ops.kunlun.linear(*{**args, **changed}.values())
