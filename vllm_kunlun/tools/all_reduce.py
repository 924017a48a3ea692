"""A sum over two ranks with a time limit: the least that tensor parallelism needs to work.

``python -m vllm_kunlun.tools.all_reduce RANK FILE BACKEND`` is one rank; `two_ranks` starts both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 2
BYTES = 4 << 20
_REPEATS = 5


class AllReduceFailed(RuntimeError):
    """The ranks did not reach the sum; the message says which of them, and how."""


def rank_main(rank: int, store: str, backend: str) -> dict[str, Any]:
    """Sums a tensor with the other rank; returns the seconds of one sum. Raises where the sum is wrong."""
    import torch
    from torch import distributed

    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    try:
        return {"seconds": _summed(device)}
    finally:
        distributed.destroy_process_group()


def _summed(device: Any) -> float:
    import torch
    from torch import distributed

    rank, times = distributed.get_rank(), []
    for _ in range(_REPEATS):
        numbers = (torch.arange(BYTES // 4, dtype=torch.float32) % 251 + rank).to(device)
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(numbers)
        total = numbers.cpu()  # waits for the device
        times.append(time.perf_counter() - started)
        wanted = 2 * (torch.arange(BYTES // 4, dtype=torch.float32) % 251) + 1
        if not torch.equal(total, wanted):
            raise RuntimeError(f"rank {rank} got a wrong sum in {int((total != wanted).sum())} elements")
    return sorted(times)[len(times) // 2]


def two_ranks(backend: str, limit: float = 60.0) -> float:
    """Runs both ranks, each a process; returns the seconds of one sum. Raises AllReduceFailed, also after `limit`."""
    with tempfile.TemporaryDirectory(prefix="vllm-kunlun-") as folder:
        store = str(Path(folder) / "store")
        ranks = [_start(rank, store, backend) for rank in range(RANKS)]
        try:
            outputs = _outputs(ranks, limit)
        finally:
            _end(ranks)
    return max(json.loads(output)["seconds"] for output in outputs)


def _start(rank: int, store: str, backend: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_kunlun.tools.all_reduce", str(rank), store, backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )


def _outputs(ranks: list[subprocess.Popen[str]], limit: float) -> list[str]:
    """The last line that each rank printed."""
    end, outputs = time.monotonic() + limit, []
    for rank, process in enumerate(ranks):
        try:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AllReduceFailed(f"no sum after {limit:.0f} s; rank {rank} still waits for the other one") from None
        if process.returncode != 0:
            last = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise AllReduceFailed(f"rank {rank} failed: {last[0]}")
        outputs.append(out.strip().splitlines()[-1])
    return outputs


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    print(json.dumps(rank_main(int(sys.argv[1]), *sys.argv[2:])))
