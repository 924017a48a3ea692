"""Prepares the demo model with a progress bar."""

from __future__ import annotations

from pathlib import Path

from vllm_kunlun.cli.screen import CommandError
from vllm_kunlun.tools import demo_model


def prepare_demo_model() -> tuple[Path, str]:
    """Return the demo model's folder and the name it is served under; raises CommandError when it cannot be made."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Preparing {demo_model.SERVED_NAME} (once)", total=None, visible=False)

        def advance(num_bytes: int, total: int) -> None:
            progress.update(task, advance=num_bytes, total=total, visible=True)

        try:
            return demo_model.ensure_demo_model(advance), demo_model.SERVED_NAME
        except demo_model.DemoModelError as error:
            raise CommandError(str(error)) from error
