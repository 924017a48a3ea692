"""The emulated part of torch.cuda: identity, memory, streams, events, graphs."""

import os
import subprocess
import sys

import pytest
import torch

from vllm_kunlun import emulator
from vllm_kunlun.emulator import VendorRefusal
from vllm_kunlun.emulator.device import EmulatedDevice
from vllm_kunlun.emulator.graph import CaptureError


@pytest.fixture
def device():
    with emulator.running() as session:
        yield session.device


def test_identity_is_what_the_vendors_torch_reports(device):
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_name() == "GPU"
    assert torch.cuda.get_device_capability() == (8, 6)
    properties = torch.cuda.get_device_properties(0)
    assert (properties.multi_processor_count, properties.total_memory) == (12, 4 * 2**30)


def test_everything_is_put_back():
    before = {name: getattr(torch.cuda, name) for name in ("is_available", "Stream", "CUDAGraph", "mem_get_info")}
    linear = torch.nn.functional.linear
    with emulator.running() as session:
        assert set(before) <= set(session.device.functions())
        assert torch.nn.functional.linear is not linear
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.nn.functional.linear is linear
    with pytest.raises(ImportError):
        import kunlun_ops  # noqa: F401
    assert not hasattr(torch.ops.xspeedgate_ops, "weak_ref_tensor")
    assert not hasattr(torch.ops.xspeedgate_ops, "ranks_kernel")


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 8),
        ({"XPU_VISIBLE_DEVICES": "2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "5", "XPU_VISIBLE_DEVICES": "5"}, 1),
    ],
)
def test_visible_cards_are_counted(environ, count):
    assert EmulatedDevice(emulator.Settings(), 2**30, environ).device_count() == count


def test_visible_cards_that_disagree_are_an_error():
    device = EmulatedDevice(emulator.Settings(), 2**30, {"CUDA_VISIBLE_DEVICES": "0", "XPU_VISIBLE_DEVICES": "1"})
    with pytest.raises(RuntimeError, match="set both equal"):
        device.device_count()


def test_current_card_and_cards_that_are_not_there(device, monkeypatch):
    monkeypatch.setenv("XPU_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    torch.cuda.set_device(torch.device("cuda:1"))
    with torch.cuda.device(2):
        assert torch.cuda.current_device() == 2
    assert torch.cuda.current_device() == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal 3"):
        torch.cuda.set_device(3)


GROWTH = """
import torch
from vllm_kunlun import emulator

with emulator.running():
    free, total = torch.cuda.mem_get_info()
    assert total == 2**30
    torch.cuda.reset_peak_memory_stats()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert torch.cuda.mem_get_info()[0] <= free - 48 * 2**20
    assert torch.cuda.memory_allocated() >= 48 * 2**20
    del block
    assert torch.cuda.max_memory_allocated() >= 48 * 2**20
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] >= 0
print("held")
"""


def test_memory_grows_and_stays_within_the_card():
    """In a process of its own: in this one, what other tests left could be freed in between."""
    environ = {**os.environ, "VLLM_KUNLUN_EMULATOR_MEMORY_GIB": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=60, check=False, env=environ
    )
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr


def test_streams_and_events_keep_torchs_rules(device):
    stream = torch.cuda.Stream()
    default = torch.cuda.current_stream()
    assert default is torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        stream.wait_stream(default)
    assert torch.cuda.current_stream() is default
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="not recorded"):
        start.elapsed_time(end)
    start.record()
    end.record(stream)
    assert start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="enable_timing"):
        start.elapsed_time(stream.record_event())


def test_waiting_for_the_device_is_a_synchronisation(device):
    with emulator.launches() as record:
        torch.cuda.synchronize()
        torch.cuda.Stream().synchronize()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    assert record.syncs == ["torch.cuda.synchronize", "Stream.synchronize", "Event.synchronize"]
    assert record.launches == []


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        result = function()
    return graph, result


def test_replay_reads_the_same_memory_again(device):
    import kunlun_ops

    x, weight, out = torch.randn(3, 8), torch.randn(8), torch.empty(3, 8)

    def step():
        kunlun_ops.rmsnorm(x, weight, out)
        doubled = out * 2
        doubled.add_(1)
        return torch.nn.functional.linear(doubled.view(3, 2, 4), weight[:4].reshape(1, 4))

    graph, result = captured(step)
    for _ in range(3):
        x.copy_(torch.randn(3, 8))
        graph.replay()
        with torch.inference_mode():
            replayed = result.clone()
            assert torch.equal(step(), replayed)


def test_results_of_a_capture_come_with_the_first_replay(device):
    x = torch.ones(4)
    graph, result = captured(lambda: x + 1)
    assert result.isnan().all()
    graph.replay()
    assert result.tolist() == [2, 2, 2, 2]


def test_custom_operators_are_captured_through(device):
    import kunlun_ops

    library = torch.library.Library("kunlun_graph_test", "DEF")
    library.define("normed(Tensor(a!) out, Tensor x, Tensor weight) -> ()")
    library.impl("normed", lambda out, x, weight: kunlun_ops.rmsnorm(x.contiguous() * 1, weight, out), "CPU")
    x, weight, out = torch.randn(2, 4), torch.ones(4), torch.empty(2, 4)
    with emulator.launches() as record:
        torch.ops.kunlun_graph_test.normed(out, x, weight)
    assert record.names == ["aten::mul", "kunlun_ops.rmsnorm"]
    graph, _ = captured(lambda: torch.ops.kunlun_graph_test.normed(out, x, weight))
    x.copy_(torch.randn(2, 4))
    graph.replay()
    replayed = out.clone()
    torch.ops.kunlun_graph_test.normed(out, x, weight)
    assert torch.equal(replayed, out)
    assert len(graph) == 2
    library._destroy()


def test_results_of_vendor_operators_are_replayed_in_place(device):
    ids = torch.tensor([3, 9])
    graph, (local, outside) = captured(
        lambda: torch.ops.xspeedgate_ops.get_masked_input_and_mask(ids, 8, 12, 0, 12, 12)
    )
    ids.copy_(torch.tensor([11, 2]))
    graph.replay()
    assert (local.tolist(), outside.tolist()) == ([3, 0], [False, True])


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
    ],
)
def test_waiting_for_the_device_cannot_be_captured(device, step):
    x = torch.ones(3)
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        captured(lambda: step(x))
    assert not torch.cuda.is_current_stream_capturing()
    graph, result = captured(lambda: x * 3)
    graph.replay()
    assert result.tolist() == [3, 3, 3]


def test_graphs_out_of_order_are_errors(device):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="not captured"):
        graph.replay()
    with (
        pytest.raises(CaptureError, match="under way"),
        torch.cuda.graph(graph),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        pass
    other, _ = captured(lambda: torch.ones(2) + 1)
    with pytest.raises(CaptureError, match="while another was captured"):
        captured(other.replay)


def decode_call(lengths, device_lengths):
    import kunlun_ops

    cache, query, out = torch.randn(2, 4, 1, 4, 32), torch.randn(1, 2, 1, 32), torch.empty(2, 1, 32)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    return out, lambda: kunlun_ops.speculative_attention(
        out=out, q=query, k_cache=cache[0], v_cache=cache[1], context_lens_cpu=lengths, context_lens_xpu=device_lengths,
        batch_num=2, qlen=1, max_context_len=8, head_num=1, head_dim=32, kv_head_num=1, block_size=4,
        max_num_blocks_per_seq=2, block_tables=table,
    )  # fmt: skip


def test_host_lengths_stay_as_they_were_captured(device):
    host, on_device = torch.tensor([8, 8], dtype=torch.int32), torch.tensor([8, 8], dtype=torch.int32)
    out, step = decode_call(host, on_device)
    graph, _ = captured(step)
    # Within what the capture promised the device's lengths count, whatever the host has by now.
    host.fill_(1)
    on_device.copy_(torch.tensor([3, 5], dtype=torch.int32))
    graph.replay()
    replayed = out.clone()
    host.copy_(on_device)
    step()
    assert torch.equal(replayed, out)


def test_lengths_past_those_of_the_capture_are_refused(device):
    host, on_device = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    _, step = decode_call(host, on_device)
    graph, _ = captured(step)
    host.fill_(8)
    on_device.fill_(8)
    with pytest.raises(VendorRefusal, match=r"exceeds context_lens_cpu \[3, 5\], kept from the graph's capture"):
        graph.replay()


def test_replay_is_one_launch(device):
    import kunlun_ops

    x, out = torch.randn(2, 8), torch.empty(2, 8)
    graph, _ = captured(lambda: kunlun_ops.rmsnorm(x, torch.ones(8), out))
    with emulator.launches() as record:
        graph.replay()
    assert [(launch.name, launch.kind) for launch in record.launches] == [("graph replay", "graph")]


def test_a_replayed_collective_is_over_when_the_replay_is(device, tmp_path):
    """torch.distributed waits in Python, which no graph sees."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x, y = torch.ones(1 << 20), torch.zeros(1 << 20)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.mul_(2)
            torch.distributed.all_reduce(x)
            y.copy_(x)
        x.fill_(3)
        graph.replay()
    finally:
        torch.distributed.destroy_process_group()
    assert len(graph) == 3
    assert torch.equal(y, torch.full_like(y, 6))
