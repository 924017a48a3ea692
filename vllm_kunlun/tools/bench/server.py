"""A server under measurement: one process group that can be started, held still and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_kunlun.tools.bench.client import BenchError

POLL_S = 0.02
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    """Return a TCP port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server in a process group of its own, with its output in a log file."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path) -> None:
        self.name = name
        self.command = list(command)
        self.environment = dict(environment)
        self.base_url = f"http://127.0.0.1:{port}"
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start the server and return the time at which it was started (`time.perf_counter`)."""
        started = time.perf_counter()
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return started

    def wait_ready(self, timeout_s: float = 600) -> None:
        """Wait until /health answers 200.

        Raises:
            BenchError: the process ended, or was not ready after `timeout_s`.
        """
        deadline = time.perf_counter() + timeout_s
        while not self._healthy():
            self._check_alive()
            if time.perf_counter() > deadline:
                raise BenchError(f"{self.name} was not ready after {timeout_s:.0f} s; its log is {self.log}.")
            time.sleep(POLL_S)

    def hold(self) -> None:
        """Stop the group's processes where they are (SIGSTOP), so that they take nothing from the one measured."""
        self._signal(signal.SIGSTOP)

    def release(self) -> None:
        """Let the group's processes go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server: SIGTERM to its first process, SIGKILL to the whole group when that does not suffice."""
        if self._process is None:
            return
        self.release()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _check_alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise BenchError(f"{self.name} ended with code {code} before it was ready; its log is {self.log}.")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
