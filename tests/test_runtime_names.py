"""Names that are imported for the type checker alone are not used when the code runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("relay", "bootstrap", "client", "common", "cli")


def _imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that import statements among some nodes bind."""
    return {
        (one.asname or one.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
    }


def _for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def _used(node: ast.AST, names: set[str]) -> Iterator[tuple[str, int]]:
    """Where ``names`` are used outside annotations, which are never evaluated."""
    left_out: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names = names - _imported(ast.walk(node))
        left_out = [node.returns]
    elif isinstance(node, ast.arg | ast.AnnAssign):
        left_out = [node.annotation]
    elif isinstance(node, ast.Name) and node.id in names:
        yield node.id, node.lineno
    for child in ast.iter_child_nodes(node):
        if child not in left_out and not _for_types(child):
            yield from _used(child, names)


def used_for_types_alone(text: str) -> list[tuple[str, int]]:
    """(name, line) of each use that would be a NameError."""
    tree = ast.parse(text)
    blocks = [node for node in ast.walk(tree) if _for_types(node)]
    names = _imported(one for block in blocks for one in ast.walk(block))
    return list(_used(tree, names)) if names else []


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_of_the_type_checker_is_used_at_run_time(room: str) -> None:
    found = {
        str(path.relative_to(ROOT)): used
        for path in sorted((ROOT / room).rglob("*.py"))
        if (used := used_for_types_alone(path.read_text()))
    }
    assert found == {}


def test_a_use_is_found_and_an_annotation_is_none() -> None:
    text = (
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from a import B, C\n"
        "def f(b: B) -> B:\n"
        "    c: C = b\n"
        "    return B()\n"
        "def g() -> None:\n"
        "    from a import B\n"
        "    B()\n"
    )
    assert used_for_types_alone(text) == [("B", 7)]
