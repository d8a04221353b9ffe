"""``where`` of a route: the target has exactly the rows of which a predicate is true.

An update that brings a row in is an insert there, and one that takes it out is a delete.
"""

from __future__ import annotations

from databus.client.sinks.sink_batch import SinkRow
from databus.common.errors import BadFilter, ConfigError, RowRefused, SinkRefused
from databus.common.extras import imports_of_extra
from databus.common.filters.row_rule import RowRule, names_of, row_rule
from databus.common.frame.frame_format import FrameView, trusted_frame
from databus.common.schema.source_schema import SchemaSet


class RouteFilter:
    """Applies one predicate to the rows of the sources of a route.

    Owner: one sink.
    Raises: ConfigError for a text that is no predicate; MissingDependency without sqlglot.
    """

    def __init__(self, text: str) -> None:
        with imports_of_extra("sink", package="sqlglot", needed_by="`where` of a route"):
            from databus.common.filters.predicate import parse_where
        try:
            self._predicate = parse_where(text)
        except BadFilter as error:
            raise ConfigError(f"[[sink.route]] {error}") from error
        self._rules: dict[int, RowRule] = {}
        self._revision = -1

    def row(self, row: SinkRow) -> SinkRow | None:
        """The row as the target needs it; None if it has no part in it.

        Raises:
            RowRefused: the predicate cannot be decided, or the row is not whole.
        """
        if row.op == "t":
            return row
        rule = self._rule_of(row)
        frame = trusted_frame(row.event.frame, 0)
        was_in = rule.was_in(frame) if row.op in ("u", "d") else None
        if row.op == "d":
            return None if was_in is False else row
        is_in = rule.is_in(frame)
        if is_in is None:
            raise self._undecided(row, "the predicate")
        if not is_in:
            return self._left(row, was_in)
        if was_in is not True and frame.absent_len:
            self._fill(row, frame, rule)
        if was_in is False:
            row.op = "c"
        return row

    def _left(self, row: SinkRow, was_in: bool | None) -> SinkRow | None:
        """The delete of a row that is not in; None if the target cannot have it."""
        # In a bootstrap an insert stands for all changes of its row since the last state.
        if row.event.window.mode == "online" and (row.op == "c" or was_in is False):
            return None
        row.op, row.value = "d", None
        return row

    def _fill(self, row: SinkRow, frame: FrameView, rule: RowRule) -> None:
        """The target may not have the row: it needs the columns that did not change, too."""
        before, value = row.before, row.value
        if frame.before is None or before is None or value is None:
            raise self._undecided(row, f"column {', '.join(sorted(row.event.absent))} of the row")
        row.value = {
            one.name: value.get(one.name, before.get(one.name))
            for one in rule.schema.columns
            if one.name in value or one.name in before
        }

    def _undecided(self, row: SinkRow, what: str) -> RowRefused:
        return RowRefused(
            f"where = {self._predicate.text!r}: {what} is not known for {row!r}, because the "
            f"source sends only the changed columns of it. Have it send whole rows (PostgreSQL: "
            f"ALTER TABLE {row.source} REPLICA IDENTITY FULL; MySQL: binlog_row_image=FULL), "
            "and start the sink again from a bootstrap, or remove `where` from the route"
        )

    def _rule_of(self, row: SinkRow) -> RowRule:
        schemas = row.event.window.decoding.schemas
        if self._revision != schemas.revision:
            self._rules.clear()
            self._revision = schemas.revision
        schema = row.event.schema
        rule = self._rules.get(schema.fingerprint)
        if rule is None:
            rule = row_rule(self._predicate, schema, _names(schemas, row.source))
            if rule.test is None:
                raise self._does_not_fit(row)
            self._rules[schema.fingerprint] = rule
        return rule

    def _does_not_fit(self, row: SinkRow) -> SinkRefused:
        columns = ", ".join(f"{one.name} {one.kind.value}" for one in row.event.schema.columns)
        return SinkRefused(
            f"where = {self._predicate.text!r} does not fit {row.source}: a column is missing, or "
            f"two values do not compare. Its columns are {columns}. Give this table a route of its "
            "own"
        )


def _names(schemas: SchemaSet, source: str) -> set[str]:
    return names_of(schema for schema in schemas if schema.source == source)
