"""Which columns leave the relay, and in which form: the rules of a ``[[database]]``, pure.

``ColumnRules`` turns the schema that a source has read into a ``TablePlan``: the schema that
consumers see, and an action for each column.  column_rewriting.py applies plans to frames.
docs/columns.md documents each rule for users.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from databus.common.config import DatabaseConfig
from databus.common.errors import UnsupportedChange
from databus.common.frame.frame_format import OPS_BY_LETTER
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.contract import Finding

_REPLACING = ("hash_columns", "mask_columns", "null_columns", "truncate_columns")


class Action(IntEnum):
    """What a column's value becomes.  Null stays null with every action."""

    KEEP = 0
    DROP = 1
    HASH = 2
    MASK = 3
    NULL = 4
    TRUNCATE = 5


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """One column's action; ``text`` is the mask, ``length`` the number of retained characters."""

    action: Action = Action.KEEP
    text: str = ""
    length: int = 0


UNCHANGED = ColumnPlan()


@dataclass(frozen=True)
class TablePlan:
    """How rows of ``before`` become rows of ``after``.

    Invariants:
        I1. ``columns`` has a plan for each column of ``before``, in order.
        I2. A column of the key stays unchanged or is hashed, in the key as in the row.
    """

    before: SourceSchema
    after: SourceSchema
    columns: tuple[ColumnPlan, ...]
    salt: bytes

    @property
    def key_is_hashed(self) -> bool:
        """Whether a column of the key is hashed."""
        return any(plan.action is Action.HASH for plan in self.key_plans())

    def key_plans(self) -> list[ColumnPlan]:
        """The plans of the key's columns, in key order."""
        by_name = {c.name: p for c, p in zip(self.before.columns, self.columns, strict=True)}
        return [by_name[name] for name in self.before.key]


class ColumnRules:
    """The rules of one database.

    Invariants:
        I1. A plan depends on the rules and the schema alone: a column that appears in the
            middle of the stream is subject to the same patterns.
        I2. A schema that the rules cannot be applied to gets an error instead of a plan: no row
            of it passes unchanged.

    Owner: the process that reads the source; frozen.
    """

    def __init__(self, config: DatabaseConfig) -> None:
        self._config = config
        self._salt = config.hash_salt.reveal.encode() if config.hash_salt else b""
        self._patterns = config.column_patterns

    @property
    def skipped_ops(self) -> frozenset[int]:
        """The ops of changes that are left out."""
        return frozenset(int(OPS_BY_LETTER[letter]) for letter in self._config.skipped_operations)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to apply."""
        return not self._config.skipped_operations and not any(self._patterns.values())

    @property
    def digest(self) -> str:
        """A digest of the rules that decide whether a table fits; "" if none concerns columns."""
        if not any(self._patterns.values()):
            return ""
        config = self._config
        parts = [self._patterns, config.mask_columns, config.truncate_columns, config.keys]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def names(self, column: str) -> bool:
        """Whether a rule concerns the column, by its whole name."""
        return any(
            rule == "include_columns" or column == pattern or fnmatch.fnmatchcase(column, pattern)
            for rule, patterns in self._patterns.items()
            for pattern in patterns
        )

    def plan(self, schema: SourceSchema) -> TablePlan | None:
        """The plan for a table's schema; None if its rows stay unchanged.

        Raises:
            UnsupportedChange: rules contradict each other, or one cannot be applied.
        """
        if problem := self.problem(schema):
            raise UnsupportedChange(problem, source=schema.source)
        plans = tuple(self._column_plan(schema, column) for column in schema.columns)
        if all(plan is UNCHANGED for plan in plans):
            return None
        columns = tuple(
            _seen(column, plan)
            for column, plan in zip(schema.columns, plans, strict=True)
            if plan.action is not Action.DROP
        )
        return TablePlan(schema, replace(schema, columns=columns), plans, self._salt)

    # -- one column --

    def _hits(self, rule: str, schema: SourceSchema, column: Column) -> list[str]:
        name = f"{schema.source}.{column.name}"
        return [p for p in self._patterns[rule] if p == name or fnmatch.fnmatchcase(name, p)]

    def _is_excluded(self, schema: SourceSchema, column: Column) -> bool:
        if self._hits("exclude_columns", schema, column):
            return True
        named = any(
            fnmatch.fnmatchcase(schema.source, pattern.rpartition(".")[0])
            for pattern in self._patterns["include_columns"]
        )
        # A table's rows are identified by the key, so a list of columns need not repeat it.
        if not named or column.name in schema.key:
            return False
        return not self._hits("include_columns", schema, column)

    def _column_plan(self, schema: SourceSchema, column: Column) -> ColumnPlan:
        if self._is_excluded(schema, column):
            return ColumnPlan(Action.DROP)
        config = self._config
        if self._hits("hash_columns", schema, column):
            return ColumnPlan(Action.HASH)
        if self._hits("null_columns", schema, column):
            return ColumnPlan(Action.NULL)
        for pattern in self._hits("mask_columns", schema, column):
            mask = config.mask_columns[pattern]
            return ColumnPlan(Action.MASK, mask if isinstance(mask, str) else "*" * mask)
        for pattern in self._hits("truncate_columns", schema, column):
            return ColumnPlan(Action.TRUNCATE, length=config.truncate_columns[pattern])
        return UNCHANGED

    # -- problems --

    def problem(self, schema: SourceSchema) -> str:
        """Why the rules do not fit a table, and how to fix that; "" if they do."""
        return "; ".join(str(found) for found in self.table_findings(schema) if found.fatal)

    def table_findings(self, schema: SourceSchema) -> list[Finding]:
        """What prevents applying the rules to a table, column by column."""
        found = []
        for column in schema.columns:
            found += self._column_findings(schema, column)
        return found

    def _column_findings(self, schema: SourceSchema, column: Column) -> list[Finding]:
        name = f"{schema.source}.{column.name}"
        hits = {
            rule: patterns
            for rule in ("exclude_columns", *_REPLACING)
            if (patterns := self._hits(rule, schema, column))
        }
        named = " and ".join(f"{rule} {patterns[0]!r}" for rule, patterns in hits.items())
        replacing = [rule for rule in _REPLACING if rule in hits]
        in_key = column.name in schema.key
        if in_key and set(hits) - {"hash_columns"}:
            return [
                Finding(
                    f"rule for {name}",
                    f"the column belongs to the table's key {schema.key}, which can only be "
                    f"hashed, but {named} names it",
                    "narrow the pattern, use hash_columns, or leave the table out by "
                    "exclude_sources",
                    table=schema.source,
                )
            ]
        if "exclude_columns" in hits:
            if not replacing:
                return []
            return [
                Finding(
                    f"rules for {name}",
                    f"{named} name it: it is excluded",
                    "narrow one of the patterns",
                    fatal=False,
                )
            ]
        doubled = any(len(self._values_of(rule, hits[rule])) > 1 for rule in replacing)
        if len(replacing) > 1 or doubled:
            named = named if len(replacing) > 1 else f"{replacing[0]} {hits[replacing[0]]}"
            return [
                Finding(
                    f"rules for {name}",
                    f"{named} contradict each other",
                    "narrow the patterns so that one is left",
                    table=schema.source,
                )
            ]
        if replacing == ["truncate_columns"] and column.kind is not Kind.STRING:
            return [
                Finding(
                    f"rule for {name}",
                    f"{named} names it, but it is no text: {column.type_name or column.kind}",
                    "use mask_columns, hash_columns or null_columns, or narrow the pattern",
                    table=schema.source,
                )
            ]
        return []

    def _values_of(self, rule: str, patterns: list[str]) -> set[str | int]:
        """The values that the patterns of one rule give; two masks of one column contradict."""
        by_rule: dict[str, dict[str, Any]] = {
            "mask_columns": self._config.mask_columns,
            "truncate_columns": self._config.truncate_columns,
        }
        return {by_rule[rule][p] for p in patterns} if rule in by_rule else {rule}

    def findings(self, schemas: Iterable[SourceSchema]) -> list[Finding]:
        """What is wrong with the rules for the existing tables; also patterns without a column."""
        known = list(schemas)
        found = [finding for schema in known for finding in self.table_findings(schema)]
        names = [f"{schema.source}.{column.name}" for schema in known for column in schema.columns]
        for rule, patterns in self._patterns.items():
            for pattern in patterns:
                if not any(n == pattern or fnmatch.fnmatchcase(n, pattern) for n in names):
                    found.append(
                        Finding(
                            rule,
                            f"{pattern!r} matches no column of the {len(known)} captured tables",
                            "correct it (SCHEMA.TABLE.COLUMN, globs allowed), unless the column "
                            "will be added later",
                            fatal=False,
                        )
                    )
        return found


def _seen(column: Column, plan: ColumnPlan) -> Column:
    """The column as consumers see it."""
    if plan.action is Action.NULL:
        return replace(column, nullable=True)
    if plan.action is Action.HASH:
        return Column(column.name, Kind.STRING, column.nullable, type_name="hmac-sha256")
    if plan.action is Action.MASK:
        return Column(column.name, Kind.STRING, column.nullable, type_name="masked")
    return column


def effective_columns(rules: ColumnRules, schema: SourceSchema) -> str:
    """A line for the operator: the columns of a table as consumers see them."""
    plan = rules.plan(schema)
    if plan is None:
        return ", ".join(column.name for column in schema.columns)
    texts = {
        Action.KEEP: "",
        Action.DROP: " (excluded)",
        Action.HASH: " (hashed)",
        Action.MASK: " (masked)",
        Action.NULL: " (null)",
    }
    return ", ".join(
        column.name + texts.get(one.action, f" (first {one.length} characters)")
        for column, one in zip(schema.columns, plan.columns, strict=True)
    )
