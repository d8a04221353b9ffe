"""The traps that other code bases of this field fell into, and the tests that prevent each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ROOMS = ("relay", "bootstrap", "client", "common", "cli")

TRAPS = {
    "the class that is the system": [
        "test_layout.py::test_no_file_of_a_room_is_longer_than_600_lines_and_no_test_longer_than_800"
    ],
    "sixteen positional arguments": [
        "test_traps.py::test_no_function_takes_more_than_eight_positional_arguments"
    ],
    "a map as a record, sentinels as states": [
        "common/test_checkpoint.py::test_any_text_is_a_checkpoint_or_bad_checkpoint",
        "common/test_checkpoint.py::test_a_damaged_field_is_named_with_its_value",
    ],
    "errors sent as class names": [
        "test_layout.py::test_every_error_has_a_code_of_its_own_and_a_hint_for_the_operator"
    ],
    "corruption seen and delivered": [
        "common/frame/test_frame_format.py::test_any_flipped_bit_is_found",
        "common/frame/test_frame_format.py::test_the_splitter_hands_out_nothing_after_damage",
        "relay/sources/mysql/binlog/test_binlog_decoder.py::"
        "test_an_event_whose_length_or_checksum_is_wrong_is_refused_with_its_position",
    ],
    "two units under one name": ["test_traps.py::test_a_number_says_its_unit"],
    "hands in another's pockets": [
        "test_traps.py::test_private_names_are_used_where_they_are_made"
    ],
    "global caches that no change of a table drops": [
        "integration/test_mariadb_source.py::"
        "test_a_backlog_over_several_definitions_is_read_with_the_definition_of_its_time",
        "integration/test_postgres_schemas.py::"
        "test_ddl_inside_a_transaction_splits_its_rows_by_schema",
    ],
    "tests by sleep": ["test_traps.py::test_no_test_sleeps_longer_than_a_moment"],
    "configuration that leaks passwords": [
        "common/test_config.py::test_a_password_never_prints_but_reaches_the_driver"
    ],
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_a_test_that_is_there(trap: str) -> None:
    for test in TRAPS[trap]:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(), test


@cache
def room_trees() -> tuple[tuple[Path, ast.Module], ...]:
    """The modules of all rooms."""
    paths = [path for room in ROOMS for path in (ROOT / room / "databus" / room).rglob("*.py")]
    return tuple((path.relative_to(ROOT), ast.parse(path.read_text())) for path in sorted(paths))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_function_takes_more_than_eight_positional_arguments() -> None:
    """Kernels are left aside, which get arrays one by one, and commands: theirs are options."""
    found = []
    for path, tree in room_trees():
        for function in functions(tree):
            count = len(function.args.posonlyargs) + len(function.args.args)
            if count <= 8 or path.parts[:1] == ("cli",):
                continue
            if "jit" not in " ".join(ast.unparse(mark) for mark in function.decorator_list):
                found.append(f"{path}: {function.name} takes {count}")
    assert found == []


def test_a_number_says_its_unit() -> None:
    bare = {"timeout", "delay", "interval", "period", "ttl", "age", "duration", "ts", "elapsed"}
    found = []
    for path, tree in room_trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.arg | ast.AnnAssign) or node.annotation is None:
                continue
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if name.removeprefix("self.") not in bare:
                continue
            if {"int", "float"} & set(ast.unparse(node.annotation).split(" ")):
                found.append(f"{path}:{node.lineno}: {name}")
    assert found == [], "say _s, _ms or _us"


def test_private_names_are_used_where_they_are_made() -> None:
    """Only the adapter to PyMySQL reaches into another's object; see its first lines.

    The codes of errors in confluent-kafka are public, and begin with an underscore.
    """
    adapter = Path("relay/databus/relay/sources/mysql/protocol/mysql_connection.py")
    allowed = {"_replace", "_asdict", "_make", "_fields", "_exit", "_FATAL", "_PARTITION_EOF"}
    found = []
    for path, tree in room_trees():
        made = {function.name for function in functions(tree)}
        used = []
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            is_private = node.attr.startswith("_") and not node.attr.endswith("__")
            if isinstance(node.value, ast.Name):
                owner = node.value.id
            elif is_private:
                owner = ast.unparse(node.value)
            else:
                continue
            if owner in ("self", "cls", "super()"):
                made.add(node.attr)
            elif is_private:
                used.append((node.attr, f"{path}:{node.lineno}: {owner}.{node.attr}"))
        if path != adapter:
            found += [text for name, text in used if name not in made | allowed]
    assert found == []


def test_no_test_sleeps_longer_than_a_moment() -> None:
    """A poll's pause is short; ``tests.support.waiting`` has the deadline around it."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "sleep(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".sleep"):
                (pause_s,) = node.args
                if isinstance(pause_s, ast.Constant) and float(str(pause_s.value)) > 0.05:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
