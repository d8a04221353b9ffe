"""The gate: the statements of a migration, one after the other, against all that reads the tables.

Nothing here does I/O, but for the registries of sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from databus.cli.gate.gate_findings import (
    FindingKind,
    GateFinding,
    StatementReport,
    TableReport,
)
from databus.cli.gate.migration_files import MigrationStatement
from databus.cli.gate.mysql_migration import MysqlMigration
from databus.cli.gate.postgres_migration import PostgresMigration
from databus.cli.gate.reader_resolution import unreadable
from databus.cli.gate.sink_effects import SinkCheck
from databus.cli.gate.table_effects import CaptureRules, MigrationReader, Reaction, TableEffect
from databus.common.envelopes.row_types import Product
from databus.common.errors import BadRequest
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Column, SourceSchema
from databus.relay.columns.column_rules import ColumnRules
from databus.relay.ring.returning_columns import ReturningColumns, returned_words
from databus.relay.sources.mysql.statements.lexer import NotUnderstood

ModelCheck = Callable[[TableEffect], Iterable[GateFinding]]


@dataclass(frozen=True)
class GateSubject:
    """What a migration is checked against.

    ``versions`` are all versions of the sources, the present one of each last.  ``default_schema``
    is that of names without one.  ``captures``: whether the relay captures a table of a name.
    """

    product: Product
    versions: Sequence[SourceSchema]
    default_schema: str = ""
    rules: CaptureRules = field(default_factory=CaptureRules)
    captures: Callable[[str], bool] = lambda _: True
    column_rules: ColumnRules | None = None
    sinks: Sequence[SinkCheck] = ()
    models: Sequence[ModelCheck] = field(default_factory=tuple)


class SchemaGate:
    """Checks the statements of migrations in order; each one sees the definitions after the last.

    Owner: one check.
    Raises: BadRequest if the kind of database has no reader.
    """

    def __init__(self, subject: GateSubject) -> None:
        self._subject = subject
        self._schemas: dict[str, SourceSchema] = {}
        self._returning = ReturningColumns()
        # Tables of which an earlier statement left no certain definition.
        self._lost: set[str] = set()
        for version in subject.versions:
            self._schemas[version.source] = version
            self._returning.follow(version)
        self._reader = self._made_reader()

    def _made_reader(self) -> MigrationReader:
        subject = self._subject
        schemas = {split_source(source)[0] for source in self._schemas}
        if subject.product in ("mariadb", "mysql"):
            default = subject.default_schema or (schemas.pop() if len(schemas) == 1 else "")
            is_mysql = subject.product == "mysql"
            return MysqlMigration(default, subject.rules, subject.captures, is_mysql=is_mysql)
        if subject.product == "postgresql":
            default = subject.default_schema or "public"
            return PostgresMigration(default, subject.rules, subject.captures)
        raise BadRequest(
            f"migrations of {subject.product} cannot be checked: only those of MariaDB, MySQL and "
            "PostgreSQL"
        )

    def check(self, statement: MigrationStatement) -> StatementReport:
        """The report of a statement; the next one is checked against the definitions after it."""
        try:
            effects = self._reader.effects(statement, self._schemas)
        except NotUnderstood as error:
            found = GateFinding(
                FindingKind.UNKNOWN,
                "every captured table",
                f"the statement is not understood: {error}",
                "look at it by hand, and pass --allow unknown if it breaks nothing",
            )
            return StatementReport(statement, (), (found,))
        return StatementReport(statement, [self._table(self._seen(one)) for one in effects])

    def _seen(self, effect: TableEffect) -> TableEffect:
        """The effect as consumers see it: without the columns that rules leave out."""
        rules, after = self._subject.column_rules, effect.after
        if rules is not None and after is not None:
            if problem := rules.problem(after):
                return replace(effect, reaction=Reaction.SUSPENDED, why=problem, after=None)
            plan = rules.plan(after)
            old = {column.name: column for column in effect.before.columns} if effect.before else {}
            ruled = {column.name: column for column in (plan.after if plan else after).columns}
            columns = []
            for column in after.columns:
                # An unchanged column is as the relay has announced it: the rules did apply to it.
                if old.get(column.name) == column:
                    columns.append(column)
                elif column.name in ruled:
                    columns.append(ruled[column.name])
            effect = replace(effect, after=replace(after, columns=tuple(columns)))
            after = effect.after
        if after is None or effect.before is None or effect.reaction is not Reaction.FOLLOWED:
            return effect
        if again := self._returning.returning(after):
            return replace(effect, reaction=Reaction.SUSPENDED, why=returned_words(again))
        return effect

    def _table(self, effect: TableEffect) -> TableReport:
        before, after = effect.before, effect.after
        findings = [*_of_reaction(effect)]
        if effect.source in self._lost:
            findings.append(
                GateFinding(
                    FindingKind.UNKNOWN,
                    effect.source,
                    "an earlier statement left its definition uncertain",
                    "check this statement after the earlier one was applied",
                )
            )
        self._advance(effect)
        forward: list[str] = []
        backward: list[str] = []
        changes: list[str] = []
        if before is not None and after is not None:
            changes = list(_changes(before, after, effect.renamed))
            forward, backward = unreadable(after, before), unreadable(before, after)
            findings += _of_columns(before, after, effect.renamed)
            if forward:
                findings.append(
                    GateFinding(
                        FindingKind.RESOLUTION,
                        effect.source,
                        f"readers of the version of today cannot read new rows: "
                        f"{'; '.join(forward)}",
                        "deploy readers of the new version before the migration",
                    )
                )
        elif after is not None:
            changes = [f"{len(after.columns)} columns, key ({', '.join(after.key)})"]
        for sink in self._subject.sinks:
            findings += sink.findings(effect)
        for model in self._subject.models:
            findings += model(effect)
        findings += (
            GateFinding(FindingKind.UNKNOWN, effect.source, one, "compare the schema afterwards")
            for one in effect.guesses
        )
        return TableReport(effect, changes, forward, backward, findings)

    def _advance(self, effect: TableEffect) -> None:
        if effect.after is not None:
            self._schemas[effect.source] = effect.after
            self._returning.follow(effect.after)
        elif effect.is_gone:
            self._schemas.pop(effect.source, None)
        else:
            self._lost.add(effect.source)


def _of_reaction(effect: TableEffect) -> Iterator[GateFinding]:
    if effect.reaction is Reaction.SUSPENDED:
        yield GateFinding(
            FindingKind.SUSPENDED,
            effect.source,
            f"the relay suspends the table: {effect.why}",
            "expect its rows again as a dump; --allow suspended if that is intended",
        )
    elif effect.reaction is Reaction.EMPTIED:
        yield GateFinding(
            FindingKind.EMPTIED,
            effect.source,
            f"consumers get a truncate: {effect.why}",
            "--allow emptied if that is intended",
        )
    elif effect.reaction is Reaction.UNCERTAIN:
        yield GateFinding(
            FindingKind.UNKNOWN,
            effect.source,
            effect.why,
            "look at it by hand, and pass --allow unknown if it breaks nothing",
        )


def _of_columns(
    before: SourceSchema, after: SourceSchema, renamed: Mapping[str, str]
) -> Iterator[GateFinding]:
    new = {column.name: column for column in after.columns}
    for column in before.columns:
        now = new.get(column.name)
        if now is None:
            name = renamed.get(column.name)
            what = f"is {name} from now on" if name in new else "is gone"
        elif now.kind is not column.kind:
            what = f"was {column.kind} and is {now.kind}"
        else:
            continue
        yield GateFinding(
            FindingKind.COLUMNS,
            f"{before.source}.{column.name}",
            f"the column {what}: consumers that read it fail or see no value",
            "deploy consumers that do without it before the migration",
        )


def _changes(
    before: SourceSchema, after: SourceSchema, renamed: Mapping[str, str]
) -> Iterator[str]:
    old = {column.name: column for column in before.columns}
    names = {new: was for was, new in renamed.items()}
    for column in after.columns:
        was = old.get(names.get(column.name, column.name))
        if was is None:
            yield f"adds {column.name} {_words(column)}"
            continue
        if was.name != column.name:
            yield f"renames {was.name} to {column.name}"
        if _words(was) != _words(column):
            yield f"changes {column.name} from {_words(was)} to {_words(column)}"
    for name in old.keys() - {column.name for column in after.columns} - renamed.keys():
        yield f"drops {name}"
    if before.key != after.key:
        yield f"changes the key from ({', '.join(before.key)}) to ({', '.join(after.key)})"


def _words(column: Column) -> str:
    return f"{column.type_name or column.kind}{'' if column.nullable else ' not null'}"
