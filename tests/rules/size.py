"""Counts files, functions, classes and arguments against the limits: `python -m tests.rules.size`.

Knows only syntax. A limit that is broken is printed with its place, and the exit status is 1.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("freetoken", "kernels", "native", "bench", "tests")
LIMITS = {
    "file": 400,
    "function": 60,
    "kernel": 120,
    "class": 250,
    "attributes": 12,
    "arguments": 7,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Count:
    """One counted thing: what kind, how many, where."""

    kind: str
    number: int
    where: str


def sources() -> list[Path]:
    """Every Python and C++ file of ours; the link to kernels/ is counted under its own name."""
    out: list[Path] = []
    for folder in FOLDERS:
        out += [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".cpp", ".h"}]
    return sorted(p for p in out if "freetoken/kernels" not in p.as_posix())


def lines_of(node: ast.AST) -> int:
    """Lines from the name to the end, decorators not counted."""
    assert isinstance(node, Function | ast.ClassDef)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def count_arguments(node: Function) -> int:
    """Arguments a caller must think of: `self`, `cls` and keywords with defaults are free."""
    names = [a.arg for a in node.args.posonlyargs + node.args.args]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    required = [default for default in node.args.kw_defaults if default is None]
    return len(names) + len(required)


def count_attributes(node: ast.ClassDef) -> int:
    """Attributes that a class's methods give its objects. Plain records are tables, not state."""
    names = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    return len(names)


def count_tree(tree: ast.AST, name: str) -> Iterator[Count]:
    """Counts of everything inside one Python file."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            where = f"{name}:{node.lineno} {node.name}"
            kind = "kernel" if name.startswith("kernels/") else "function"
            yield Count(kind, lines_of(node), where)
            yield Count("arguments", count_arguments(node), where)
        elif isinstance(node, ast.ClassDef):
            where = f"{name}:{node.lineno} {node.name}"
            yield Count("class", lines_of(node), where)
            yield Count("attributes", count_attributes(node), where)


def count_all() -> list[Count]:
    """Every count of the repository."""
    out: list[Count] = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        out.append(Count("file", len(text.splitlines()), name))
        if path.suffix == ".py":
            out += count_tree(ast.parse(text), name)
    return out


def broken(counts: list[Count]) -> list[Count]:
    """Counts over their limit. A kernel takes what its operation needs, so it may have more."""

    def is_free(count: Count) -> bool:
        return count.kind == "arguments" and count.where.startswith("kernels/")

    return [c for c in counts if c.number > LIMITS[c.kind] and not is_free(c)]


def main() -> int:
    """Print the table and what is over; 1 if anything is."""
    counts = count_all()
    print(f"{'':12}{'count':>7}{'median':>8}{'largest':>9}{'limit':>7}")
    for kind, limit in LIMITS.items():
        numbers = [c.number for c in counts if c.kind == kind] or [0]
        print(f"{kind:12}{len(numbers):7}{statistics.median(numbers):8g}{max(numbers):9}{limit:7}")
    over = broken(counts)
    for c in over:
        print(f"{c.where}: {c.kind}: expected at most {LIMITS[c.kind]}, got {c.number}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
