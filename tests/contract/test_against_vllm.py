"""The ops compute what vLLM's own native code computes, in float32, from the arguments that vLLM would pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import activation
from vllm.model_executor.layers import rotary_embedding as rope
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only, apply_top_k_top_p_pytorch

from tests.contract.checking import relative_l2
from vllm_kunlun import ops

LIMIT = 2e-6


@pytest.fixture(scope="module", autouse=True)
def vllm_config() -> Iterator[VllmConfig]:
    ops.activate()
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20261130)


def call(name: str, out: torch.Tensor, *args: object) -> torch.Tensor:
    getattr(torch.ops.kunlun, name)(out.fill_(torch.nan), *args)
    return out


GATED: list[tuple[str, type, tuple, Callable]] = [
    ("silu_and_mul", activation.SiluAndMul, (), lambda layer: ()),
    ("gelu_and_mul", activation.GeluAndMul, ("none",), lambda layer: (False,)),
    ("gelu_and_mul", activation.GeluAndMul, ("tanh",), lambda layer: (True,)),
    ("swiglu_oai", activation.SwigluOAIAndMul, (), lambda layer: (layer.alpha, layer.limit)),
    ("swiglu_oai", activation.SwigluOAIAndMul, (1.5, 2.0), lambda layer: (layer.alpha, layer.limit)),
]


@pytest.mark.parametrize(("name", "layer", "init", "rest"), GATED)
def test_gated_activations(name: str, layer: type, init: tuple, rest: Callable, generator: torch.Generator) -> None:
    native = layer(*init)
    x = 4 * torch.randn(3, 5, 2 * 173, generator=generator)
    actual = call(name, torch.empty(3, 5, 173), x, *rest(native))
    assert relative_l2(actual, native.forward_native(x)) < LIMIT


GELUS = {"none": "GELU", "tanh": "GELUTanh", "new": "NewGELU", "fast": "FastGELU", "quick": "QuickGELU"}


@pytest.mark.parametrize("kind", GELUS)
def test_gelu_kinds(kind: str, generator: torch.Generator) -> None:
    x = 4 * torch.randn(11, 173, generator=generator)
    # NewGELU asks for a compiled op when it is made; its formula needs no state.
    formula = getattr(activation, GELUS[kind]).forward_native
    assert relative_l2(call("gelu", torch.empty_like(x), x, kind), formula(None, x)) < LIMIT


def test_unknown_gelu_kind_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no kind 'linear'.*none, tanh, new, fast or quick"):
        torch.ops.kunlun.gelu(torch.empty(2), torch.empty(2), "linear")


def make_rope(kind: str, head_size: int, rotary_dim: int, is_neox: bool) -> rope.RotaryEmbedding:
    shape = (head_size, rotary_dim, 256, 10000, is_neox)
    if kind == "plain":
        return rope.RotaryEmbedding(*shape, torch.float32)
    if kind == "linear":
        return rope.LinearScalingRotaryEmbedding(*shape, 4.0, torch.float32)
    if kind == "llama3":
        return rope.Llama3RotaryEmbedding(*shape, torch.float32, 8.0, 1.0, 4.0, 64)
    if kind == "yarn":
        layer = rope.YaRNScalingRotaryEmbedding(*shape, 4.0, torch.float32, attn_factor=1.25)
        assert layer.mscale != pytest.approx(1.0)
        return layer
    return rope.NTKScalingRotaryEmbedding(*shape, 2.0, torch.float32)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 64), (80, 80), (96, 24), (256, 256)])
@pytest.mark.parametrize("kind", ["plain", "linear", "llama3", "yarn", "ntk"])
def test_rotary_variants(kind: str, head_size: int, rotary_dim: int, is_neox: bool, generator: torch.Generator) -> None:
    layer = make_rope(kind, head_size, rotary_dim, is_neox)
    positions = torch.randint(layer.cos_sin_cache.size(0), (29,), generator=generator)
    qkv = torch.randn(29, 8 * head_size, generator=generator)
    query, key, _ = qkv.split([4 * head_size, 2 * head_size, 2 * head_size], dim=-1)
    expected = layer.forward_native(positions, query.clone(), key.clone())
    torch.ops.kunlun.rotary_embedding(positions, query, key, head_size, layer.cos_sin_cache, is_neox)
    for actual, wanted in zip((query, key), expected, strict=True):
        assert relative_l2(actual, wanted) < LIMIT


def test_rotary_without_key(generator: torch.Generator) -> None:
    layer = make_rope("plain", 64, 64, True)
    positions, query = torch.arange(7), torch.randn(7, 128, generator=generator)
    expected, no_key = layer.forward_native(positions, query.clone(), None)
    torch.ops.kunlun.rotary_embedding(positions, query, None, 64, layer.cos_sin_cache, True)
    assert no_key is None
    assert relative_l2(query, expected) < LIMIT


@pytest.mark.parametrize("position", [-1, 256])
def test_position_outside_the_cache_is_refused(position: int) -> None:
    layer = make_rope("plain", 64, 64, True)
    positions = torch.tensor([0, position])
    with pytest.raises(RuntimeError, match=rf"positions\[1\] = {position} is outside.*256 positions"):
        torch.ops.kunlun.rotary_embedding(positions, torch.zeros(2, 64), None, 64, layer.cos_sin_cache, True)


def k_values(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    k = torch.randint(1, vocab + 1, (rows,), generator=generator, dtype=torch.int32)
    k[0], k[1], k[2] = 1, vocab, min(vocab, 40)
    return k


def p_values(rows: int, generator: torch.Generator) -> torch.Tensor:
    p = torch.rand(rows, generator=generator)
    p[0], p[1] = 1e-8, 1.0
    return p


def kept(logits: torch.Tensor) -> torch.Tensor:
    return logits > -torch.inf


def borderline(logits: torch.Tensor, p: torch.Tensor | None) -> torch.Tensor:
    """Elements that a relative error of 1e-6 in a sum of probabilities can move across the edge of the nucleus."""
    if p is None:
        return torch.zeros_like(logits, dtype=torch.bool)
    values, order = logits.double().sort(dim=-1, stable=True)
    sums = values.softmax(-1).cumsum(-1)
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, (sums - (1 - p.unsqueeze(1))).abs() < 1e-6)


@pytest.mark.parametrize("with_p", [False, True], ids=["", "p"])
@pytest.mark.parametrize("with_k", [False, True], ids=["", "k"])
@pytest.mark.parametrize("vocab", [3, 100, 5000, 49152])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_top_k_top_p(vocab: int, scale: float, with_k: bool, with_p: bool, generator: torch.Generator) -> None:
    logits = scale * torch.randn(9, vocab, generator=generator)
    k = k_values(9, vocab, generator) if with_k else None
    p = p_values(9, generator) if with_p else None
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p)
    after_k = apply_top_k_only(logits.clone(), k.clone()) if k is not None else logits
    torch.ops.kunlun.top_k_top_p(actual := logits.clone(), k, p)
    # vLLM drops what has probability 0 in float32 at p = 1 too; here p = 1 is off.
    invisible = (after_k.softmax(-1) == 0) | borderline(after_k, p)
    assert torch.equal(kept(actual) | invisible, kept(expected) | invisible)
    assert torch.equal(actual[kept(actual)], logits[kept(actual)])
    assert kept(actual).any(-1).all()


def test_top_k_keeps_all_that_equal_the_last(generator: torch.Generator) -> None:
    logits = torch.randint(6, (8, 1000), generator=generator).float()
    for k in (1, 5, 200, 999):
        ks = torch.full((8,), k)
        torch.ops.kunlun.top_k_top_p(actual := logits.clone(), ks, None)
        assert torch.equal(actual, apply_top_k_only(logits.clone(), ks.clone()))


def test_top_p_keeps_as_many_equal_ones_as_vllm_and_those_of_the_highest_index() -> None:
    logits = torch.zeros(1, 1024)
    for p in (1 / 1024, 0.25, 0.5, 1023 / 1024):
        ps = torch.tensor([p])
        torch.ops.kunlun.top_k_top_p(actual := logits.clone(), None, ps)
        expected = apply_top_k_top_p_pytorch(logits.clone(), None, ps)
        number = int(kept(expected).sum())
        assert number == round(1024 * p)
        assert kept(actual)[0].tolist() == [False] * (1024 - number) + [True] * number


def test_top_p_just_below_one_loses_no_visible_probability(generator: torch.Generator) -> None:
    logits = 3 * torch.randn(8, 40000, generator=generator)
    p = torch.full((8,), 1 - 2**-24)
    torch.ops.kunlun.top_k_top_p(actual := logits.clone(), None, p)
    lost = logits.double().softmax(-1).masked_fill(kept(actual), 0).sum(-1)
    assert lost.max() < 1e-6


def test_min_p(vllm_config: VllmConfig, generator: torch.Generator) -> None:
    native = MinPLogitsProcessor(vllm_config, torch.device("cpu"), False)
    min_p = torch.rand(16, generator=generator)
    min_p[3], min_p[4] = 0.0, 1.0
    native.min_p_count, native.min_p = 15, min_p.unsqueeze(1)
    logits = 3 * torch.randn(16, 5000, generator=generator)
    torch.ops.kunlun.min_p(actual := logits.clone(), min_p)
    assert torch.equal(actual, native.apply(logits.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_takes_the_first_nan_as_torch_does(dtype: torch.dtype, generator: torch.Generator) -> None:
    logits = torch.randn(4, 5000, generator=generator).to(dtype)
    logits[1, 4990], logits[2, 17], logits[2, 3000], logits[3, 5] = (torch.nan, -torch.nan, torch.nan, torch.inf)
    ids = torch.full((4,), -1)
    torch.ops.kunlun.argmax(ids, logits)
    assert ids.tolist() == logits.argmax(-1).tolist()
    assert ids[1:].tolist() == [4990, 17, 5]
