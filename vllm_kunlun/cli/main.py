"""Entry point of the console script `vllm-kunlun`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllm_kunlun.cli.screen import CommandError, fail
from vllm_kunlun.platforms.envs import EnvironmentVariableError

INSTALLED_SEPARATELY = {"torch": "torch", "vllm": "vLLM", "filelock": "filelock"}
"""Modules that commands need and a plain installation of this package does not bring, and their names."""

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="Serve language models through vLLM on a Kunlun3 P800, or on the CPU of this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Format(str, Enum):
    """How a table is printed."""

    TABLE = "table"
    MARKDOWN = "md"
    JSON = "json"


@app.command(
    "serve", context_settings=PASS_THROUGH, add_help_option=False, options_metavar="[MODEL] [FLAGS OF vllm serve]"
)
def serve_command(context: typer.Context) -> None:
    """Start the OpenAI-compatible server.

    Without MODEL a small demo model is served (SmolLM2-135M-Instruct). The server listens on 127.0.0.1, port 8356,
    unless --host and --port say otherwise. Every flag of vllm serve is accepted: --help=all lists them, --help=WORD
    those that contain WORD.
    """
    if {"--help", "-h"} & set(context.args):
        typer.echo(context.get_help())
        return
    from vllm_kunlun.cli.serve import serve

    serve(context.args)


@app.command("doctor")
def doctor_command(
    report: Annotated[
        Path | None, typer.Option(help="Also write everything needed to reproduce a problem to this file.")
    ] = None,
) -> None:
    """Check this installation.

    Each finding comes with its fix. Leaves with 1 when something is broken.
    """
    from vllm_kunlun.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(report))


@app.command("selftest")
def selftest_command(
    quick: Annotated[bool, typer.Option("--quick", help="Every case in one dtype; under a minute.")] = False,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be given several times.")] = None,
    without_workarounds: Annotated[
        bool,
        typer.Option("--without-workarounds", help="A known fault of the vendor's kernels that is present fails."),
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for the JSON and the HTML report.")] = Path("selftest-report"),
    submit_file: Annotated[
        Path | None, typer.Option(help="Also write the small file that feeds the support tables.")
    ] = None,
) -> None:
    """Test every op on the target of this machine.

    Results are compared with a float32 reference on the CPU. On a P800 the known faults of the vendor's kernels are
    tried too. Leaves with 1 when something is wrong.
    """
    from vllm_kunlun.cli.selftest import Wanted, run_selftest

    wanted = Wanted(quick, tuple(op or ()), not without_workarounds, output, submit_file)
    raise typer.Exit(run_selftest(wanted))


@app.command("env")
def env_command(
    output: Annotated[Format, typer.Option("--format", help="How to print the table.")] = Format.TABLE,
) -> None:
    """Show the environment variables."""
    from vllm_kunlun.cli import environment

    if output is Format.MARKDOWN:
        typer.echo(environment.as_markdown())
    elif output is Format.JSON:
        typer.echo(environment.as_json(environment.rows()))
    else:
        environment.show(environment.rows())


@app.command("ops")
def ops_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    contract: Annotated[
        bool, typer.Option("--contract", help="Show what is known of the P800's vendor callables and their faults.")
    ] = False,
) -> None:
    """Show which provider serves each op, and why."""
    if contract:
        from vllm_kunlun.cli.contract import show_contract

        show_contract(as_json)
        return
    from vllm_kunlun.cli.operators import show_ops

    show_ops(as_json)


@app.command("build")
def build_command() -> None:
    """Compile the CPU kernels.

    They are compiled for the installed torch, once, and kept in the cache folder.
    """
    from vllm_kunlun.ops.native.build import main as build

    raise typer.Exit(build())


@app.command("demo-model")
def demo_model_command() -> None:
    """Prepare the demo model; print its folder."""
    from vllm_kunlun.cli.demo_model import prepare_demo_model

    typer.echo(prepare_demo_model()[0])


@app.command("bench", context_settings=PASS_THROUGH, add_help_option=False)
def bench_command(context: typer.Context) -> None:
    """Measure this server, its kernels and its peers."""
    from vllm_kunlun.tools.bench.cli import app as bench

    bench(args=context.args, prog_name="vllm-kunlun bench")


@app.command("version")
def version_command() -> None:
    """Print the versions of this package and of vLLM."""
    from vllm_kunlun.platforms.machine import Machine
    from vllm_kunlun.platforms.version import __version__

    machine = Machine.detect()
    typer.echo(f"vllm-kunlun {__version__}")
    typer.echo(f"{machine.vllm_distribution or 'vllm'} {machine.vllm_version or 'is not installed'}")


def main() -> None:
    """Run the command line.

    An error that a command explains, a bad setting and a missing package are printed without a traceback.
    """
    try:
        app()
    except (CommandError, EnvironmentVariableError) as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in INSTALLED_SEPARATELY:
            raise
        name = INSTALLED_SEPARATELY[error.name]
        fail(f"{name} is not installed in this Python environment. ./kunlun installs it; or see: vllm-kunlun doctor")


if __name__ == "__main__":
    main()
