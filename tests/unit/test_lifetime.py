"""A process that vLLM started ends when its parent is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import multiprocessing, time
from vllm_kunlun.worker.lifetime import end_with_parent

def child():
    end_with_parent()
    time.sleep(120)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


def wait_until_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


FORKING = """
import multiprocessing, os, signal, socket, sys, time
from vllm_kunlun.platforms.host_policy import forked_processes

def child(pipe, kept):
    kept.send(b"x")
    pipe.send((os.getpid(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL))
    time.sleep(120)

def start(name, *arguments):
    process = multiprocessing.get_context("fork").Process(target=child, name=name, args=arguments)
    process.start()
    return process

if __name__ == "__main__":
    forked_processes(None)
    forked_processes(None)
    told, teller = socket.socketpair()
    told.setblocking(False)
    teller.setblocking(False)
    signal.set_wakeup_fd(teller.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    listening = socket.create_server(("127.0.0.1", 0))
    kept, other = socket.socketpair()
    ours, theirs = multiprocessing.Pipe()
    process = start(sys.argv[1], theirs, kept)
    pid, is_default = ours.recv()
    process.terminate()
    time.sleep(0.5)
    process.kill()
    process.join()
    try:
        signals = told.recv(16)
    except BlockingIOError:
        signals = b""
    start(sys.argv[1], theirs, kept)
    pid, _ = ours.recv()
    print(pid, listening.getsockname()[1], is_default, int(signal.SIGTERM) in signals, other.recv(2), flush=True)
    time.sleep(120)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["EngineCore_DP0", "VllmWorker-1"])
def test_forked_engine_has_neither_the_signals_nor_the_port_of_its_parent(name: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", FORKING, name], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, port, *rest = parent.stdout.readline().split()
    assert rest == ["True", "False", "b'xx'"]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert psutil.pid_exists(int(child))
    with socket.create_server(("127.0.0.1", int(port))):
        pass
    assert wait_until_gone(int(child), 15)


@pytest.mark.timeout(60)
def test_process_that_a_program_forks_for_itself_is_left_alone() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FORKING, "Mine"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, port, is_default, *_ = parent.stdout.readline().split()
    try:
        assert is_default == "False"
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server(("127.0.0.1", int(port)))
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.timeout(60)
def test_child_ends_after_its_parent_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert psutil.pid_exists(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until_gone(child, 15)
