"""A real server in a process of its own, with its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60

ENTRIES: Mapping[str, Sequence[str]] = {
    "vllm-kunlun": (str(BIN / "vllm-kunlun"), "serve"),
    "vllm": (str(BIN / "vllm"), "serve"),
    "module": (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"),
}
"""The three ways to start the server; the model follows each."""


AS_AT_A_TERMINAL = ("env", "--default-signal=INT")
"""Runs a command that heeds SIGINT. What a shell starts in the background, these tests included, hands on that it does
not."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LiveServer:
    """`vllm-kunlun serve MODEL FLAGS` on a free loopback port; ready once made, or once its log holds `until`."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        log: Path,
        *,
        entry: str = "vllm-kunlun",
        env: Mapping[str, str] | None = None,
        name: str = "model",
        until: str | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = name
        self.log = log
        command = [*AS_AT_A_TERMINAL, *ENTRIES[entry], str(model), *flags, "--port", str(self.port)]
        if "--served-model-name" not in flags:
            command += ["--served-model-name", name]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "VLLM_KUNLUN_TARGET": "host", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(self.healthy if until is None else lambda: until in self.text())
        except BaseException:
            self.kill()
            raise

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"not ready after {START_TIMEOUT_S} s:\n{self.tail()}"
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = [line for line in lines if re.match(rf"{re.escape(name)}(\{{|\s)", line)]
        assert found, f"/metrics has no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop_cleanly(self, ending: signal.Signals = signal.SIGTERM, expected: int = 0) -> None:
        """End with a signal; no process may stay behind, and no traceback may enter the log from here on."""
        children, before = self.descendants(), len(self.text())
        self.process.send_signal(ending)
        code = self.process.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(children, timeout=10)
        log = self.text()[before:]
        assert code == expected, f"exit code {code}:\n{self.tail()}"
        assert not alive, f"processes left behind: {alive}"
        assert "Traceback (most recent call last)" not in log, log[log.index("Traceback") :][:4000]

    def kill(self) -> None:
        """End the whole process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
