"""The reference pages have everything that there is, and nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pydantic
import pytest
from prometheus_client.core import CounterMetricFamily, Metric
from typer.testing import CliRunner

import databus.client
from databus.cli.main import cli
from databus.common import access_config, config, sink_config
from databus.common.errors import registry
from databus.relay.sources.chained.chained_source import RelayOptions
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlOptions
from databus.relay.sources.postgres.protocol.postgres_settings import PostgresOptions
from databus.relay.sources.sqlite.sqlite_source import SqliteOptions
from docs.generate import commands, configuration, endpoints, errors, library, metrics

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = {
    "mariadb": set(MySqlOptions.model_fields) - {"uuids"},
    "mysql": set(MySqlOptions.model_fields) - {"domain_id"},
    "postgresql": set(PostgresOptions.model_fields),
    "sqlite": set(SqliteOptions.model_fields),
    "relay": set(RelayOptions.model_fields),
}


def test_every_key_of_the_configuration_has_an_entry() -> None:
    page = configuration.page()
    models = {value for value in vars(config).values() if isinstance(value, type)}
    described = set(configuration.SECTIONS.values())
    for model in models:
        if (
            issubclass(model, pydantic.BaseModel)
            and model.model_fields
            and model is not config.Config
        ):
            assert model in described, f"{model.__name__} has no section in the reference"
    for section, model in configuration.SECTIONS.items():
        for key in configuration.keys(section, model):
            assert f"{{ #{key.anchor} }}" in page


@pytest.mark.parametrize("section", configuration.SECTIONS)
def test_the_example_of_a_key_is_accepted(section: str) -> None:
    """Together with what the model requires beside it."""
    beside = {
        "name": 'name = "shop"',
        "url": 'url = "sqlite:///shop.db"',
        "hash_salt": 'hash_columns = ["*.email"]',
        "hash_columns": 'hash_salt = "env:SHOP_SALT"',
    }
    model = configuration.SECTIONS[section]
    for key in configuration.keys(section, model):
        values = tomllib.loads(key.example)
        if model is config.DatabaseConfig:
            for name in ("name", "url"):
                values = {**tomllib.loads(beside[name]), **values}
        if model is sink_config.SinkConfig:
            needed = 'name = "copy"\ndatabase = "shop"'
            kind = "" if key.name in sink_config.KINDS else 'sql = { url = "sqlite:///copy.db" }'
            values = {**tomllib.loads(f"{needed}\n{kind}"), **values}
        if model is sink_config.RouteConfig:
            values = {"source": "shop.*", **values}
        urls = ("[sink.sql]", "[sink.redis]", "[sink.search]", "[sink.files]", "[sink.webhook]")
        if section in urls:
            values = {"url": "sqlite:///copy.db", **values}
        if model is sink_config.KafkaSinkConfig:
            values = {"servers": "127.0.0.1:9092", **values}
        if model is access_config.TlsConfig:
            values = {"certificate": "a.pem", "key": "a.key", **values}
        if model is sink_config.NatsSinkConfig:
            values = {"servers": ["nats://127.0.0.1:4222"], **values}
        required = {
            access_config.TokenConfig: f'name = "a"\nhashes = ["sha256:{"0" * 64}"]',
            access_config.CertificateConfig: 'name = "a"\nsubject = "CN=a"',
            access_config.OidcConfig: 'issuer = "https://a"\naudience = "b"\n'
            'jwks = "https://a/k"\nroles = [{ name = "c" }]',
            access_config.RoleConfig: 'name = "a"',
            access_config.GrantConfig: 'actions = ["read"]',
            config.ClusterConfig: 'relay = "a"\naddress = "http://a:1"',
        }
        if model is config.ClusterConfig and key.name != "store":
            values = {"zookeeper": "a:1", **values}
        if model is config.ZooKeeperAccess:
            pairs = ({"certificate": "a.pem", "key": "a.key"}, {"user": "a", "password": "b"})
            values = {"tls": True, **pairs[key.name in pairs[1]], **values}
        if model in required:
            values = {**tomllib.loads(required[model]), **values}
        if key.name.startswith("hash_"):
            values |= tomllib.loads(beside[key.name])
        made = model.model_validate(values)
        assert key.name in made.model_fields_set


def test_sizes_durations_and_bounds_are_shown_with_their_units() -> None:
    page = configuration.page()
    ring = page.partition("#database-ring_bytes")[2].partition("###")[0]
    assert '**Default:** `"256MiB"` · **Unit:** size · **Values:** 64KiB or more' in ring
    every = page.partition("#relay-heartbeat")[2].partition("###")[0]
    assert '**Default:** `"1s"` · **Unit:** duration' in every
    assert "**Default:** required" in page.partition("#database-url")[2].partition("###")[0]
    resync = page.partition("#database-resync")[2].partition("###")[0]
    assert "**Values:** `auto`, `manual`" in resync


def test_a_key_without_a_description_fails_the_build() -> None:
    class Section(pydantic.BaseModel):
        """``[section]``: one."""

        key: int = 1

    with pytest.raises(configuration.MissingDescription, match=r"Section\.key has no description"):
        list(configuration.keys("[section]", Section))


@pytest.mark.parametrize("source", OPTIONS)
def test_the_page_of_a_source_lists_its_options(source: str) -> None:
    text = (DOCS / "sources" / f"{source}.md").read_text()
    table = text.partition("## Options")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == OPTIONS[source]


def test_the_reference_of_the_command_line_has_every_option_of_every_command() -> None:
    page = commands.page()
    for words, command in commands.commands():
        entry = page.partition(f"## `databus {words}`")[2].partition("\n## ")[0]
        assert entry, words
        for parameter in command.params:
            if parameter.name != "help":
                assert all(option in entry for option in parameter.opts if option[0] == "-"), words
        shown = CliRunner().invoke(cli, [*words.split(), "--help"])
        assert shown.exit_code == 0


def test_the_http_reference_has_every_endpoint_of_both_servers() -> None:
    page = endpoints.page()
    count = 0
    for document in endpoints.documents().values():
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                assert f"### `{method.upper()} {path}`" in page
                count += 1
                for parameter in operation["parameters"]:
                    assert parameter["in"] == "path" or f"| `{parameter['name']}` |" in page
    assert count > 30


def test_the_catalogue_of_metrics_has_names_types_and_labels() -> None:
    page = metrics.page()
    families = metrics.families()
    found: list[Metric] = [one for group in families.values() for one in group]
    assert len(found) == len({one.name for one in found}) > 40
    labels = {"Sink": "sink", "Member of a group": "group", "Merge": "stream"}
    label_of = {
        id(one): labels.get(name, "database") for name in families for one in families[name]
    }
    for one in found:
        suffix = "_total" if isinstance(one, CounterMetricFamily) else ""
        label = label_of[id(one)]
        assert f"| `{one.name}{suffix}` | {one.type} | `{label}`" in page
        assert one.documentation.endswith("."), one.name


def test_the_catalogue_of_errors_has_every_code() -> None:
    page = errors.page()
    for code, error in registry().items():
        entry = page.partition(f"## `{code}`")[2].partition("\n## ")[0]
        assert str(error.status) in entry
        assert error.hint in entry


def test_the_python_reference_has_every_public_name() -> None:
    page = library.page()
    assert [
        name for name in databus.client.__all__ if f"::: databus.client.{name}\n" not in page
    ] == []
