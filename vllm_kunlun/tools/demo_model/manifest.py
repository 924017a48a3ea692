"""The record kept beside a prepared checkpoint: what it was made from and the checksum of every file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_kunlun.tools.demo_model.source import Source, sha256_of

MANIFEST_FILE = "vllm_kunlun_manifest.json"
FORMAT = 1
"""Raised when the conversion changes, so that older checkpoints are made again."""


@dataclass(frozen=True)
class Manifest:
    """`files` maps file names to SHA-256 in hexadecimal; `source_sha256` is that of the GGUF file."""

    format: int
    source_version: str
    source_sha256: str
    files: dict[str, str]

    @classmethod
    def of(cls, directory: Path, source: Source) -> Manifest:
        """Describe the files in `directory`, made from `source`."""
        files = {path.name: sha256_of(path) for path in sorted(directory.iterdir()) if path.name != MANIFEST_FILE}
        return cls(FORMAT, source.version, source.sha256, files)

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Return the manifest of `directory`, or None when there is none that can be understood."""
        try:
            return cls(**json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, directory: Path) -> None:
        """Store the manifest in `directory`."""
        (directory / MANIFEST_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def damage(directory: Path, source: Source | None) -> str | None:
    """Say why the checkpoint in `directory` cannot be reused, or return None when it can.

    Without an installed source a checkpoint is judged by its own checksums alone.
    """
    manifest = Manifest.read(directory)
    if manifest is None:
        return "it is incomplete"
    if manifest.format != FORMAT:
        return "another version of this package made it"
    if source is not None and manifest.source_sha256 != source.sha256:
        return f"it was made from version {manifest.source_version} of the weights, {source.version} is installed"
    return _damaged_file(directory, manifest)


def _damaged_file(directory: Path, manifest: Manifest) -> str | None:
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_of(path) != expected:
            return f"{name} is damaged"
    return None
