"""Every environment variable of this package, as one typed table.

Values are read from `os.environ` when they are asked for, never at import. A value that cannot be used raises
EnvironmentVariableError, which names the variable, the value and what is accepted.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

T = TypeVar("T")

PREFIX = "VLLM_KUNLUN_"

TargetName = Literal["auto", "p800", "host", "emulated", "off"]
ProviderName = Literal["auto", "host", "torch"]
EmulatorGeneration = Literal["torch25", "torch29"]
IsaName = Literal["auto", "generic", "avx2", "avx512", "amx"]
CpuBind = Literal["auto", "none"] | tuple[int, ...]

logger = logging.getLogger("vllm.kunlun")


class EnvironmentVariableError(ValueError):
    """An environment variable of this package has a value that cannot be used."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    `parse` turns the text into the value or raises ValueError saying what is wrong with it. `default` is the value
    of an unset (or empty) variable; a callable default depends on other variables and is computed from them.
    """

    name: str
    type: str
    accepted: str
    default: T | Callable[[Mapping[str, str]], T]
    parse: Callable[[str], T]
    doc: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value from `environ` (default: os.environ); raises EnvironmentVariableError."""
        environ = os.environ if environ is None else environ
        text = environ.get(self.name, "").strip()
        if not text:
            return self.default_value(environ)
        try:
            return self.parse(text)
        except ValueError as error:
            raise EnvironmentVariableError(f"{self.name}={text}: {error}. Accepted: {self.accepted}.") from error

    def default_value(self, environ: Mapping[str, str]) -> T:
        """Return the value an unset variable has in `environ`."""
        if callable(self.default):
            return self.default(environ)
        return self.default

    def is_set(self, environ: Mapping[str, str] | None = None) -> bool:
        """Tell whether the variable is set to something other than blanks."""
        environ = os.environ if environ is None else environ
        return bool(environ.get(self.name, "").strip())


def one_of(*choices: str) -> Callable[[str], Any]:
    """Parser of a choice; upper and lower case are the same."""

    def parse(text: str) -> str:
        if text.lower() in choices:
            return text.lower()
        near = difflib.get_close_matches(text.lower(), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown choice{hint}")

    return parse


def integer(minimum: int, maximum: int) -> Callable[[str], int]:
    """Parser of an integer in ``minimum..maximum``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("not an integer") from None
        if not minimum <= value <= maximum:
            raise ValueError("out of range")
        return value

    return parse


def integer_or_auto(minimum: int, maximum: int) -> Callable[[str], int | None]:
    """Parser of an integer in ``minimum..maximum`` or the word auto, which gives None."""
    parse_integer = integer(minimum, maximum)
    return lambda text: None if text.lower() == "auto" else parse_integer(text)


def cpu_list(text: str) -> CpuBind:
    """Parse ``auto``, ``none`` or a list of CPU numbers and ranges such as ``0-3,6``."""
    if text.lower() in ("auto", "none"):
        return cast(CpuBind, text.lower())
    cpus: list[int] = []
    for item in text.split(","):
        cpus.extend(_cpu_range(item.strip()))
    if len(set(cpus)) != len(cpus):
        raise ValueError("a CPU is listed twice")
    return tuple(cpus)


def _cpu_range(item: str) -> range:
    first, dash, last = item.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"{item!r} is neither a CPU number nor a range")
    low, high = int(first), int(last or first)
    if high < low or high >= 4096:
        raise ValueError(f"{item!r} is not a range of CPU numbers below 4096")
    return range(low, high + 1)


def names(text: str) -> tuple[str, ...]:
    """Parse a list of names separated by commas."""
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise ValueError("a name in the list is empty")
    if len(set(items)) != len(items):
        raise ValueError("a name is listed twice")
    return items


def absolute_path(text: str) -> Path:
    """Parse a directory: ``~`` is expanded; a relative path is refused because processes differ in their directory."""
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError("not an absolute path")
    return path


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME", "").strip()
    home_cache = Path(environ.get("HOME") or Path.home()) / ".cache"
    return (Path(base) if Path(base).is_absolute() else home_cache) / "vllm-kunlun"


TARGET: Variable[TargetName] = Variable(
    "VLLM_KUNLUN_TARGET",
    "choice",
    "auto, p800, host, emulated, off",
    "auto",
    one_of("auto", "p800", "host", "emulated", "off"),
    "Where models run. auto: the P800 where its driver and xpytorch are there; nothing of this plugin where vLLM "
    "itself can use the machine; else the CPU (host). off: the plugin stays inactive.",
)
OPS_PROVIDER: Variable[ProviderName] = Variable(
    "VLLM_KUNLUN_OPS_PROVIDER",
    "choice",
    "auto, host, torch",
    "auto",
    one_of("auto", "host", "torch"),
    "Which provider serves the ops. auto: the best one for the target; host: the compiled CPU kernels, an error "
    "where they are not built; torch: plain torch.",
)
ISA: Variable[IsaName] = Variable(
    "VLLM_KUNLUN_ISA",
    "choice",
    "auto, generic, avx2, avx512, amx",
    "auto",
    one_of("auto", "generic", "avx2", "avx512", "amx"),
    "Highest instruction set the host kernels may use. auto: the best one this CPU has.",
)
NUM_THREADS: Variable[int | None] = Variable(
    "VLLM_KUNLUN_NUM_THREADS",
    "integer",
    "auto or 1 to 1024",
    None,
    integer_or_auto(1, 1024),
    "Kernel threads of each worker. auto: the CPUs this process may use, shared between the workers of this machine.",
)
CPU_BIND: Variable[CpuBind] = Variable(
    "VLLM_KUNLUN_CPU_BIND",
    "CPU list",
    "auto, none, or CPU numbers and ranges such as 0-3,6",
    "auto",
    cpu_list,
    "CPUs that kernel threads are pinned to; the workers of this machine share the list. none: the operating "
    "system places threads.",
)
SPIN_US: Variable[int] = Variable(
    "VLLM_KUNLUN_SPIN_US",
    "integer",
    "0 to 1000000",
    100,
    integer(0, 1_000_000),
    "Microseconds an idle kernel thread spins for its next piece of work before it sleeps.",
)
SERVER_NICE: Variable[int] = Variable(
    "VLLM_KUNLUN_SERVER_NICE",
    "integer",
    "0 to 19",
    15,
    integer(0, 19),
    "How far the API server's thread stands behind the kernels' threads on the host target, as the command nice counts "
    "it. It works while the engine prepares a step; 0 lets it interrupt kernels, all of which then wait.",
)
CACHE_DIR: Variable[Path] = Variable(
    "VLLM_KUNLUN_CACHE_DIR",
    "path",
    "an absolute path",
    _default_cache_dir,
    absolute_path,
    "Where prepared files are kept (demo model). Default: vllm-kunlun in $XDG_CACHE_HOME or in ~/.cache.",
)

EMULATOR_GENERATION: Variable[EmulatorGeneration] = Variable(
    "VLLM_KUNLUN_EMULATOR_GENERATION",
    "choice",
    "torch25, torch29",
    "torch29",
    one_of("torch25", "torch29"),
    "Which generation of the vendor's libraries the emulator plays.",
)
EMULATOR_FAULTS: Variable[tuple[str, ...]] = Variable(
    "VLLM_KUNLUN_EMULATOR_FAULTS",
    "list",
    "names of known faults, separated by commas; name:parameter=value moves a threshold",
    (),
    names,
    "Known faults of the vendor's libraries that the emulator reproduces; vllm-kunlun ops --contract lists them.",
)
EMULATOR_MISSING: Variable[tuple[str, ...]] = Variable(
    "VLLM_KUNLUN_EMULATOR_MISSING",
    "list",
    "names of vendor ops, separated by commas",
    (),
    names,
    "Vendor ops that the emulated libraries lack.",
)
EMULATOR_MEMORY_GIB: Variable[int] = Variable(
    "VLLM_KUNLUN_EMULATOR_MEMORY_GIB",
    "integer",
    "1 to 96",
    4,
    integer(1, 96),
    "Memory of the emulated card in GiB. It is this machine's memory that fills up.",
)

VARIABLES: tuple[Variable[Any], ...] = (
    TARGET,
    OPS_PROVIDER,
    ISA,
    NUM_THREADS,
    CPU_BIND,
    SPIN_US,
    SERVER_NICE,
    CACHE_DIR,
    EMULATOR_GENERATION,
    EMULATOR_FAULTS,
    EMULATOR_MISSING,
    EMULATOR_MEMORY_GIB,
)


@dataclass(frozen=True)
class UnknownVariable:
    """A variable with this package's prefix that the table does not know, and the most similar name it knows."""

    name: str
    nearest: str | None

    def __str__(self) -> str:
        hint = f" Did you mean {self.nearest}?" if self.nearest else " See: vllm-kunlun env."
        return f"Unknown environment variable {self.name} is ignored.{hint}"


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[UnknownVariable]:
    """List variables named ``VLLM_KUNLUN_*`` that are not in the table."""
    environ = os.environ if environ is None else environ
    known = [variable.name for variable in VARIABLES]
    strangers = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return [UnknownVariable(name, _nearest(name, known)) for name in strangers]


def _nearest(name: str, known: list[str]) -> str | None:
    by_suffix = {full.removeprefix(PREFIX): full for full in known}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), by_suffix, n=1, cutoff=0.5)
    return by_suffix[near[0]] if near else None


_warned: set[str] = set()


def warn_unknown() -> None:
    """Log one warning for each unknown ``VLLM_KUNLUN_*`` variable, once per process."""
    for stranger in unknown_variables():
        if stranger.name not in _warned:
            _warned.add(stranger.name)
            logger.warning("%s", stranger)


def validate(environ: Mapping[str, str] | None = None) -> None:
    """Read every variable of the table; raises EnvironmentVariableError for the first value that cannot be used."""
    for variable in VARIABLES:
        variable.get(environ)
