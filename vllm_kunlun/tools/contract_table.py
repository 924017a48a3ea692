"""The vendor contract as tables: for the documentation, for the terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_kunlun.targets.p800.contract import Argument, Contract, Generation, KnownFault, Presence, VendorOp
from vllm_kunlun.targets.p800.contract_load import load

FAMILY_TITLES = {
    "norm": "Norms",
    "activation": "Activations",
    "rotary": "Rotary position embedding",
    "kv_cache": "KV cache",
    "attention": "Attention",
    "gemm": "Matrix products and quantisation",
    "sampling": "Sampling and log-probabilities",
    "runtime": "Embedding, copies, communication, graphs",
    "mla": "Multi-head latent attention and its indexer",
    "moe": "Mixture of experts",
    "gdn": "Gated delta nets and causal convolution",
    "lora": "LoRA",
}
_PRESENCE = {Presence.SEEN: "yes", Presence.ASSUMED: "assumed", Presence.SOME_WHEELS: "some wheels"}


@dataclass(frozen=True)
class Row:
    """One callable in the overview."""

    name: str
    generations: tuple[str, ...]
    computes: str
    arguments: str
    faults: tuple[str, ...]
    confidence: str


def rows(contract: Contract | None = None) -> list[Row]:
    """The overview, dense path first."""
    return [_row(op) for op in (contract or load()).ops.values()]


def _row(op: VendorOp) -> Row:
    generations = tuple(_PRESENCE[op.presence[g]] if g in op.presence else "-" for g in Generation)
    faults = tuple(fault.name for fault in op.faults)
    return Row(op.name, generations, op.computes, signature_text(op), faults, op.confidence.value)


def signature_text(op: VendorOp) -> str:
    """``(x, y, *, weight, eps=1e-05)``, with the star before what callers give by keyword, or that it is not known."""
    if op.arguments is None:
        return "(arguments not known)"
    parts = []
    for argument in op.arguments:
        parts += ["*"] if argument.name == op.keywords_from else []
        parts.append(_parameter(argument))
    return f"({', '.join(parts)})"


def _parameter(argument: Argument) -> str:
    return argument.name if argument.required else f"{argument.name}={argument.default!r}"


def as_data(contract: Contract | None = None) -> dict[str, Any]:
    """The whole contract as dictionaries, lists and texts, ready for JSON."""
    contract = contract or load()
    return {
        "ops": [_plain(op) for op in contract.ops.values()],
        "faults": [_plain(fault) for fault in contract.faults.values()],
        "device_rules": [_plain(rule) for rule in contract.device_rules.values()],
        "generations": [_plain(facts) for facts in contract.generations.values()],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Iterable) and not hasattr(value, "items"):
        items = [_plain(item) for item in value]
        return sorted(items) if isinstance(value, frozenset) else items
    if hasattr(value, "items"):
        return {_plain(key): _plain(item) for key, item in value.items()}
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None or set(fields) == {"text"}:
        return str(value)
    # A callable's faults are listed once, by name.
    return {n: [f.name for f in value.faults] if n == "faults" else _plain(getattr(value, n)) for n in fields}


def as_markdown(contract: Contract | None = None) -> str:
    """The page of the documentation, without its introduction."""
    contract = contract or load()
    parts = [
        "## Generations", *_generations(contract),
        "## Known faults", *_faults(contract.faults.values()),
        "## What a step on the device must not reach", *_device_rules(contract),
        "## What is disputed", *_readings(contract),
    ]  # fmt: skip
    for family, ops in contract.families().items():
        parts += [f"## {FAMILY_TITLES[family]}"]
        for op in ops:
            parts += list(_op_section(op))
    parts += ["## Sources", *(f"- **{kind}**: {text}" for kind, text in contract.source_kinds.items())]
    return "\n".join(parts)


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for cells in lines:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _generations(contract: Contract) -> Iterator[str]:
    titles = ("name", "stack", "kunlun_ops", "xspeedgate_ops")
    lines = (
        (f"`{facts.generation.value}`", facts.title, facts.wheels["kunlun_ops"], facts.wheels["xspeedgate_ops"])
        for facts in contract.generations.values()
    )
    return _table(titles, lines)


def _faults(faults: Iterable[KnownFault]) -> Iterator[str]:
    titles = ("fault", "callables", "what happens", "where", "work-around", "known by")
    return _table(titles, (_fault_cells(fault) for fault in faults))


def _fault_cells(fault: KnownFault) -> tuple[str, ...]:
    where = f"`{fault.region}`" if fault.region is not None else "everywhere"
    if fault.parameters:
        where += " with " + ", ".join(f"{name} = {value}" for name, value in fault.parameters.items())
    if len(fault.generations) < len(Generation):
        where += f"; {', '.join(sorted(g.value for g in fault.generations))} only"
    switch = "always there" if fault.always else f"`{fault.name}`"
    name = f"{fault.name}<br>{switch}" if fault.always else switch
    known = f"{'; '.join(str(source) for source in fault.sources)} ({fault.confidence.value})"
    ops = ", ".join(f"`{op}`" for op in fault.ops)
    return name, ops, fault.symptom, where, fault.workaround, known


def _device_rules(contract: Contract) -> Iterator[str]:
    words = {"host": "no device kernel: goes through the host", "sync": "waits for the device", "crash": "refused"}
    lines = (
        (f"`{rule.operator}`", words[rule.kind], rule.instead, rule.confidence.value)
        for rule in contract.device_rules.values()
    )
    return _table(("operator", "what happens", "instead", "known by"), lines)


def _readings(contract: Contract) -> Iterator[str]:
    for op in contract.ops.values():
        if op.readings:
            yield f"- `{op.name}`: {'; or '.join(op.readings)}."


def _op_section(op: VendorOp) -> Iterator[str]:
    yield f"### `{op.name}`"
    yield ""
    yield f"{op.computes[0].upper()}{op.computes[1:]}."
    if op.arguments is not None:
        yield from _table(
            ("argument", "direction", "dtype", "shape", "layout", "default", "notes"),
            (_argument_cells(argument) for argument in op.arguments),
        )
    else:
        yield from ("", "Its arguments are not known.", "")
    yield from (f"- {line}" for line in _remarks(op))
    yield ""


def _argument_cells(argument: Argument) -> tuple[str, ...]:
    dtype = " or ".join(argument.dtypes) if argument.is_tensor else argument.kind
    shape = " or ".join(f"`[{text}]`" if not text.startswith("as ") else text for text in argument.shapes)
    default = "required" if argument.required else f"`{argument.default}`"
    return f"`{argument.name}`", argument.io, dtype or "any", shape, _layout(argument), default, _notes(argument)


def _layout(argument: Argument) -> str:
    if not argument.is_tensor:
        return ""
    words = {"full": "contiguous", "last": "last stride 1", "any": "any strides"}
    return f"{words[argument.contiguous]}, host" if argument.place == "host" else words[argument.contiguous]


def _notes(argument: Argument) -> str:
    names = {
        name: [g.value for g, other in argument.names.items() if other == name] for name in argument.names.values()
    }
    found = [argument.note]
    found += [f"same values as its {argument.pair} pair"] if argument.pair else []
    found += [f"equals `{argument.equals}`"] if argument.equals is not None else []
    found += [f"below `{argument.bound}`"] if argument.bound is not None else []
    found += [f"callers pass only {', '.join(map(repr, argument.only))}"] if argument.only is not None else []
    found += [f"called `{name}` in {', '.join(homes)}" for name, homes in names.items()]
    found += ["absent from some builds"] if argument.probe else []
    found += [f"may be {', '.join(argument.may_alias)} itself"] if argument.may_alias else []
    found += [argument.confidence.value] if argument.confidence is not None else []
    return "; ".join(text for text in found if text)


def _remarks(op: VendorOp) -> Iterator[str]:
    homes = [f"{g.value}: {_PRESENCE[op.presence[g]]}" for g in Generation if g in op.presence]
    yield f"In {', '.join(homes)}. Known by: {op.confidence.value}, {'; '.join(str(s) for s in op.sources)}."
    for returned in op.returns:
        shape = " or ".join(f"`[{text}]`" if not text.startswith("as ") else text for text in returned.shapes)
        yield f"Returns `{returned.name}`: {' or '.join(returned.dtypes)} {shape}."
    for form in op.forms:
        yield f"Form *{form.name}*, when `{form.when}`{_form_text(form.shapes, form.required, form.forbidden)}."
    for limit in op.limits:
        yield f"Limit: `{limit.require}` ({limit.says})."
    for alternative in op.alternatives:
        yield f"Without it: {alternative}."
    if op.faults:
        yield f"Known faults: {', '.join(f'`{fault.name}`' for fault in op.faults)}."
    if op.note:
        yield op.note


def _form_text(shapes: Any, required: Sequence[str], forbidden: Sequence[str]) -> str:
    parts = [f"`{name}` is {' or '.join(f'`[{text}]`' for text in texts)}" for name, texts in shapes.items()]
    parts += [f"needs `{name}`" for name in required]
    parts += [f"takes no `{name}`" for name in forbidden]
    return f": {', '.join(parts)}" if parts else ""
