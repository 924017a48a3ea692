"""Which stack the emulator plays: its generation, the faults that are switched on, the callables its wheels lack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_kunlun.platforms import envs
from vllm_kunlun.targets.p800.contract import Contract, Generation, KnownFault
from vllm_kunlun.targets.p800.contract_load import load


class EmulatorSettingError(ValueError):
    """A setting of the emulator names something that the vendor contract does not have."""


@dataclass(frozen=True)
class Settings:
    """`faults` maps each switched-on fault to its thresholds; `missing` holds full names of absent callables."""

    generation: Generation = Generation.TORCH29
    faults: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()

    @classmethod
    def of(cls, generation: str = "torch29", faults: Iterable[str] = (), missing: Iterable[str] = ()) -> Settings:
        """Settings from the texts that the environment variables hold; raises EmulatorSettingError."""
        contract = load()
        chosen = Generation(generation)
        active = dict(_fault(text, contract, chosen) for text in faults)
        absent = {_op_name(name, contract) for name in missing}
        for name in active:
            fault = contract.fault(name)
            absent.update(fault.ops if fault.kind == "absent" else ())
        return cls(chosen, active, frozenset(absent))

    @classmethod
    def from_environment(cls) -> Settings:
        """Settings from VLLM_KUNLUN_EMULATOR_GENERATION, …_FAULTS and …_MISSING."""
        return cls.of(
            envs.EMULATOR_GENERATION.get(),
            envs.EMULATOR_FAULTS.get(),
            envs.EMULATOR_MISSING.get(),
        )

    def active(self, fault: KnownFault) -> bool:
        """Whether a fault shows: it was switched on, or it is always there."""
        return fault.name in self.faults or (fault.always and self.generation in fault.generations)


def _fault(text: str, contract: Contract, generation: Generation) -> tuple[str, dict[str, int]]:
    """``name`` or ``name:parameter=value:parameter=value``."""
    name, *assignments = text.split(":")
    if name not in contract.faults:
        raise EmulatorSettingError(f"{envs.EMULATOR_FAULTS.name}: there is no fault {name!r}. {_known(contract)}")
    fault = contract.fault(name)
    if generation not in fault.generations:
        homes = ", ".join(sorted(g.value for g in fault.generations))
        raise EmulatorSettingError(
            f"{envs.EMULATOR_FAULTS.name}: {name} does not occur in {generation.value}, only in {homes}."
            f" Set {envs.EMULATOR_GENERATION.name}."
        )
    return name, {**fault.parameters, **_parameters(fault, assignments)}


def _known(contract: Contract) -> str:
    return "Known: " + ", ".join(sorted(contract.faults)) + "."


def _parameters(fault: KnownFault, assignments: list[str]) -> dict[str, int]:
    found = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if key not in fault.parameters or not equals or not value.isdecimal():
            accepted = ", ".join(f"{name}=NUMBER" for name in fault.parameters) or "none"
            raise EmulatorSettingError(
                f"{envs.EMULATOR_FAULTS.name}: {assignment!r} is no parameter of {fault.name}; accepted: {accepted}"
            )
        found[key] = int(value)
    return found


def _op_name(name: str, contract: Contract) -> str:
    """The full name of a callable given as ``library.name``, or as a name that one library only has."""
    if name in contract.ops:
        return name
    matches = [op.name for op in contract.ops.values() if op.callable_name == name]
    if len(matches) == 1:
        return matches[0]
    problem = f"stands for {' and '.join(matches)}" if matches else "is not in the vendor contract"
    raise EmulatorSettingError(
        f"{envs.EMULATOR_MISSING.name}: {name!r} {problem}. Give library.name as `vllm-kunlun ops --contract` shows it."
    )
