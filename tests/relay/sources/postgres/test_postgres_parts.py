"""The small parts of the PostgreSQL source: settings, signing in, positions, snapshots."""

from __future__ import annotations

import base64

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import ConfigError, SourceUnavailable
from databus.common.schema.source_schema import Kind
from databus.relay.sources.postgres.protocol.lsn import (
    flush_lsn,
    format_lsn,
    parse_lsn,
    parse_snapshot,
    scn_before,
    written_end,
)
from databus.relay.sources.postgres.protocol.postgres_settings import (
    PostgresSettings,
    read_settings,
)
from databus.relay.sources.postgres.protocol.scram import Scram, md5_password
from databus.relay.sources.postgres.tables.postgres_tables import literal, quote
from databus.relay.sources.postgres.tables.postgres_types import kind_of


def settings_of(url: str, name: str = "Shop.1", **options: object) -> PostgresSettings:
    return read_settings(
        DatabaseConfig.model_validate({"name": name, "url": url, "options": options})
    )


def test_settings_come_from_the_url_and_the_options_win() -> None:
    found = settings_of(
        "postgresql://us%40er:p%2Fw@db.example:6432/sh%20op?sslmode=require&slot=one", slot="two"
    )
    assert (found.user, found.password, found.host, found.port) == (
        "us@er", "p/w", "db.example", 6432,
    )  # fmt: skip
    assert (found.database, found.slot, found.sslmode) == ("sh op", "two", "require")
    assert found.publication == "databus_shop_1"
    assert "p/w" not in repr(found)
    assert "p/w" not in found.address


@pytest.mark.parametrize(
    ("url", "options", "complaint"),
    [
        ("postgresql://h/db", {}, "names no user"),
        ("postgresql://u@h/", {}, "names no database"),
        ("postgresql://u@h/db", {"slott": "x"}, "did you mean slot"),
        ("postgresql://u@h/db", {"slot": "Upper"}, "is not 1 to 63"),
        ("postgresql://u@h/db", {"sslmode": "maybe"}, "it takes disable"),
        ("postgresql://u@h/db", {"special_values": "guess"}, "it takes error, null, text"),
        ("postgresql://u@h/db", {"discover_every": "soon"}, "discover_every"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    url: str, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        settings_of(url, **options)


def test_scram_gives_the_exchange_of_rfc_7677() -> None:
    # The RFC's example has a user name in the first message; PostgreSQL ignores it.
    scram = Scram("pencil", nonce="rOprNGfwEbeRWgbNEkqO")
    scram._first_bare = "n=user,r=rOprNGfwEbeRWgbNEkqO"
    final = scram.final(
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    assert final.endswith(b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    scram.finish(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    with pytest.raises(SourceUnavailable, match="prove"):
        scram.finish(b"v=" + base64.b64encode(bytes(32)))


@pytest.mark.parametrize(
    "challenge", [b"", b"r=other,s=AAAA,i=1", b"r=nonce1,s=AAAA", b"r=nonce1,s=AAAA,i=0", b"\xff"]
)
def test_a_malformed_challenge_is_refused(challenge: bytes) -> None:
    with pytest.raises(SourceUnavailable, match="SCRAM"):
        Scram("secret", nonce="nonce").final(challenge)


def test_md5_passwords_are_salted() -> None:
    assert md5_password("u", "p", b"\1\2\3\4") == b"md5facdc455923b0a58efea84a6d9ee0e76"
    assert md5_password("u", "p", b"\1\2\3\4") != md5_password("u", "p", b"\1\2\3\5")


@pytest.mark.parametrize(("text", "number"), [("0/0", 0), ("16/B374D848", 0x16B374D848)])
def test_lsns_are_read_and_written(text: str, number: int) -> None:
    assert parse_lsn(text) == number
    assert format_lsn(number) == text


@pytest.mark.parametrize("commit", [8, 800, 0x16B374D848])
def test_the_flush_position_of_an_scn_lies_between_its_commit_and_the_next(commit: int) -> None:
    # The schema window before it, the commit, the schema window after it.
    assert flush_lsn(commit - 1) == commit
    assert commit < flush_lsn(commit) <= commit + 8
    assert flush_lsn(commit + 1) == flush_lsn(commit)
    assert flush_lsn(scn_before(commit)) == commit
    assert scn_before(commit) < commit - 1


def test_the_written_end_does_not_count_a_header_that_is_not_there_yet() -> None:
    page, segment = 8192, 16 << 20
    assert written_end(segment + 40, page, segment) == segment
    assert written_end(segment + page + 24, page, segment) == segment + page
    assert written_end(segment + page + 40, page, segment) == segment + page + 40
    assert written_end(segment + 1000, page, segment) == segment + 1000


def test_a_snapshot_sees_what_had_committed_when_it_was_taken() -> None:
    snapshot = parse_snapshot("100:110:102,105", 7)
    seen = [xid for xid in range(95, 115) if snapshot.sees(1, str(xid))]
    assert seen == [95, 96, 97, 98, 99, 100, 101, 103, 104, 106, 107, 108, 109]
    assert not snapshot.sees(1, "")


@pytest.mark.parametrize(
    ("xmax", "xid", "sees"),
    [
        ((1 << 32) + 10, 5, True),  # of this epoch
        ((1 << 32) + 10, 20, False),
        ((1 << 32) + 10, 2**32 - 5, True),  # of the epoch before
        ((2 << 32) - 10, 5, False),  # of the epoch after
        ((2 << 32) - 10, 2**32 - 20, True),
    ],
)
def test_a_wrapped_transaction_id_belongs_to_the_nearest_epoch(
    xmax: int, xid: int, sees: bool
) -> None:
    assert parse_snapshot(f"{xmax}:{xmax}:", 7).sees(1, str(xid)) is sees


@pytest.mark.parametrize(
    ("modifier", "expected"),
    [
        (-1, (Kind.NUMERIC, 0, 0)),
        (((12 << 16) | 2) + 4, (Kind.DECIMAL, 12, 2)),
        (((1000 << 16) | 0) + 4, (Kind.NUMERIC, 0, 0)),
        (((3 << 16) | (-2 & 0x7FF)) + 4, (Kind.NUMERIC, 0, 0)),
    ],
)
def test_numeric_is_a_decimal_where_avro_can_hold_it(
    modifier: int, expected: tuple[Kind, int, int]
) -> None:
    assert kind_of(1700, modifier) == expected


def test_names_and_strings_are_quoted_for_sql() -> None:
    assert quote('a "b"') == '"a ""b"""'
    assert literal("it's") == "'it''s'"
    assert literal("a\\b'") == "E'a\\\\b'''"
