"""The configuration: a file of every section is read, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.common import config
from databus.common.config import Config, DatabaseConfig, parse
from databus.common.errors import ConfigError

EXAMPLE = """
[relay]
listen = "127.0.0.1:8700"
data_dir = "var/relay"
workers = 1

[[database]]
name = "shop"
url = "mariadb://user:secret@127.0.0.1:3306/shop"
sources = ["shop.*"]
ring_bytes = "256MiB"

[bootstrap]
listen = "127.0.0.1:8701"
data_dir = "var/bootstrap"
relays = ["http://127.0.0.1:8700"]
apply_every = "30s"
retention_bytes = "64GiB"   # merged changes retained for returning readers
run_grace = "10min"         # how long merged runs are retained
"""


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "databus.toml"
    path.write_text(EXAMPLE)
    found = config.load(path)
    assert found.relay is not None and found.bootstrap is not None
    assert found.relay.data_dir == tmp_path / "var/relay"
    assert found.database[0].ring_bytes == 256 << 20
    assert found.database[0].sources == ("shop.*",)
    assert found.bootstrap.apply_every == 30.0
    assert (found.bootstrap.retention_bytes, found.bootstrap.run_grace) == (64 << 30, 600.0)


def test_a_password_never_prints_but_reaches_the_driver() -> None:
    url = config.parse(EXAMPLE).database[0].url
    for text in (str(url), repr(url), f"{url}", "%s" % url, str(config.parse(EXAMPLE))):  # noqa: UP031 (this way is tried, too)
        assert ":secret" not in text and "***" in text
    assert url.reveal == "mariadb://user:secret@127.0.0.1:3306/shop"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[relay]\nlisten = "here"', "relay.listen: 'here' is not HOST:PORT"),
        ("[relay]\nworkers = 0", "relay.workers"),
        ('[relay]\nlisen = "a:1"', "unknown key relay.lisen; did you mean listen?"),
        ("[relays]", "unknown key relays; did you mean relay?"),
        ('[relay]\nxyzzy = "a:1"', "unknown key relay.xyzzy; known keys are listen"),
        ('[relay]\n[[database]]\nname="s"\nurl="oracle://x"', "scheme is 'oracle'"),
        ('[relay]\n[[database]]\nname="s"\nurl="sqlite:///x"\nring_bytes="9XB"', "not a size"),
        ('[relay]\n[[database]]\nname="s"\nurl="sqlite:///x"\nring_byte=1', "mean ring_bytes"),
        ('[relay]\n[[database]]\nname="../s"\nurl="sqlite:///x"', "database.name"),
        ('[relay]\n[[database]]\nname="s"', "database.url: Field required"),
        ('[[database]]\nname="s"\nurl="sqlite:///x"', r"needs a \[relay\] section"),
        ('[bootstrap]\napply_every = "soon"', "not a duration"),
        ('[bootstrap]\nrun_grace = "-1s"', "not a duration"),
        ("[bootstrap]\nrun_grace = -1", "bootstrap.run_grace"),
        ('[bootstrap]\nretention_bytes = "lots"', "not a size"),
        ('[bootstrap]\nretention_bytes = "1MiB"', "1048576 is less than one segment"),
        ('[bootstrap]\nretention_byte = "1GiB"', "mean retention_bytes"),
        ("[relay", "not TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.parse(text, "databus.toml")


def test_the_message_about_a_wrong_url_does_not_show_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse('[relay]\n[[database]]\nname="s"\nurl="oracle://u:hidden@h/x"')
    assert "hidden" not in str(caught.value)


def test_two_databases_of_one_name_are_refused() -> None:
    one = '[[database]]\nname="s"\nurl="sqlite:///x"\n'
    with pytest.raises(ConfigError, match="two"):
        config.parse("[relay]\n" + one + one)


def test_a_file_in_another_encoding_is_named_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_bytes("# Größe".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"relay.toml: not UTF-8 at byte 4"):
        config.load(tmp_path / "relay.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        config.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "count"), [("1KiB", 1024), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), ("7", 7), (9, 9)]
)
def test_sizes_carry_their_unit(text: object, count: int) -> None:
    assert config.parse_bytes(text) == count


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("2min", 120), ("1h", 3600), (3, 3)])
def test_durations_carry_their_unit(text: object, seconds: float) -> None:
    assert config.parse_seconds(text) == seconds


def test_excluded_tables_are_not_captured() -> None:
    found = DatabaseConfig.model_validate(
        {
            "name": "a",
            "url": "sqlite:///x",
            "sources": ["s.*"],
            "exclude_sources": ["s.tmp_*", "s.x"],
        }
    )
    assert [found.captures(name) for name in ("s.y", "s.x", "s.tmp_1", "t.y")] == [
        True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('exclude_columns = ["password"]', "SCHEMA.TABLE.COLUMN"),
        ('hash_columns = ["a.b.c"]', "hash_salt"),
        ('hash_salt = "x"', "no hash_columns"),
        ('mask_columns = { "a.b.c" = 0 }', "mask_columns"),
        ('truncate_columns = { "a.b.c" = "4" }', "truncate_columns"),
        ('skipped_operations = ["r"]', "skipped_operations"),
        ('keys = { "a.b" = [] }', "list of columns"),
        ('keys = { "a.b" = ["*", "c"] }', "more than"),
    ],
)
def test_a_rule_that_is_none_is_named(line: str, message: str) -> None:
    text = f'[relay]\n[[database]]\nname = "a"\nurl = "sqlite:///x"\n{line}\n'
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///x", "generator://", "mariadb://u:hidden@h/d", "mysql://u:hidden@h/d",
        "postgresql://u:hidden@h/d", "postgres://u:hidden@h/d",
    ],
)  # fmt: skip
def test_a_database_cannot_be_blocked_by_a_consumer(url: str) -> None:
    text = f'[relay]\n[[database]]\nname = "a"\nurl = "{url}"\noptions = {{ block = true }}\n'
    with pytest.raises(ConfigError, match=r"database a: .*retains its.*relay\+http://") as caught:
        parse(text)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["relay+http", "relay+https"])
def test_a_child_of_another_relay_may_be_blocked(scheme: str) -> None:
    found = DatabaseConfig.model_validate(
        {"name": "a", "url": f"{scheme}://h/d", "options": {"block": True}}
    )
    assert found.is_relayed
    assert found.options["block"]


def test_a_salt_survives_the_way_to_a_child_process_and_is_not_printed() -> None:
    text = (
        '[relay]\n[[database]]\nname = "a"\nurl = "sqlite:///x"\n'
        'hash_columns = ["a.b.c"]\nhash_salt = "pepper"\n'
    )
    found = parse(text)
    assert "pepper" not in str(found) + repr(found)
    copy = Config.model_validate(found.model_dump(mode="json"))
    assert copy == found and copy.database[0].hash_salt.reveal == "pepper"
