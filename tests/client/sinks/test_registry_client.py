"""The client of a schema registry."""

from __future__ import annotations

import pytest

from databus.client.sinks.kafka.registry_client import SchemaRegistry
from databus.common.envelopes.avro_encoding import avro_schema
from databus.common.envelopes.connect_types import INT32, OPTIONAL_STRING, STRING, struct
from databus.common.envelopes.protobuf_encoding import ProtobufSchema
from databus.common.errors import SinkRefused, SinkUnavailable
from databus.common.sink_config import KafkaSinkConfig
from tests.support.schema_registry_server import SchemaRegistryServer
from tests.support.schema_registry_server import registry as registry  # a fixture

FIRST = avro_schema(struct("t.Value", ("id", INT32)))
SECOND = avro_schema(struct("t.Value", ("id", INT32), ("note", OPTIONAL_STRING)))
BROKEN = avro_schema(struct("t.Value", ("id", INT32), ("note", STRING)))


def test_versions_of_a_subject_get_ids_and_equal_ones_the_same(
    registry: SchemaRegistryServer,
) -> None:
    client = SchemaRegistry(registry.url)
    assert client.register("a/b-value", FIRST) == 1
    assert client.register("a/b-value", SECOND) == 2
    assert client.register("a/b-value", FIRST) == 1
    assert registry.subjects == {"a/b-value": [1, 2]}
    assert registry.authorizations == [None] * 3


def test_an_incompatible_version_is_refused_with_the_reason(registry: SchemaRegistryServer) -> None:
    client = SchemaRegistry(registry.url + "/")
    client.register("t-value", FIRST)
    with pytest.raises(SinkRefused, match="t-value: the field note has no default"):
        client.register("t-value", BROKEN)
    assert registry.subjects == {"t-value": [1]}


def test_the_numbers_of_a_new_protobuf_version_are_those_of_the_newest_one(
    registry: SchemaRegistryServer,
) -> None:
    client = SchemaRegistry(registry.url)
    assert client.newest("p-value") == ""
    kinds = [struct("t.Value", *((name, INT32) for name in names)) for names in ("ab", "bc", "abc")]
    for number, kind in enumerate(kinds, 1):
        text = ProtobufSchema(kind, client.newest("p-value")).text
        assert client.conflict("p-value", text) == ""
        assert client.register("p-value", text) == number
        assert client.newest("p-value") == text
    changed = ProtobufSchema(struct("t.Value", ("b", STRING)), client.newest("p-value")).text
    with pytest.raises(SinkRefused, match="was int32 and is string"):
        client.register("p-value", changed)
    client.register("a-value", FIRST)
    assert client.newest("a-value") == ""


def test_user_and_password_go_into_the_header_and_not_into_messages(
    registry: SchemaRegistryServer,
) -> None:
    SchemaRegistry(f"http://user:p%40ss@{registry.address}").register("t", FIRST)
    assert registry.authorizations == ["Basic dXNlcjpwQHNz"]
    with pytest.raises(SinkUnavailable) as caught:
        SchemaRegistry("http://user:secret@127.0.0.1:1").register("t", FIRST)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("form", ["avro", "protobuf"])
def test_a_registered_format_needs_a_registry_and_an_envelope_with_types(form: str) -> None:
    given = {"servers": "127.0.0.1:9092", "format": form, "envelope": "debezium"}
    with pytest.raises(ValueError, match="registry"):
        KafkaSinkConfig.model_validate(given)
    with pytest.raises(ValueError, match="debezium, flat"):
        KafkaSinkConfig.model_validate(given | {"registry": "http://r", "envelope": "maxwell"})
