"""Prints the lines of a lock whose packages are not installed: ``python missing.py requirements/host.txt``.

For an environment that came with packages of its own, such as a vendor image: what is there stays as it is, whatever
its version, and only what is missing gets added.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # a bare environment; pip carries its own copy
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]


def is_installed(name: str) -> bool:
    """Tell whether a distribution of that name is installed, in any version."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def missing(lock: Path) -> Iterator[str]:
    """Yield the requirements of `lock` that apply to this Python and are not installed."""
    for line in lock.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate()
        if applies and not is_installed(requirement.name):
            yield text


def main() -> int:
    """Print the missing requirements of the lock named on the command line."""
    for requirement in missing(Path(sys.argv[1])):
        print(requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main())
