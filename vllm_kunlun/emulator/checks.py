"""The rules that every call is checked against, one function each; all of them come from the vendor contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.emulator import overlap
from vllm_kunlun.emulator.call import Call, dtype_name
from vllm_kunlun.emulator.refusal import NotEmulatedYet
from vllm_kunlun.emulator.shapes import Dimensions, ShapeMismatch
from vllm_kunlun.targets.p800.contract import Argument

_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}


def check_types(call: Call) -> None:
    """Tensors are tensors and numbers are numbers; raises TypeError as a binding does."""
    for argument in call.arguments:
        value = call[argument.name]
        if value is None and argument.nullable:
            continue
        if not _has_type(argument, value):
            got = type(value).__name__
            raise TypeError(f"{call.op.name}(): argument {argument.name!r} must be {argument.kind}, not {got}")


def _has_type(argument: Argument, value: Any) -> bool:
    if argument.kind == "tensor":
        return isinstance(value, Tensor)
    if argument.kind == "tensor or number":
        return isinstance(value, Tensor | int | float)
    if argument.kind == "tensors":
        return isinstance(value, list | tuple) and all(isinstance(item, Tensor) for item in value)
    if argument.kind == "ints":
        return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)
    if argument.kind == "generator":
        return isinstance(value, torch.Generator)
    return isinstance(value, _SCALARS[argument.kind]) and (argument.kind == "bool" or not isinstance(value, bool))


def check_known_values(call: Call) -> None:
    """Arguments with a list of values that callers pass have one of them."""
    for argument in call.arguments:
        value = call[argument.name]
        if argument.only is not None and not any(value is known or value == known for known in argument.only):
            known = ", ".join(repr(item) for item in argument.only)
            call.refuse(
                f"{argument.name} is {value!r}; no caller passes anything but {known}, so its meaning is unknown"
            )


def check_form(call: Call) -> None:
    """Finds the form of the call and checks which arguments it needs and excludes."""
    if not call.op.forms:
        return
    names = call.names()
    call.form = next((form for form in call.op.forms if form.when.value(names)), None)
    if call.form is None:
        call.refuse("the call has none of the forms " + "; ".join(f"{f.name}: {f.when}" for f in call.op.forms))
    for name in call.form.required:
        if not call.given(name):
            call.refuse(f"{name} is missing, which the form '{call.form.name}' needs")
    for name in call.form.forbidden:
        if call.given(name):
            call.refuse(f"{name} was given, which the form '{call.form.name}' does not take")
    if not call.form.emulated:
        raise NotEmulatedYet(call.op.name, f"its form '{call.form.name}' is not written")


def check_dtypes(call: Call) -> None:
    """Each tensor has one of the dtypes the table lists."""
    for argument, tensor in call.tensors():
        accepted = {_resolve(call, name) for name in argument.dtypes}
        if accepted and dtype_name(tensor.dtype) not in accepted:
            listed = " or ".join(sorted(accepted))
            call.refuse(f"{argument.name} is {dtype_name(tensor.dtype)} and must be {listed}")


def _resolve(call: Call, name: str) -> str:
    """The dtype that ``as x`` stands for, or the name itself."""
    return dtype_name(call[name.removeprefix("as ")].dtype) if name.startswith("as ") else name


def check_contiguity(call: Call) -> None:
    """Tensors are contiguous where the kernel ignores strides."""
    for argument, tensor in call.tensors():
        if argument.contiguous == "full" and not tensor.is_contiguous():
            call.refuse(f"{argument.name} is not contiguous (strides {tensor.stride()}); the kernel ignores strides")
        if argument.contiguous == "last" and tensor.dim() and tensor.stride(-1) != 1 and tensor.size(-1) > 1:
            call.refuse(f"{argument.name} has stride {tensor.stride(-1)} in its last dimension and must have 1")


def check_shapes(call: Call) -> None:
    """Shapes fit the table, with dimensions that agree between the arguments; fills `call.dims`."""
    numbers = {n: v for n, v in call.values.items() if isinstance(v, int) and not isinstance(v, bool)}
    dimensions = Dimensions(dict(numbers))
    overrides = call.form.shapes if call.form else {}
    try:
        for argument, tensor in call.tensors():
            dimensions.match(argument.name, tuple(tensor.shape), _shapes(call, argument, overrides.get(argument.name)))
        dimensions.finish()
    except ShapeMismatch as mismatch:
        call.refuse(str(mismatch))
    call.dims = {name: size for name, size in dimensions.sizes.items() if name not in numbers}


def _shapes(call: Call, argument: Argument, override: tuple[str, ...] | None) -> tuple[str, ...]:
    shapes = override or argument.shapes
    return tuple(
        ", ".join(str(size) for size in call[text.removeprefix("as ")].shape) if text.startswith("as ") else text
        for text in shapes
    )


def check_numbers(call: Call) -> None:
    """Numbers that repeat a dimension agree with it."""
    for argument in call.arguments:
        if argument.equals is not None:
            expected = argument.equals.value(call.names())
            if call[argument.name] != expected:
                call.refuse(f"{argument.name} is {call[argument.name]} and must be {argument.equals} = {expected}")


def check_limits(call: Call) -> None:
    """The limits of the table hold."""
    names = call.names()
    for limit in call.op.limits:
        applies = limit.form is None or (call.form is not None and call.form.name == limit.form)
        if applies and not limit.require.value(names):
            facts = ", ".join(f"{name} = {names[name]}" for name in sorted(limit.require.names))
            call.refuse(f"{limit.require} must hold: {limit.says} ({facts})")


def check_pairs(call: Call) -> None:
    """Host and device copies are equal; in a replay the device's values stay within those of the capture."""
    for host, device in _pairs(call):
        here, there = call[host.name], call[device.name]
        if not call.replay and not torch.equal(here, there):
            call.refuse(
                f"{host.name} and {device.name} must hold the same values: {here.tolist()} and {there.tolist()}"
            )
        if call.replay and bool((there > here).any()):
            call.refuse(
                f"{device.name} {there.tolist()} exceeds {host.name} {here.tolist()}, kept from the graph's capture"
            )


def _pairs(call: Call) -> Iterator[tuple[Argument, Argument]]:
    by_pair: dict[str, list[Argument]] = {}
    for argument in call.arguments:
        if argument.pair and call.given(argument.name):
            by_pair.setdefault(argument.pair, []).append(argument)
    for members in by_pair.values():
        hosts = [member for member in members if member.place == "host"]
        yield from ((hosts[0], member) for member in members if hosts and member.place == "device")


def check_values(call: Call) -> None:
    """Offsets grow from 0; lengths, slots, ids and positions are in range."""
    for argument, tensor in call.tensors():
        if argument.values and tensor.numel():
            bound = argument.bound.value(call.names()) if argument.bound is not None else None
            problem = _VALUE_RULES[argument.values](tensor, bound)
            if problem:
                limit = f" ({argument.bound} = {bound})" if bound is not None else ""
                call.refuse(f"{argument.name} {problem}{limit}")


def _lod_problem(tensor: Tensor, bound: int | None) -> str:
    if int(tensor[0]) != 0 or bool((tensor[1:] < tensor[:-1]).any()):
        return f"must be offsets that start with 0 and never fall, not {tensor.tolist()}"
    return (
        f"ends at {int(tensor[-1])}, past the rows there are" if bound is not None and int(tensor[-1]) > bound else ""
    )


def _range_problem(tensor: Tensor, low: int, high: int | None) -> str:
    least, most = int(tensor.min()), int(tensor.max())
    if least < low:
        return f"holds {least}; the least value is {low}"
    return f"holds {most}, which is past the end" if high is not None and most >= high else ""


_VALUE_RULES: dict[str, Callable[[Tensor, int | None], str]] = {
    "lod": _lod_problem,
    "lengths": lambda tensor, bound: _range_problem(tensor, 0, None if bound is None else bound + 1),
    "slots": lambda tensor, bound: _range_problem(tensor, -(2**63), bound),
    "ids": lambda tensor, bound: _range_problem(tensor, 0, bound),
    "positions": lambda tensor, bound: _range_problem(tensor, 0, bound),
    # Only the blocks that a request's length reaches are read; the arithmetic checks those.
    "blocks": lambda tensor, bound: "",
}


def check_aliases(call: Call) -> None:
    """Written tensors share memory with no other argument, but for the in-place uses the table allows."""
    tensors = call.tensors()
    for argument, written in tensors:
        if argument.io == "in":
            continue
        if overlap.overlaps_itself(written):
            call.refuse(f"{argument.name} is an expanded view: several of its elements are one")
        for other, tensor in tensors:
            if (
                other is not argument
                and overlap.overlap(written, tensor)
                and not _in_place(argument, written, other, tensor)
            ):
                call.refuse(f"{argument.name} is written and shares memory with {other.name}")


def _in_place(argument: Argument, written: Tensor, other: Argument, tensor: Tensor) -> bool:
    allowed = other.name in argument.may_alias or argument.name in other.may_alias
    return allowed and overlap.same_view(written, tensor)


def check_faults(call: Call) -> None:
    """Refuses what a switched-on fault refuses."""
    for fault in call.op.faults:
        if fault.kind == "refuses" and call.fault(fault.name):
            call.refuse(f"known fault {fault.name}: {fault.symptom}. Work-around: {fault.workaround}")


CHECKS: tuple[Callable[[Call], None], ...] = (
    check_types,
    check_known_values,
    check_form,
    check_dtypes,
    check_contiguity,
    check_shapes,
    check_numbers,
    check_limits,
    check_pairs,
    check_values,
    check_aliases,
    check_faults,
)
