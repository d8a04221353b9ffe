"""The import graph of the rooms, folder by folder: what each imports, and cycles.

``make graph`` prints it and fails on a cycle.  An import counts if it happens when the module is
loaded; what a function or ``TYPE_CHECKING`` imports does not.  A folder's ``__init__`` is its face
and not one of its modules: it names what the folder offers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("common", "client", "bootstrap", "relay", "cli")


def modules(root: Path) -> dict[str, Path]:
    """Every module of the rooms by its dotted name, a folder by its own."""
    found = {}
    for room in ROOMS:
        for path in sorted((root / room / "databus" / room).rglob("*.py")):
            parts = path.relative_to(root / room).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def loaded(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that are carried out when these statements are."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            is_for_types = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from loaded(node.orelse if is_for_types else node.body + node.orelse)
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from loaded(node.body + handlers + node.orelse + node.finalbody)


def imports(root: Path) -> dict[str, set[str]]:
    """The modules of ours that each module imports."""
    paths = modules(root)
    graph = {}
    for name, path in paths.items():
        found: set[str] = set()
        for node in loaded(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= members & paths.keys() or {node.module}
        graph[name] = (found & paths.keys()) - {name}
    return graph


def folders(root: Path) -> dict[str, set[str]]:
    """The folders that each folder's modules import."""
    paths = modules(root)

    def folder(name: str) -> str:
        return name if paths[name].name == "__init__.py" else name.rpartition(".")[0]

    graph: dict[str, set[str]] = {}
    for name, found in imports(root).items():
        own = graph.setdefault(folder(name), set())
        if paths[name].name != "__init__.py":
            own |= {folder(other) for other in found} - {folder(name)}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups that reach each other."""
    reached = {}
    for start in graph:
        seen: set[str] = set()
        pending = [start]
        while pending:
            for other in graph.get(pending.pop(), set()) - seen:
                seen.add(other)
                pending.append(other)
        reached[start] = seen
    groups = {
        tuple(sorted(other for other in reached[one] if one in reached[other]))
        for one in graph
        if one in reached[one]
    }
    return sorted(map(list, groups))


def main() -> int:
    graph = folders(ROOT)
    counts = dict.fromkeys(graph, 0)
    for name, path in modules(ROOT).items():
        if path.name != "__init__.py":
            counts[name.rpartition(".")[0]] += 1
    for name, found in sorted(graph.items()):
        shown = ", ".join(sorted(other.removeprefix("databus.") for other in found))
        print(f"{name.removeprefix('databus.')} ({counts[name]}) <- {shown or '-'}")
    found_cycles = cycles(imports(ROOT)) + cycles(graph)
    for group in found_cycles:
        print(f"cycle: {' '.join(group)}", file=sys.stderr)
    return 1 if found_cycles else 0


if __name__ == "__main__":
    sys.exit(main())
