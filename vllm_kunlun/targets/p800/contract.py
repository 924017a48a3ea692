"""The vendor contract, typed: every vendor callable that the p800 path may use, with its rules and known faults.

The data are YAML files in ``vllm_kunlun/data/vendor_contract``, read by `contract_load.load`. No torch is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal

from vllm_kunlun.targets.p800.expressions import Expression

Io = Literal["in", "out", "inout"]
Contiguity = Literal["full", "last", "any"]
Values = Literal["lod", "lengths", "slots", "blocks", "ids", "positions"]
FaultKind = Literal["refuses", "wrong", "unwritten", "surprise", "absent", "absent keyword", "default", "falls back"]
RuleKind = Literal["host", "sync", "crash"]


class Generation(str, Enum):
    """A generation of the vendor's stack, named after its torch release."""

    TORCH25 = "torch25"
    TORCH29 = "torch29"


class Presence(str, Enum):
    """Whether a generation's wheels hold a callable."""

    SEEN = "seen"
    ASSUMED = "assumed"
    SOME_WHEELS = "some wheels"


class Confidence(str, Enum):
    """How a fact is known: read in a caller's source, inferred from calls, measured by one person, or disputed."""

    READ = "read"
    CALLER = "caller"
    REPORT = "report"
    UNCERTAIN = "uncertain"


class UnknownVendorName(KeyError):
    """A callable or fault that the table does not have."""

    def __init__(self, what: str, name: str, known: list[str]) -> None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else " List them with: vllm-kunlun ops --contract."
        super().__init__(f"the vendor contract has no {what} {name!r}.{hint}")

    def __str__(self) -> str:
        return str(self.args[0])


class Required(Enum):
    """Stands for the missing default of an argument that must be given."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


@dataclass(frozen=True)
class Source:
    """Where a fact comes from: a kind that `Contract.source_kinds` explains, and the place in it."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind} {self.where}"


@dataclass(frozen=True)
class Argument:
    """One argument of a callable.

    `kind` is tensor, tensors, tensor or number, generator, int, ints, float, bool or str. `dtypes` are torch's names,
    or ``as x`` for another argument's; empty means any. `shapes` are alternatives in the notation of the data files.
    `contiguous`: full, last (stride 1 in the last dimension), any. `place` and `pair` mark host and device copies of
    the same values. `values` and `bound` say what integers mean and stay below. `equals` ties a number to the
    dimensions. `nullable` says that None may be given. `only` lists the values that some caller passes; others have no
    known meaning. `names` has other keywords by generation. `probe` marks keywords that some builds lack. `may_alias`
    names inputs that an output may share its memory with.
    """

    name: str
    kind: str
    io: Io = "in"
    dtypes: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    contiguous: Contiguity = "full"
    default: Any = REQUIRED
    nullable: bool = False
    place: Literal["host", "device"] = "device"
    pair: str | None = None
    values: Values | None = None
    bound: Expression | None = None
    equals: Expression | None = None
    only: tuple[Any, ...] | None = None
    names: Mapping[Generation, str] = field(default_factory=dict)
    generations: frozenset[Generation] = frozenset(Generation)
    probe: bool = False
    may_alias: tuple[str, ...] = ()
    note: str = ""
    confidence: Confidence | None = None

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is REQUIRED

    @property
    def is_tensor(self) -> bool:
        """Whether it is one tensor, or may be one."""
        return self.kind in ("tensor", "tensor or number")

    def keyword(self, generation: Generation) -> str:
        """Its name in a generation's bindings."""
        return self.names.get(generation, self.name)


@dataclass(frozen=True)
class Returned:
    """One tensor that a callable returns."""

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    note: str = ""
    confidence: Confidence | None = None


@dataclass(frozen=True)
class Form:
    """One way of calling: `when` it applies, and the shapes and presence of arguments that differ there."""

    name: str
    when: Expression
    shapes: Mapping[str, tuple[str, ...]]
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    emulated: bool = True


@dataclass(frozen=True)
class Limit:
    """A condition that every call must meet; `form` restricts it to one form."""

    require: Expression
    says: str
    form: str | None
    confidence: Confidence | None


@dataclass(frozen=True)
class KnownFault:
    """Something that is wrong, refused or absent in the vendor's software.

    `region` says where, over the callable's arguments, dimensions and `parameters` (thresholds); None means everywhere.
    `always` marks what is so on every known build; the emulator needs no switch for it. `argument` and `default` belong
    to the kinds ``absent keyword`` and ``default``.
    """

    name: str
    kind: FaultKind
    ops: tuple[str, ...]
    symptom: str
    workaround: str
    region: Expression | None
    parameters: Mapping[str, int]
    argument: str | None
    default: Any
    generations: frozenset[Generation]
    always: bool
    confidence: Confidence
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class VendorOp:
    """One vendor callable. `arguments` is None where only its name is known; `name` is ``library.callable``.

    `fixed` holds numbers that the kernel has built in and no argument carries, by what they are.
    """

    name: str
    family: str
    computes: str
    presence: Mapping[Generation, Presence]
    arguments: tuple[Argument, ...] | None
    returns: tuple[Returned, ...]
    keywords_from: str | None
    forms: tuple[Form, ...]
    limits: tuple[Limit, ...]
    readings: tuple[str, ...]
    alternatives: tuple[str, ...]
    note: str
    confidence: Confidence
    sources: tuple[Source, ...]
    fixed: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[KnownFault, ...] = ()

    @property
    def library(self) -> str:
        """``kunlun_ops``, ``xspeedgate_ops`` or ``torch``."""
        return self.name.partition(".")[0]

    @property
    def callable_name(self) -> str:
        """The name without the library."""
        return self.name.partition(".")[2]

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that a call writes."""
        return tuple(a.name for a in self.arguments or () if a.io != "in")

    def arguments_in(self, generation: Generation) -> tuple[Argument, ...]:
        """The arguments of a generation's callable, in order; empty where they are not known."""
        return tuple(a for a in self.arguments or () if generation in a.generations)

    def argument(self, name: str) -> Argument:
        """One argument by its name in the table; raises UnknownVendorName."""
        for argument in self.arguments or ():
            if argument.name == name:
                return argument
        raise UnknownVendorName(f"argument of {self.name}", name, [a.name for a in self.arguments or ()])

    def fault(self, name: str) -> KnownFault:
        """One of its faults by name; raises UnknownVendorName."""
        for fault in self.faults:
            if fault.name == name:
                return fault
        raise UnknownVendorName(f"fault of {self.name}", name, [f.name for f in self.faults])


@dataclass(frozen=True)
class GenerationFacts:
    """What belongs to a generation: its torch release (``2.9``) and the wheel that holds each library."""

    generation: Generation
    torch: str
    title: str
    wheels: Mapping[str, str]


@dataclass(frozen=True)
class DeviceRule:
    """An operator of torch that a step on the device must not reach, and what to use instead.

    `spelled` lists the names under which Python code reaches it.
    """

    operator: str
    kind: RuleKind
    instead: str
    fault: str | None
    confidence: Confidence
    sources: tuple[Source, ...]
    spelled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contract:
    """The whole table."""

    ops: Mapping[str, VendorOp]
    faults: Mapping[str, KnownFault]
    generations: Mapping[Generation, GenerationFacts]
    device_rules: Mapping[str, DeviceRule]
    source_kinds: Mapping[str, str]
    dispatched: frozenset[str] = field(default_factory=frozenset)

    def op(self, name: str) -> VendorOp:
        """One callable by name, ``kunlun_ops.rmsnorm``; raises UnknownVendorName."""
        if name not in self.ops:
            raise UnknownVendorName("callable", name, list(self.ops))
        return self.ops[name]

    def fault(self, name: str) -> KnownFault:
        """One fault by name; raises UnknownVendorName."""
        if name not in self.faults:
            raise UnknownVendorName("fault", name, list(self.faults))
        return self.faults[name]

    def families(self) -> Mapping[str, tuple[VendorOp, ...]]:
        """The callables by family, in the order of the data files."""
        grouped: dict[str, list[VendorOp]] = {}
        for op in self.ops.values():
            grouped.setdefault(op.family, []).append(op)
        return {family: tuple(ops) for family, ops in grouped.items()}

    def in_generation(self, generation: Generation) -> tuple[VendorOp, ...]:
        """The callables that a generation's wheels hold, or should."""
        return tuple(op for op in self.ops.values() if generation in op.presence)

    def wheel(self, op: VendorOp, generation: Generation) -> str:
        """The wheel that holds a callable in a generation, in words."""
        return self.generations[generation].wheels[op.library]

    def generation_of(self, torch_version: str) -> Generation | None:
        """The generation of a torch release such as ``2.9.0+cu129``; None where no wheels are known for it."""
        release = ".".join(torch_version.split(".")[:2])
        return next((facts.generation for facts in self.generations.values() if facts.torch == release), None)
