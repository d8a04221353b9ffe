"""The routes of a sink, and the subjects of its registry, that a new definition breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from databus.cli.gate.gate_findings import FindingKind, GateFinding
from databus.cli.gate.table_effects import TableEffect
from databus.client.sinks.sink_routes import SinkRoutes
from databus.client.sinks.sql.table_structures import structure_change
from databus.common.envelopes.avro_encoding import avro_schema
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.named_envelopes import make_envelope
from databus.common.envelopes.row_change import TypedEnvelope
from databus.common.envelopes.row_types import Product
from databus.common.errors import BadFilter, ConfigError, DatabusError
from databus.common.filters.predicate import compile_predicate, parse_where
from databus.common.filters.stream_filter import matches
from databus.common.schema.source_schema import Column, SourceSchema
from databus.common.sink_config import REGISTERED_FORMATS, KafkaSinkConfig, RouteConfig, SinkConfig


class SinkCheck:
    """One sink's configuration against the effects of a migration.

    Owner: one check.
    Raises: ConfigError for a route that the sink itself refuses.
    """

    def __init__(self, config: SinkConfig, product: Product) -> None:
        self._config = config
        self._product = product
        SinkRoutes(config.database, config.route)  # It refuses what the sink would refuse.
        for route in config.route:
            if route.where:
                try:
                    parse_where(route.where)
                except BadFilter as error:
                    raise ConfigError(f"sink {config.name}: [[sink.route]] {error}") from error

    def findings(self, effect: TableEffect) -> Iterator[GateFinding]:
        """What the effect on one table breaks."""
        config, source = self._config, effect.source
        before, after = effect.before, effect.after
        if before is None or not matches(source, config.sources):
            return
        route = self._route(source)
        if route is None:
            return
        if effect.is_gone:
            yield self._broken(
                source,
                "its rows are deleted there: no source has this name any more",
                "remove its route, or give the new name one",
            )
            return
        if after is None:
            return
        yield from self._columns(route, before, after)
        yield from self._where(route, before, after)
        yield from self._key(before, after)
        if config.transform and _lost(before, after):
            lost = ", ".join(_lost(before, after))
            yield self._note(
                source, f"the transform {config.transform} may read {lost}: look at it"
            )
        if config.sql is not None:
            yield from self._mirror(_chosen(before, route), _chosen(after, route))
        if config.kafka is not None and config.kafka.format in REGISTERED_FORMATS:
            yield from self._subjects(config.kafka, route, _chosen(after, route))

    def _route(self, source: str) -> RouteConfig | None:
        if not self._config.route:
            return RouteConfig(source="*")
        return next((one for one in self._config.route if matches(source, (one.source,))), None)

    def _columns(
        self, route: RouteConfig, before: SourceSchema, after: SourceSchema
    ) -> Iterator[GateFinding]:
        lost = [name for name in _lost(before, after) if name in route.columns]
        if lost:
            yield self._broken(
                after.source,
                f"its route has columns = {list(route.columns)}, and {', '.join(lost)} is gone",
                "change `columns` of the route together with the migration",
            )

    def _where(
        self, route: RouteConfig, before: SourceSchema, after: SourceSchema
    ) -> Iterator[GateFinding]:
        if not route.where:
            return
        predicate = parse_where(route.where)
        there = {column.name for column in after.columns}
        names = there | {column.name for column in before.columns}
        lost = [
            name.text
            for name in predicate.names
            if name.among(there) is None and name.among(names) is not None
        ]
        cure = "change `where` of the route together with the migration"
        if lost:
            yield self._broken(
                after.source,
                f"where = {route.where!r} reads {', '.join(lost)}, which is NULL in every row from "
                "then on",
                cure,
            )
            return
        try:
            compile_predicate(predicate, after.columns, names)
        except BadFilter as error:
            yield self._broken(
                after.source, f"where = {route.where!r} stops the sink: {error.message}", cure
            )

    def _key(self, before: SourceSchema, after: SourceSchema) -> Iterator[GateFinding]:
        if before.key == after.key and before.key_form == after.key_form:
            return
        what = (
            "the table is made again there with the new key"
            if self._config.sql is not None
            else "records of a row have another key, and those with the old one stay"
        )
        keys = [f"({', '.join(one.key)})" for one in (before, after)]
        yield self._broken(
            after.source,
            f"its key was {keys[0]} and is {keys[1]}: {what}",
            "plan for a new copy of the table",
        )

    def _mirror(self, before: SourceSchema, after: SourceSchema) -> Iterator[GateFinding]:
        change = structure_change(before, after)
        if change.dropped:
            yield self._broken(
                after.source,
                f"the mirror drops its column {_names(change.dropped)}",
                "change what reads the mirror first",
            )
        if change.replaced:
            yield self._broken(
                after.source,
                f"the mirror drops the values of {_names(change.replaced)} until the rows come "
                "again",
                "expect the column without values until the table is resynchronised",
            )
        if change.converted:
            yield self._note(after.source, f"the mirror converts {_names(change.converted)}")

    def _subjects(
        self, config: KafkaSinkConfig, route: RouteConfig, after: SourceSchema
    ) -> Iterator[GateFinding]:
        from databus.client.sinks.kafka.registry_client import SchemaRegistry

        envelope = make_envelope(
            config.envelope,
            EnvelopeOptions(
                database=self._config.database,
                prefix=config.prefix or self._config.database,
                product=self._product,
                catalogue=config.catalogue,
                tombstones=config.tombstones,
            ),
        )
        assert isinstance(envelope, TypedEnvelope)  # The configuration has checked that.
        assert config.registry is not None
        registry = SchemaRegistry(config.registry.reveal)
        routes = SinkRoutes(self._config.database, self._config.route, default_target="")
        found = routes.of(after.source)
        try:
            types = envelope.types_of(after)
            topic = (found.target if found is not None else "") or types.topic
            for part, kind in (("key", types.key), ("value", types.value)):
                subject = f"{topic}-{part}"
                schema: Any
                if config.format == "protobuf":
                    from databus.common.envelopes.protobuf_encoding import ProtobufSchema

                    schema = ProtobufSchema(kind, registry.newest(subject)).text
                else:
                    schema = avro_schema(kind)
                if why := registry.conflict(subject, schema):
                    yield GateFinding(
                        FindingKind.REGISTRY,
                        f"subject {subject} of sink {self._config.name}",
                        f"the registry would refuse the new schema: {why}",
                        "change the compatibility of the subject, or make the change in steps that "
                        "it allows",
                    )
        except DatabusError as error:
            yield GateFinding(
                FindingKind.UNKNOWN,
                f"registry of sink {self._config.name}",
                f"{after.source} could not be compared: {error.message}",
                "run the check where the registry can be reached",
            )

    def _broken(self, source: str, why: str, cure: str) -> GateFinding:
        return GateFinding(FindingKind.SINK, f"sink {self._config.name}, {source}", why, cure)

    def _note(self, source: str, why: str) -> GateFinding:
        return GateFinding(FindingKind.NOTE, f"sink {self._config.name}, {source}", why)


def _lost(before: SourceSchema, after: SourceSchema) -> list[str]:
    there = {column.name for column in after.columns}
    return [column.name for column in before.columns if column.name not in there]


def _chosen(schema: SourceSchema, route: RouteConfig) -> SourceSchema:
    if not route.columns:
        return schema
    wanted = {*route.columns, *schema.key}
    return replace(schema, columns=tuple(c for c in schema.columns if c.name in wanted))


def _names(columns: Sequence[Column]) -> str:
    return ", ".join(column.name for column in columns)
