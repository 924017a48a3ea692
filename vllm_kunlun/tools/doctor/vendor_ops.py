"""Lists vendor callables that the ops need and the wheels lack: ``python -m vllm_kunlun.tools.doctor.vendor_ops``."""

from __future__ import annotations

import json

from vllm_kunlun.ops.providers.p800 import SERVICES
from vllm_kunlun.targets.p800.probe import MissingVendorOps, UnknownStack, VendorStack, generation_here, probe


def missing(stack: VendorStack) -> list[str]:
    """A line for each of them, with the wheel that has it."""
    try:
        stack.require(name for service in SERVICES.values() for name in service.needs)
    except MissingVendorOps as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


def main() -> None:
    """Print the lines as a JSON list."""
    try:
        print(json.dumps(missing(probe(generation_here(emulated=False)))))
    except UnknownStack as error:
        print(json.dumps([str(error)]))


if __name__ == "__main__":
    main()
