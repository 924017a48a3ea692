"""The P800 provider as a whole: what a layer launches, what its code may not say, what it asks for at start."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.emulated import formulas
from tests.emulated.formulas import close
from tests.emulated.provider import implementations, with_host_copies
from vllm_kunlun import emulator, ops
from vllm_kunlun.ops.providers import p800
from vllm_kunlun.ops.providers.p800.vendor import Vendor
from vllm_kunlun.targets.p800 import questions
from vllm_kunlun.targets.p800.contract import Generation
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.targets.p800.probe import Found, MissingVendorOps, UnknownStack, generation_here, probe

CONTRACT = load()
ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "vllm_kunlun/ops/providers/p800").glob("*.py"))


def empty(*shape):
    return torch.empty(shape, dtype=torch.float16)


class DenseLayer:
    """A Qwen3-shaped layer over the contract's ops: 4 heads of 32, 2 KV heads, blocks of 16, 3 requests decoding."""

    tokens, hidden, heads, kv_heads, width, inner = 3, 64, 4, 2, 32, 96

    def __init__(self):
        generator = torch.Generator().manual_seed(0)

        def weight(*shape):
            return torch.randn(*shape, generator=generator).half() / 8

        q, kv = self.heads * self.width, self.kv_heads * self.width
        self.weights = {
            "qkv": weight(q + 2 * kv, self.hidden), "o": weight(self.hidden, q),
            "gate_up": weight(2 * self.inner, self.hidden), "down": weight(self.hidden, self.inner),
        }  # fmt: skip
        self.norms = 1 + weight(2, self.hidden)
        self.head_norms = 1 + weight(2, self.width)
        self.rope = formulas.cos_sin_cache(formulas.frequencies(self.width), 64, torch.float16)
        self.cache = weight(2, 8, self.kv_heads, 16, self.width)
        self.table = torch.arange(6, dtype=torch.int32).reshape(3, 2)
        self.positions = torch.tensor([4, 16, 0])
        self.slots = torch.tensor([4, 48, 64])
        self.starts, self.lengths = torch.arange(4, dtype=torch.int32), (self.positions + 1).int()
        self.copies = {"starts_cpu": self.starts.clone(), "lengths_cpu": self.lengths.clone()}

    def decode(self, call, x, residual):
        """One layer's decode; `call` gives an op by name. Returns the layer's output; the residual is written."""
        t, d = self.tokens, self.width
        query, key, value = (empty(t, n * d) for n in (self.heads, self.kv_heads, self.kv_heads))
        call("fused_add_rms_norm")(x, x, residual, self.norms[0], 1e-6, 0.0)
        qkv = self.product(call, "qkv", x)
        call("split_norm_rope")(
            query, key, value, qkv, self.positions, self.rope, *self.head_norms, self.heads, self.kv_heads, d, 1e-6,
            0.0, True,
        )  # fmt: skip
        call("reshape_and_cache")(*self.cache, key.view(t, -1, d), value.view(t, -1, d), self.slots)
        attended = empty(t, self.heads, d)
        call("paged_attention")(
            attended, query.view(t, -1, d), *self.cache, self.table, self.starts, self.lengths, d**-0.5, True, -1, 0.0,
            None, None, self.copies["starts_cpu"], self.copies["lengths_cpu"],
        )  # fmt: skip
        x = self.product(call, "o", attended.view(t, -1))
        call("fused_add_rms_norm")(x, x, residual, self.norms[1], 1e-6, 0.0)
        activated = empty(t, self.inner)
        call("silu_and_mul")(activated, self.product(call, "gate_up", x))
        return self.product(call, "down", activated)

    def product(self, call, name, x):
        out = empty(x.size(0), self.weights[name].size(0))
        call("linear")(out, x, self.weights[name], None)
        return out


@pytest.mark.parametrize("generation", ["torch25", "torch29"])
def test_decode_of_a_dense_layer_takes_ten_launches_and_no_synchronisation(generation):
    layer, x, residual = DenseLayer(), torch.randn(3, 64).half(), torch.randn(3, 64).half()
    expected = DenseLayer().decode(lambda name: ops.ops()[name].reference, x.clone(), residual.clone())
    with emulator.running(generation):
        served = implementations()
        with_host_copies(layer.copies)
        with torch.inference_mode(), emulator.launches() as record:
            out = layer.decode(served.__getitem__, x, residual)
    assert close(out, expected, torch.bfloat16)  # ten roundings to float16
    assert len(record.launches) <= 10 and record.torch == [] and record.syncs == [], (record.names, record.syncs)
    assert record.vendor == [
        "kunlun_ops.add_rmsnorm", "kunlun_ops.matmul", "kunlun_ops.split_norm_rope_neox",
        "kunlun_ops.reshape_and_cache", "kunlun_ops.speculative_attention", "kunlun_ops.matmul",
        "kunlun_ops.add_rmsnorm", "kunlun_ops.matmul", "kunlun_ops.swiglu", "kunlun_ops.matmul",
    ]  # fmt: skip


def test_a_decode_step_of_the_layer_can_be_captured_and_replayed():
    layer, x, residual = DenseLayer(), torch.randn(3, 64).half(), torch.randn(3, 64).half()
    with emulator.running():
        served = implementations()
        with_host_copies(layer.copies)
        inputs = (x.clone(), residual.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            out = layer.decode(served.__getitem__, *inputs)
        inputs[0].copy_(x)
        inputs[1].copy_(residual)
        graph.replay()
        expected = DenseLayer().decode(lambda name: ops.ops()[name].reference, x, residual)
    assert close(out, expected, torch.bfloat16)


def forbidden_names(source):
    """Names in a source that reach an operator which the device rules forbid, and indexing by a comparison."""
    names = {name for rule in CONTRACT.device_rules.values() for name in rule.spelled}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names and not host_copy(node.value):
            found.append(node.attr)
        if isinstance(node, ast.Name) and node.id.startswith(("triton", "tl")) and node.id in ("triton", "tl"):
            found.append(node.id)
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in modules if name.split(".")[0] == "triton"]
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Compare):
            found.append("index with a boolean mask")
        if isinstance(node, ast.Call) and spelled(node.func) == "where" and len(node.args) + len(node.keywords) == 1:
            found.append("where with a mask alone")
    return found


def spelled(function):
    return getattr(function, "attr", getattr(function, "id", None))


def host_copy(value):
    """Whether a name says that it is a copy in host memory, whose numbers the host may read."""
    return isinstance(value, ast.Name) and value.id == "copy"


@pytest.mark.parametrize("path", SOURCES, ids=[path.name for path in SOURCES])
def test_no_code_of_the_provider_goes_through_the_host(path):
    assert forbidden_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("q.exponential_()", "exponential_"),
        ("torch.searchsorted(a, b)", "searchsorted"),
        ("x[x > 0] = 1", "index with a boolean mask"),
        ("lengths.tolist()", "tolist"),
        ("n = x.max().item()", "item"),
        ("y = x.cpu()", "cpu"),
        ("import triton.language as tl", "triton.language"),
        ("from triton import jit", "triton"),
        ("i = torch.where(mask)", "where with a mask alone"),
        ("x.nonzero()", "nonzero"),
        ("x.double()", "double"),
        ("x.to(torch.float64)", "float64"),
    ],
)
def test_the_scan_sees_what_it_must(line, name):
    assert name in forbidden_names(line)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda x: x.cpu(), "Tensor.cpu"),
        (lambda x: x.sum().item(), "Tensor.item"),
        (lambda x: x[x > 0], "index with a boolean mask"),
        (lambda x: torch.searchsorted(x, x), "aten::searchsorted"),
        (lambda x: torch.bucketize(x, x), "aten::bucketize"),
        (lambda x: x.masked_scatter_(x > 0, x), "aten::masked_scatter_"),
        (lambda x: torch.where(x > 0), "aten::nonzero"),
        (lambda x: torch.cuda.synchronize(), "torch.cuda.synchronize"),
    ],
)
def test_the_guard_raises_at_a_round_trip(step, name):
    with emulator.running(), emulator.guard(), pytest.raises(emulator.HostRoundTrip, match=re.escape(name)):
        step(torch.tensor([0.5, 1.0, 2.0]))


def test_host_memory_may_be_read_and_what_is_made_of_it_too():
    lengths = emulator.host(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    device = torch.tensor([1, 2])
    with emulator.running(), emulator.launches() as record:
        assert lengths[1].tolist() == [3, 4] and lengths.cumsum(0).numpy()[1].tolist() == [4, 6]
        assert int(lengths.max()) == 4
        device + lengths[0]
    assert record.syncs == [] and record.names == ["aten::add"]
    with emulator.running(), emulator.launches() as record:
        (device + lengths[0]).tolist()
    assert record.syncs == ["Tensor.tolist"]


def test_all_missing_vendor_ops_are_told_at_once_with_their_wheel():
    missing = ["kunlun_ops.matmul", "kunlun_ops.swiglu", "kunlun_ops.prefill_attention"]
    optional = ["get_masked_input_and_mask", "quick_gelu"]
    with emulator.running("torch25", missing=[*missing, *optional]), pytest.raises(MissingVendorOps) as caught:
        implementations()
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 vendor ops that this configuration needs are not installed:"
    assert sorted(lines[1:]) == sorted(f"  {name}: install kunlun_ops 0.1.5x" for name in missing)


def test_ops_with_an_alternative_say_what_serves_them():
    with emulator.running(missing=["quick_gelu", "get_masked_input_and_mask"]):
        stack = probe(Generation.TORCH29)
        served = implementations()
        reasons = {name: service.reason(stack) for name, service in p800.SERVICES.items()}
        out, x = torch.empty(3, 8), torch.randn(3, 8)
        served["gelu"](out, x, "quick")
    assert close(out, x / (1 + torch.exp(-1.702 * x)))
    absent = "torch's operators on the device; without {}, which is not installed"
    assert reasons["gelu"] == absent.format("kunlun_ops.quick_gelu")
    assert reasons["vocab_parallel_mask"] == absent.format("xspeedgate_ops.get_masked_input_and_mask")
    assert reasons["linear"] == "kunlun_ops.matmul"


def run_python(*arguments, environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=120
    )


def activated(**environ):
    """What a process of the emulated target binds, and the norm of a row through the dispatcher."""
    code = (
        "import json, torch; from vllm_kunlun import emulator, ops; emulator.install();"
        "rows = [[r.name, r.provider, r.instruction_set] for r in ops.activate()];"
        "x = torch.tensor([[3.0, 4.0]]); out = torch.empty_like(x); w = torch.ones(2)\n"
        "with emulator.launches() as record: torch.ops.kunlun.rms_norm(out, x, w, 0.0, 0.0)\n"
        "print(json.dumps([rows, out.tolist(), record.names]))"
    )
    environment = {**os.environ, "VLLM_KUNLUN_TARGET": "emulated", **environ}
    done = run_python("-c", code, environment=environment)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("generation", ["torch25", "torch29"])
def test_the_emulated_target_binds_every_op_to_the_provider(generation):
    rows, out, launched = activated(VLLM_KUNLUN_EMULATOR_GENERATION=generation)
    assert [row[0] for row in rows] == sorted(ops.ops())
    assert {tuple(row[1:]) for row in rows} == {("p800", generation)}
    assert out[0] == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5])
    assert launched == ["kunlun_ops.rmsnorm"]


def test_another_provider_on_the_emulated_target():
    rows, _, _ = activated(VLLM_KUNLUN_OPS_PROVIDER="torch")
    assert {row[1] for row in rows} == {"torch"}
    assert "WrongProvider: VLLM_KUNLUN_OPS_PROVIDER=host" in activated(VLLM_KUNLUN_OPS_PROVIDER="host")


def test_a_bad_setting_binds_no_other_target_s_ops():
    told = activated(VLLM_KUNLUN_NUM_THREADS="many")
    assert "EnvironmentVariableError: VLLM_KUNLUN_NUM_THREADS=many: not an integer" in told


def test_the_command_shows_providers_and_missing_ops():
    def run(**environ):
        environment = {**os.environ, "VLLM_KUNLUN_TARGET": "emulated", **environ}
        return run_python("-m", "vllm_kunlun.cli.main", "ops", environment=environment)

    shown = run(COLUMNS="160")
    assert re.search(r"^rms_norm +p800 +torch29 +kunlun_ops.rmsnorm", shown.stdout, re.MULTILINE), shown.stderr
    failed = run(VLLM_KUNLUN_EMULATOR_MISSING="kunlun_ops.rmsnorm,matmul")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "2 vendor ops" in failed.stderr and "kunlun_ops.rmsnorm: install kunlun_ops" in failed.stderr


def test_an_unknown_torch_is_no_stack():
    with pytest.raises(UnknownStack, match=r"torch .* is installed; the vendor's libraries are for torch 2.5, 2.9"):
        generation_here(emulated=False)


def answers(generation="torch29", **faults):
    with emulator.running(generation, faults=[name.replace("_", "-") for name in faults]):
        return questions.ask(probe(Generation(generation)), torch.device("cpu"))


PLAIN = questions.Answers(True, True, True, True, torch.int64)


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ({}, {}),
        (
            {"sliding_window_off_by_one": True},
            {"prefill_window_counts_own": False, "decode_window_counts_own": False},
        ),
        (
            {"prefix_path_ignores_window_and_sinks": True},
            {"paged_prefill_heeds_window": False, "paged_prefill_heeds_sinks": False},
        ),
        ({"max_window_size_absent": True}, {"decode_window_counts_own": None}),
        ({"slot_mapping_int32_only": True}, {"slot_dtype": torch.int32}),
    ],
)
def test_kernels_are_asked_at_start(fault, change):
    assert answers(**fault) == replace(PLAIN, **change)


def test_a_kernel_that_fits_no_reading_is_an_error(monkeypatch):
    with emulator.running():
        stack = probe(Generation.TORCH29)
        silent = Found(lambda **arguments: None, None)
        broken = replace(stack, found={**stack.found, questions.PREFILL: silent})
        with pytest.raises(questions.UnexpectedAnswer, match="a window of 2 over 5 keys shows 0"):
            questions.ask(broken, torch.device("cpu"))


def test_an_argument_is_passed_by_the_name_that_the_installed_callable_has():
    seen = {}

    def moe_sigmoid_group_topk_norm(x, topk_index, norm_score, block_statistic, **rest):
        seen.update(block=block_statistic)

    name = "kunlun_ops.moe_sigmoid_group_topk_norm"
    found = Found(moe_sigmoid_group_topk_norm, ("x", "topk_index", "norm_score", "block_statistic"))
    with emulator.running("torch25"):
        stack = replace(probe(Generation.TORCH25), found={name: found})
    argument = next(a for a in CONTRACT.op(name).arguments if "block" in a.name)
    function = Vendor(stack, PLAIN).function(name)
    function(x=1, topk_index=2, norm_score=3, **{argument.name: 4})
    assert argument.name != "block_statistic" and seen == {"block": 4}
