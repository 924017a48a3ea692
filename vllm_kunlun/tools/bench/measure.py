"""Alternating measurements of several servers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_kunlun.tools.bench.client import run_streams
from vllm_kunlun.tools.bench.peers import Launch, Peer
from vllm_kunlun.tools.bench.server import Server
from vllm_kunlun.tools.bench.works import START, Work, worst_stall

WARM_UP_RUN = 0
SETTLE_S = 0.5
"""Pause between two servers' turns, so that threads of the one that was held have gone to sleep."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What all measurements of one comparison share: `runs` are kept of each work, `say` reports progress."""

    launch: Launch
    vocab_size: int
    logs: Path
    runs: int
    seed: int
    say: Progress


@dataclass(frozen=True)
class Sample:
    """One measurement of one server."""

    value: float
    first_token_s: float
    stall: float | None

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields as plain JSON values."""
        return {"value": self.value, "first_token_s": self.first_token_s, "stall": self.stall}


def median(samples: Sequence[Sample]) -> float:
    """The median of the samples' values."""
    return statistics.median(sample.value for sample in samples)


def capable(peers: Sequence[Peer], work: Work) -> list[str]:
    """Names of the servers that can run a work's requests at once."""
    return [peer.name for peer in peers if peer.max_concurrency is None or work.concurrency <= peer.max_concurrency]


@contextmanager
def running(peers: Sequence[Peer], plan: Plan) -> Iterator[list[Server]]:
    """Start every server, one after the other, and hold each as soon as it is ready; end them all on the way out."""
    servers: list[Server] = []
    try:
        for peer in peers:
            server = peer.server(plan.launch, plan.logs)
            servers.append(server)
            plan.say(f"starting {server.name}")
            server.start()
            server.wait_ready()
            server.hold()
        yield servers
    finally:
        for server in servers:
            server.stop()


@contextmanager
def turn(server: Server) -> Iterator[None]:
    """Let one server run while the others are held."""
    server.release()
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        server.hold()


def measure_once(server: Server, work: Work, plan: Plan, seed: Sequence[int]) -> Sample:
    """Run one work once, after a short request that wakes the server."""
    model = plan.launch.served_name
    wake = Work("wake", "", "", 1, 32, 4, work.figure)
    run_streams(server.base_url, model, wake.prompts([*seed, 1], plan.vocab_size), wake.new_tokens)
    streams = run_streams(server.base_url, model, work.prompts([*seed, 0], plan.vocab_size), work.new_tokens)
    stall = worst_stall(streams) if work.new_tokens > 2 else None
    return Sample(work.figure(streams), min(s.first_token_s for s in streams), stall)


def measure_work(servers: Sequence[Server], work: Work, plan: Plan) -> dict[str, list[Sample]]:
    """Measure one work on each server in turn, run after run; run 0 warms up and is not kept."""
    samples: dict[str, list[Sample]] = {server.name: [] for server in servers}
    for run in range(plan.runs + 1):
        for server in servers:
            with turn(server):
                sample = measure_once(server, work, plan, [plan.seed, run, work.concurrency, work.new_tokens])
            if run != WARM_UP_RUN:
                samples[server.name].append(sample)
            plan.say(f"{work.name} run {run}/{plan.runs} {server.name}: {sample.value:.1f} {work.unit}")
    return samples


def measure_start(peers: Sequence[Peer], plan: Plan) -> dict[str, list[Sample]]:
    """Measure process start to first streamed token, alternating; run 0 fills caches on disk and is not kept."""
    samples: dict[str, list[Sample]] = {peer.name: [] for peer in peers}
    for run in range(plan.runs + 1):
        for peer in peers:
            sample = start_once(peer, plan, START.prompts([plan.seed, run, 2], plan.vocab_size))
            if run != WARM_UP_RUN:
                samples[peer.name].append(sample)
            plan.say(f"{START.name} run {run}/{plan.runs} {peer.name}: {sample.value:.1f} {START.unit}")
    return samples


def start_once(peer: Peer, plan: Plan, prompts: Sequence[Sequence[int]]) -> Sample:
    """Start a server, stream one token from it, end it."""
    server = peer.server(plan.launch, plan.logs)
    try:
        started = server.start()
        server.wait_ready()
        stream = run_streams(server.base_url, plan.launch.served_name, prompts, START.new_tokens)[0]
        return Sample(stream.chunks[0] - started, stream.first_token_s, None)
    finally:
        server.stop()


def ratios(samples: Mapping[str, Sequence[Sample]], ours: str, higher_is_better: bool) -> dict[str, float]:
    """How many times better `ours` is than each other server, by medians."""
    own = median(samples[ours])
    others = {name: median(values) for name, values in samples.items() if name != ours}
    return {name: own / other if higher_is_better else other / own for name, other in others.items()}
