"""The sink that a configuration describes."""

from __future__ import annotations

from databus.client.sinks.sink import Sink
from databus.common.errors import ConfigError
from databus.common.sink_config import FilesSinkConfig, SinkConfig, SqlSinkConfig


def sink_of(config: SinkConfig) -> Sink:
    """The sink of the section of a kind that the configuration has.

    Raises:
        ConfigError: its URL is of no kind that is known.
        MissingDependency: the driver is not installed.
    """
    if config.sql is not None:
        return _sql_mirror(config.sql)
    if config.kafka is not None:
        from databus.client.sinks.kafka.kafka_sink import KafkaSink

        return KafkaSink(config.kafka)
    if config.redis is not None:
        from databus.client.sinks.redis.redis_sink import RedisSink

        return RedisSink(config.redis)
    if config.nats is not None:
        from databus.client.sinks.nats.nats_sink import NatsSink

        return NatsSink(config.nats)
    if config.search is not None:
        from databus.client.sinks.search.search_sink import SearchSink

        return SearchSink(config.search)
    if config.files is not None:
        return _files(config, config.files)
    if config.webhook is not None:
        from databus.client.sinks.webhook_sink import WebhookSink

        return WebhookSink(config.webhook)
    raise ConfigError(f"the sink {config.name} has no section of a kind")


def _sql_mirror(config: SqlSinkConfig) -> Sink:
    from databus.client.sinks.sql.sql_mirror import SqlMirror
    from databus.client.sinks.sql.sql_target import SqlTarget

    url = config.url.reveal
    scheme, _, rest = url.partition("://")
    target: SqlTarget
    if scheme == "sqlite":
        from databus.client.sinks.sql.sqlite_target import SqliteTarget

        target = SqliteTarget(rest.removeprefix("/"))
    elif scheme == "duckdb":
        from databus.client.sinks.sql.duckdb_target import DuckdbTarget

        target = DuckdbTarget(rest.removeprefix("/"))
    elif scheme in ("postgresql", "postgres"):
        from databus.client.sinks.sql.postgres_target import PostgresTarget

        target = PostgresTarget(url)
    elif scheme in ("mysql", "mariadb"):
        from databus.client.sinks.sql.mysql_target import MysqlTarget

        target = MysqlTarget(url)
    else:
        raise ConfigError(
            f"[sink.sql] url: the scheme {scheme!r} is none of sqlite, duckdb, postgresql, mysql, "
            "mariadb"
        )
    return SqlMirror(target, adopts_tables=config.existing == "adopt")


def _files(config: SinkConfig, section: FilesSinkConfig) -> Sink:
    from databus.client.sinks.files import file_formats
    from databus.client.sinks.files.file_sink import FileFormat, FileSink
    from databus.client.sinks.files.file_store import FileStore

    form: FileFormat
    if section.format == "ndjson":
        form = file_formats.NdjsonFormat(config.database)
    elif section.format == "avro":
        form = file_formats.AvroFormat()
    else:
        form = file_formats.ParquetFormat()
    store = FileStore(section.url.reveal)
    return FileSink(store, form, resolved_every_s=section.resolved_every)
