"""Finds, in one module's source, the places that change vLLM, torch or the interpreter instead of using a hook."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FOREIGN = {"vllm", "torch", "transformers", "builtins"}

# Settings that torch offers for writing.
SETTINGS = ("torch.backends.",)


def violations(source: str) -> list[str]:
    """Describe each place as ``line N: what``."""
    tree = ast.parse(source)
    names = dict(foreign_names(tree))
    found = [
        *(finding for node in ast.walk(tree) for finding in assignments(node, names)),
        *(finding for node in ast.walk(tree) for finding in calls(node, names)),
        *(finding for node in ast.walk(tree) for finding in imports(node)),
    ]
    return sorted(found)


def foreign_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each local name that stands for something foreign, with its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if root in FOREIGN:
                    yield (alias.asname, alias.name) if alias.asname else (root, root)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in FOREIGN:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """The dotted foreign name that an expression stands for, or None when it is not foreign."""
    if isinstance(node, ast.Attribute):
        base = full_name(node.value, names)
        return f"{base}.{node.attr}" if base else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def assignments(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """Attributes of foreign modules and classes, and entries of `sys.modules`, that are written."""
    for target in targets(node):
        name = full_name(target, names) if isinstance(target, ast.Attribute) else None
        if name and not name.startswith(SETTINGS):
            yield f"line {target.lineno}: writes {name}"
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "sys.modules":
            yield f"line {target.lineno}: writes sys.modules"


def calls(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """`setattr` and `delattr` on something foreign."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        name = full_name(node.args[0], names)
        if name:
            yield f"line {node.lineno}: {node.func.id} on {name}"


def imports(node: ast.AST) -> Iterator[str]:
    """Tools for patching."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module:
        modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if any(module.startswith("unittest.mock") for module in modules):
        yield f"line {node.lineno}: imports unittest.mock"  # type: ignore[attr-defined]
