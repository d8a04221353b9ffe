"""``[sink]``: the sections of the configuration that ``databus sink`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field

from databus.common.config_values import Bytes, HiddenText, RelayUrl, Seconds, Section
from databus.common.private import HiddenUrl


class RouteConfig(Section):
    """``[[sink.route]]``: where the rows of some sources go.

    The first route that names a source is used. With routes, a source that none of them names is
    left out.
    """

    source: str
    """Sources: a glob over `schema.table`.
    Example: source = "shop.order*" """

    target: str = ""
    """Where they go: a name with `{database}`, `{source}`, `{schema}` and `{table}` in it. Empty
    for the default of the kind of sink.
    Example: target = "mirror_{table}" """

    columns: tuple[str, ...] = ()
    """Columns that go there, besides those of the key. Empty for all.
    Example: columns = ["state", "amount"] """

    where: str = ""
    """Rows that go there: a predicate over the columns of the source, as `where=` of a relay has
    it. An update that brings a row in comes as an insert, one that takes it out as a delete. Empty
    for all rows.
    Example: where = "state = 'paid' AND amount > 100" """


class SqlSinkConfig(Section):
    """``[sink.sql]``: tables of a database as a mirror of the sources."""

    url: HiddenText
    """The database. The scheme selects its kind: `sqlite`, `duckdb`, `postgresql`, `mysql` or
    `mariadb`. `env:NAME` reads the URL from an environment variable.
    Example: url = "sqlite:////var/lib/shop/mirror.db" """

    existing: Literal["refuse", "adopt"] = "refuse"
    """What to do if a table of the target is there already and this sink has not made it: `refuse`
    stops the sink, `adopt` uses the table. Rows that it has are then replaced by key, and rows that
    the source does not have remain.
    Example: existing = "adopt" """


EnvelopeName = Literal["databus", "debezium", "cloudevents", "maxwell", "flat"]
TYPED_ENVELOPES = ("debezium", "flat")
"""Those whose values have a schema, and therefore a form in Avro and Protobuf."""
REGISTERED_FORMATS = ("avro", "protobuf")
"""Formats whose schemas are in a registry."""


class KafkaSinkConfig(Section):
    """``[sink.kafka]``: records of a Kafka broker, exactly once for readers of committed records.

    A route's `target` is a topic; without a route, a topic for each source,
    `PREFIX.SCHEMA.TABLE`.
    """

    servers: str
    """Brokers to connect to, as `HOST:PORT`, comma separated.
    Example: servers = "kafka-a:9092,kafka-b:9092" """

    envelope: EnvelopeName = "databus"
    """Form of the records.
    Example: envelope = "debezium" """

    format: Literal["json", "json-schemas", "avro", "protobuf"] = "json"
    """Encoding of key and value. `json-schemas` puts the schema beside each payload, as Kafka
    Connect's JSON converter does. `avro` and `protobuf` are Confluent's wire formats; they need
    `registry`, and the envelope `debezium` or `flat`.
    Example: format = "json-schemas" """

    registry: HiddenText | None = None
    """Base URL of the schema registry (Confluent's REST interface), with user and password if it
    wants them. `env:NAME` reads it from an environment variable.
    Example: registry = "http://registry:8081" """

    prefix: str = ""
    """What the names of topics begin with, Debezium's `topic.prefix`. Empty for the name of the
    database.
    Example: prefix = "cdc" """

    catalogue: str = ""
    """Name of PostgreSQL's database in the source block of Debezium's records, if it is not that of
    the stream.
    Example: catalogue = "prod" """

    tombstones: bool = True
    """Whether a record without a value follows each delete, where the envelope has it.
    Example: tombstones = false """

    partitions: int = Field(default=1, ge=1)
    """Partitions of a topic that the sink creates.
    Example: partitions = 12 """

    replicas: int = Field(default=-1, ge=-1)
    """Replicas of a topic that the sink creates; -1 for the default of the brokers.
    Example: replicas = 3 """

    checkpoint_topic: str = "databus_checkpoints"
    """Compacted topic of the checkpoints, one partition; the key is the name of the sink.
    Example: checkpoint_topic = "cdc_checkpoints" """

    options: dict[str, HiddenText] = Field(default_factory=dict)
    """Settings of librdkafka, by name. `env:NAME` reads a value from an environment variable.
    Example: options = { "compression.type" = "lz4", "sasl.password" = "env:KAFKA_PASSWORD" } """

    @pydantic.model_validator(mode="after")
    def _registered_formats_have_a_registry_and_types(self) -> KafkaSinkConfig:
        if self.format in REGISTERED_FORMATS:
            if not self.registry:
                raise ValueError(f'format = "{self.format}" needs the URL of a `registry`')
            if self.envelope not in TYPED_ENVELOPES:
                raise ValueError(
                    f'format = "{self.format}" needs an envelope with types: '
                    f"{', '.join(TYPED_ENVELOPES)}"
                )
        return self


class RedisSinkConfig(Section):
    """``[sink.redis]``: streams or hashes of Redis, exactly once.

    A route's `target` is a stream, or what the keys of the hashes begin with; without a route,
    `SCHEMA.TABLE`.
    """

    url: HiddenText
    """The server: `redis://`, `rediss://` (TLS) or `unix://`. `env:NAME` reads the URL from an
    environment variable.
    Example: url = "redis://user:password@cache:6379/0" """

    kind: Literal["streams", "hashes"] = "streams"
    """`streams` appends each change to the stream of its target. `hashes` has the rows themselves:
    a hash `TARGET:KEY` for each row.
    Example: kind = "hashes" """

    envelope: EnvelopeName = "databus"
    """Form of the entries of a stream.
    Example: envelope = "debezium" """

    prefix: str = ""
    """Debezium's `topic.prefix` in the entries of a stream. Empty for the name of the database.
    Example: prefix = "cdc" """

    max_length: int = Field(default=0, ge=0)
    """Number of entries to which a stream is cut, approximately (`MAXLEN ~`). 0 for no limit.
    Example: max_length = 1000000 """

    checkpoint_key: str = Field(default="databus:{name}:checkpoint", min_length=1)
    """Key of the checkpoint; `{name}` is the name of the sink.
    Example: checkpoint_key = "{shop}:databus:{name}" """

    timeout: Seconds = Field(default=30.0, gt=0)
    """Longest time of an answer, that to a commit too.
    Example: timeout = "1min" """


class NatsSinkConfig(Section):
    """``[sink.nats]``: messages of a JetStream stream of NATS.

    A route's `target` is a subject; without a route, `PREFIX.SCHEMA.TABLE`.
    """

    servers: tuple[HiddenText, ...]
    """URLs of the servers. `env:NAME` reads one from an environment variable.
    Example: servers = ["nats://user:password@nats-a:4222", "nats://nats-b:4222"] """

    credentials: str = ""
    """File with a user's JWT and seed (`.creds`); it needs the package `nkeys`.
    Example: credentials = "/etc/databus/shop.creds" """

    prefix: str = ""
    """What the default subjects begin with. Empty for the name of the database.
    Example: prefix = "cdc" """

    stream: str = ""
    """Name of the stream. No other publisher may write to it. Empty for the name of the sink.
    Example: stream = "SHOP" """

    envelope: EnvelopeName = "databus"
    """Form of the messages.
    Example: envelope = "cloudevents" """

    create: bool = True
    """Create the stream if it does not exist. Otherwise a missing stream stops the sink.
    Example: create = false """

    subjects: tuple[str, ...] = ()
    """Subjects of a stream that the sink creates. Empty for `PREFIX.>`.
    Example: subjects = ["cdc.>", "orders.>"] """

    replicas: int = Field(default=1, ge=1, le=5)
    """Replicas of the stream and the bucket that the sink creates.
    Example: replicas = 3 """

    max_age: Seconds = Field(default=0.0, ge=0)
    """Age at which a stream that the sink creates drops messages. 0 for no limit.
    Example: max_age = "7d" """

    max_bytes: Bytes = Field(default=0, ge=0)
    """Size at which a stream that the sink creates drops its oldest messages. 0 for no limit.
    Example: max_bytes = "20GiB" """

    duplicate_window: Seconds = Field(default=120.0, gt=0)
    """How long a stream that the sink creates remembers the ids of messages.
    Example: duplicate_window = "10min" """

    bucket: str = Field(default="databus_checkpoints", pattern=r"^[A-Za-z0-9_-]+$")
    """Key-value bucket of the checkpoints; the key is the name of the sink.
    Example: bucket = "cdc_checkpoints" """

    timeout: Seconds = Field(default=10.0, gt=0)
    """Longest time of an answer.
    Example: timeout = "30s" """


class SearchSinkConfig(Section):
    """``[sink.search]``: documents of OpenSearch or Elasticsearch.

    A route's `target` is an index; without a route, `SCHEMA.TABLE` in lower case.
    """

    url: HiddenText
    """Base URL of the server, with user and password if it wants them. `env:NAME` reads it from an
    environment variable.
    Example: url = "https://user:password@search:9200" """

    api_key: HiddenText | None = None
    """Encoded API key of Elasticsearch. `env:NAME` reads it from an environment variable.
    Example: api_key = "env:SEARCH_KEY" """

    refresh: bool = False
    """Refresh the indexes after each commit, so that searches find the rows at once. Otherwise they
    do after the refresh interval of the index.
    Example: refresh = true """

    bulk_bytes: Bytes = Field(default=8 << 20, ge=1 << 10)
    """Largest size of a request, unless one document is larger.
    Example: bulk_bytes = "2MiB" """

    timeout: Seconds = Field(default=60.0, gt=0)
    """Longest time of an answer.
    Example: timeout = "30s" """


class FilesSinkConfig(Section):
    """``[sink.files]``: changes as files in a folder or a bucket."""

    url: HiddenText
    """Where the files are: a folder, `s3://bucket/prefix`, `gs://bucket/prefix` or
    `abfs://container@account/prefix`. The parameters of a URL are those of pyarrow. `env:NAME`
    reads the URL from an environment variable.
    Example: url = "s3://bucket/changes?region=eu-central-1" """

    format: Literal["ndjson", "avro", "parquet"] = "ndjson"
    """Format of the files.
    Example: format = "parquet" """

    resolved_every: Seconds = Field(default=10.0, ge=0)
    """Interval of the resolved marks while nothing changes. Each commit with changes has one.
    Example: resolved_every = "1min" """


class WebhookSinkConfig(Section):
    """``[sink.webhook]``: changes as HTTP requests."""

    url: HiddenText
    """Where the requests go. `env:NAME` reads the URL from an environment variable.
    Example: url = "https://hooks.example.com/changes" """

    secret: HiddenText | None = None
    """Key of the HMAC-SHA256 in the header `Databus-Signature`. `env:NAME` reads an environment
    variable. Without it requests have no signature.
    Example: secret = "env:HOOK_SECRET" """

    batch_events: int = Field(default=500, ge=1)
    """Largest number of events in a request.
    Example: batch_events = 100 """

    request_timeout: Seconds = Field(default=30.0, gt=0)
    """Longest time of a request.
    Example: request_timeout = "5s" """

    resolved: bool = False
    """Post the resolved position after each commit.
    Example: resolved = true """


class SinkConfig(Section):
    """``[sink]``: a consumer that writes the changes of a database to another system.

    Exactly one section of a kind, such as `[sink.sql]`, says where.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    """Name of the sink, for its checkpoint and its metrics.
    Example: name = "reports" """

    database: str
    """Database of the relay that the sink reads.
    Example: database = "shop" """

    relays: tuple[RelayUrl, ...] = (HiddenUrl("http://127.0.0.1:8700"),)
    """Base URLs of the relays.
    Example: relays = ["http://relay-a:8700", "http://relay-b:8700"] """

    bootstraps: tuple[RelayUrl, ...] = ()
    """Base URLs of the bootstrap servers. Without one, a new sink begins with the oldest change
    that the relay has.
    Example: bootstraps = ["http://127.0.0.1:8701"] """

    sources: tuple[str, ...] = ("*",)
    """Tables to read: globs over `schema.table`.
    Example: sources = ["shop.*"] """

    start: Literal["bootstrap", "oldest", "latest"] = "bootstrap"
    """Where a sink without a checkpoint begins: with the whole tables, with the oldest change of
    the relay, or with the next one.
    Example: start = "latest" """

    partition: str | None = None
    """Keys to read, as `mod:COUNT:A,B`. Several sinks with a partition each share the work.
    Example: partition = "mod:2:0" """

    transform: str = Field(default="", pattern=r"^([\w.]+:\w+)?$")
    """A function `module:function` that receives each `SinkRow`, and returns it or None to leave it
    out.
    Example: transform = "shop_rules:without_drafts" """

    batch_rows: int = Field(default=10_000, ge=1)
    """Number of rows after which the sink commits; a larger transaction is written in several
    batches.
    Example: batch_rows = 1000 """

    commit_every: Seconds = Field(default=0.1, ge=0)
    """Least time between two commits.
    Example: commit_every = "1s" """

    retry: Seconds = Field(default=0.1, gt=0)
    """Pause before the first retry; each further one is twice as long.
    Example: retry = "1s" """

    retry_most: Seconds = Field(default=30.0, gt=0)
    """Longest pause before a retry.
    Example: retry_most = "5min" """

    max_retries: int = Field(default=0, ge=0)
    """Number of failures without a commit in between after which the sink stops. 0 to retry without
    limit.
    Example: max_retries = 20 """

    refused: Literal["stop", "set-aside"] = "stop"
    """What to do with a row whose values the target does not take: `stop` the sink, or `set-aside`
    the row, and those of its key behind it, in the file `NAME.deadletters` in `data_dir`, and
    continue.
    Example: refused = "set-aside" """

    max_dead_letters: int = Field(default=1000, ge=1)
    """Largest number of rows that are set aside; the sink stops at the next one.
    Example: max_dead_letters = 20 """

    data_dir: Path = Path("var/sink")
    """Folder of the checkpoint, for a sink that does not store it with the rows, and of the rows
    that are set aside. A relative path starts at the configuration file.
    Example: data_dir = "/var/lib/databus/sink" """

    listen: str = Field(default="", pattern=r"^([^:]+:\d{1,5})?$")
    """Address and port of the metrics, `/metrics`. Empty for none.
    Example: listen = "127.0.0.1:8702" """

    route: tuple[RouteConfig, ...] = ()
    """Where the rows go, by source.
    Example: route = [{ source = "shop.*", target = "{table}" }] """

    sql: SqlSinkConfig | None = None
    """The tables of a database.
    Example: sql = { url = "sqlite:///mirror.db" } """

    kafka: KafkaSinkConfig | None = None
    """The topics of a Kafka broker.
    Example: kafka = { servers = "127.0.0.1:9092" } """

    redis: RedisSinkConfig | None = None
    """Streams or hashes of Redis.
    Example: redis = { url = "redis://127.0.0.1:6379" } """

    nats: NatsSinkConfig | None = None
    """A JetStream stream of NATS.
    Example: nats = { servers = ["nats://127.0.0.1:4222"] } """

    search: SearchSinkConfig | None = None
    """The indexes of a search server.
    Example: search = { url = "http://127.0.0.1:9200" } """

    files: FilesSinkConfig | None = None
    """Files in a folder or a bucket.
    Example: files = { url = "changes" } """

    webhook: WebhookSinkConfig | None = None
    """HTTP requests.
    Example: webhook = { url = "https://hooks.example.com/changes" } """

    @property
    def kinds(self) -> list[str]:
        """The kinds of which there is a section."""
        return [name for name in KINDS if getattr(self, name) is not None]

    @pydantic.model_validator(mode="after")
    def _has_one_kind(self) -> SinkConfig:
        if len(self.kinds) != 1:
            found = ", ".join(self.kinds) or "none"
            raise ValueError(
                f"a sink needs exactly one of {', '.join(KINDS)} as a section, and has {found}"
            )
        return self


KINDS = ("sql", "kafka", "redis", "nats", "search", "files", "webhook")
"""The sections of which a sink has exactly one."""
