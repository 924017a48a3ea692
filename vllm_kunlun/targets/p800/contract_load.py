"""Reads the vendor contract's YAML files into `contract.Contract` and checks that they are consistent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from vllm_kunlun.targets.p800.contract import (
    REQUIRED,
    Argument,
    Confidence,
    Contract,
    DeviceRule,
    Form,
    Generation,
    GenerationFacts,
    KnownFault,
    Limit,
    Presence,
    Returned,
    Source,
    VendorOp,
)
from vllm_kunlun.targets.p800.expressions import Expression

# In the order in which tables show them: the dense path first.
FAMILIES = (
    "norm", "activation", "rotary", "kv_cache", "attention", "gemm", "sampling", "runtime", "mla", "moe", "gdn", "lora",
)  # fmt: skip
_ARGUMENT_KEYS = {
    "type", "io", "dtype", "shape", "contiguous", "default", "nullable", "place", "pair", "values", "bound", "equals",
    "only", "names", "generations", "probe", "may_alias", "note", "confidence",
}  # fmt: skip
_OP_KEYS = {
    "computes", "in", "arguments", "signature", "returns", "keywords_from", "forms", "limits", "readings",
    "alternatives", "fixed", "note", "confidence", "sources",
}  # fmt: skip
_FAULT_KEYS = {
    "ops", "kind", "region", "parameters", "argument", "default", "symptom", "workaround", "always", "generations",
    "confidence", "sources",
}  # fmt: skip


class ContractDataError(ValueError):
    """The data files contradict their own rules."""


def folder() -> Path:
    """Where the data files are."""
    return Path(__file__).parents[2] / "data" / "vendor_contract"


@lru_cache(maxsize=1)
def load() -> Contract:
    """The contract of the installed package; raises ContractDataError."""
    return read(folder())


def read(place: Path) -> Contract:
    """The contract in a folder of data files; raises ContractDataError."""
    general = _yaml(place, "generations")
    groups = {name: tuple(members) for name, members in general["dtypes"].items()}
    kinds = general["sources"]
    ops = [
        _op(name, family, entry, groups, kinds)
        for family in FAMILIES
        for name, entry in _yaml(place, family).items()
    ]  # fmt: skip
    faults = {name: _fault(name, entry, kinds) for name, entry in _yaml(place, "faults").items()}
    by_name = {op.name: replace(op, faults=tuple(f for f in faults.values() if op.name in f.ops)) for op in ops}
    _check_faults(faults.values(), by_name)
    return Contract(
        ops=MappingProxyType(by_name),
        faults=MappingProxyType(faults),
        generations=MappingProxyType(dict(_generations(general["generations"]))),
        device_rules=MappingProxyType(dict(_rules(_yaml(place, "device")["rules"], kinds))),
        source_kinds=MappingProxyType(kinds),
        dispatched=frozenset(name for name, facts in general["libraries"].items() if facts["call"] == "dispatcher"),
    )


def _yaml(place: Path, name: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((place / f"{name}.yaml").read_text(encoding="utf-8"), loader)


def _known(where: str, entry: Mapping[str, Any], keys: set[str]) -> None:
    strangers = sorted(entry.keys() - keys)
    if strangers:
        raise ContractDataError(f"{where}: unknown keys {', '.join(strangers)}; known are {', '.join(sorted(keys))}")


def _op(
    name: str, family: str, entry: dict[str, Any], groups: Mapping[str, tuple[str, ...]], kinds: Mapping[str, str]
) -> VendorOp:
    _known(name, entry, _OP_KEYS)
    if ("arguments" in entry) == (entry.get("signature") == "unknown"):
        raise ContractDataError(f"{name}: give either arguments or signature: unknown")
    arguments = None
    if "arguments" in entry:
        arguments = tuple(_argument(name, key, value, groups) for key, value in entry["arguments"].items())
        _check_order(name, arguments, entry.get("keywords_from"))
    return VendorOp(
        name=name,
        family=family,
        computes=entry["computes"],
        presence={Generation(key): Presence(value) for key, value in entry["in"].items()},
        arguments=arguments,
        returns=tuple(_returned(key, value, groups) for key, value in entry.get("returns", {}).items()),
        keywords_from=entry.get("keywords_from"),
        forms=tuple(_form(key, value) for key, value in entry.get("forms", {}).items()),
        limits=tuple(_limit(value) for value in entry.get("limits", ())),
        readings=tuple(entry.get("readings", ())),
        alternatives=tuple(entry.get("alternatives", ())),
        note=entry.get("note", ""),
        confidence=Confidence(entry["confidence"]),
        sources=_sources(name, entry["sources"], kinds),
        fixed=MappingProxyType(entry.get("fixed", {})),
    )


def _check_order(op: str, arguments: Sequence[Argument], keywords_from: str | None) -> None:
    """No required argument may follow an optional one, unless both are given by keyword."""
    optional = None
    for argument in arguments:
        if argument.name == keywords_from:
            return
        if argument.required and optional is not None:
            raise ContractDataError(f"{op}: {argument.name} is required and follows {optional}; see keywords_from")
        optional = optional or (None if argument.required else argument.name)
    if keywords_from is not None:
        raise ContractDataError(f"{op}: keywords_from names {keywords_from}, which is no argument")


def _argument(op: str, name: str, entry: dict[str, Any], groups: Mapping[str, tuple[str, ...]]) -> Argument:
    _known(f"{op}({name})", entry, _ARGUMENT_KEYS)
    return Argument(
        name=name,
        kind=entry.get("type", "tensor"),
        io=entry.get("io", "in"),
        dtypes=_dtypes(entry.get("dtype"), groups),
        shapes=_texts(entry.get("shape")),
        contiguous=entry.get("contiguous", "full"),
        default=entry.get("default", REQUIRED),
        nullable=entry.get("nullable", entry.get("default", REQUIRED) is None),
        place=entry.get("place", "device"),
        pair=entry.get("pair"),
        values=entry.get("values"),
        bound=_expression(entry.get("bound")),
        equals=_expression(entry.get("equals")),
        only=tuple(entry["only"]) if "only" in entry else None,
        names={Generation(key): value for key, value in entry.get("names", {}).items()},
        generations=_generation_set(entry),
        probe=entry.get("probe", False),
        may_alias=tuple(entry.get("may_alias", ())),
        note=entry.get("note", ""),
        confidence=_confidence(entry),
    )


def _dtypes(value: Any, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    names = _texts(value)
    if names == ("any",):
        return ()
    return tuple(member for name in names for member in groups.get(name, (name,)))


def _texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)


def _expression(value: Any) -> Expression | None:
    return None if value is None else Expression(str(value))


def _generation_set(entry: Mapping[str, Any]) -> frozenset[Generation]:
    return frozenset(Generation(name) for name in entry.get("generations", list(Generation)))


def _confidence(entry: Mapping[str, Any]) -> Confidence | None:
    return Confidence(entry["confidence"]) if "confidence" in entry else None


def _returned(name: str, entry: dict[str, Any], groups: Mapping[str, tuple[str, ...]]) -> Returned:
    dtypes, shapes = _dtypes(entry["dtype"], groups), _texts(entry["shape"])
    return Returned(name, dtypes, shapes, entry.get("note", ""), _confidence(entry))


def _form(name: str, entry: dict[str, Any]) -> Form:
    return Form(
        name=name,
        when=Expression(str(entry["when"])),
        shapes={key: _texts(value) for key, value in entry.get("shapes", {}).items()},
        required=tuple(entry.get("required", ())),
        forbidden=tuple(entry.get("forbidden", ())),
        emulated=entry.get("emulated", True),
    )


def _limit(entry: dict[str, Any]) -> Limit:
    return Limit(Expression(entry["require"]), entry["says"], entry.get("form"), _confidence(entry))


def _sources(where: str, texts: Iterable[str], kinds: Mapping[str, str]) -> tuple[Source, ...]:
    sources = tuple(Source(*text.partition(" ")[::2]) for text in texts)
    strangers = [source.kind for source in sources if source.kind not in kinds]
    if strangers or not sources:
        raise ContractDataError(f"{where}: sources need a known kind; unknown: {', '.join(strangers) or 'none given'}")
    return sources


def _fault(name: str, entry: dict[str, Any], kinds: Mapping[str, str]) -> KnownFault:
    _known(name, entry, _FAULT_KEYS)
    return KnownFault(
        name=name,
        kind=entry["kind"],
        ops=tuple(entry["ops"]),
        symptom=entry["symptom"],
        workaround=entry["workaround"],
        region=_expression(entry.get("region")),
        parameters=MappingProxyType(entry.get("parameters", {})),
        argument=entry.get("argument"),
        default=entry.get("default"),
        generations=_generation_set(entry),
        always=entry.get("always", False),
        confidence=Confidence(entry["confidence"]),
        sources=_sources(name, entry["sources"], kinds),
    )


def _check_faults(faults: Iterable[KnownFault], ops: Mapping[str, VendorOp]) -> None:
    for fault in faults:
        # Methods of torch.Tensor and the like are no vendor callables, but can have faults.
        strangers = [name for name in fault.ops if name not in ops and not name.startswith("torch.Tensor.")]
        if strangers:
            raise ContractDataError(f"fault {fault.name} names callables that the table does not have: {strangers}")


def _generations(entries: Mapping[str, Any]) -> Iterable[tuple[Generation, GenerationFacts]]:
    for name, entry in entries.items():
        generation = Generation(name)
        wheels = MappingProxyType(entry["wheels"])
        yield generation, GenerationFacts(generation, entry["torch"], entry["title"], wheels)


def _rules(entries: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterable[tuple[str, DeviceRule]]:
    for name, entry in entries.items():
        sources = _sources(name, entry["sources"], kinds)
        confidence = Confidence(entry["confidence"])
        spelled = tuple(entry["spelled"])
        yield name, DeviceRule(name, entry["kind"], entry["instead"], entry.get("fault"), confidence, sources, spelled)
