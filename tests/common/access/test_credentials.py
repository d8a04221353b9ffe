"""What our clients present."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.client.application.options import parse_options
from databus.common.access.credentials import ENVIRONMENT, Credentials
from databus.common.errors import ConfigError
from tests.support.certificates import Authority


def test_what_is_given_has_priority_over_the_environment() -> None:
    environment = {variable: f"of {name}" for name, variable in ENVIRONMENT.items()}
    del environment["DATABUS_TOKEN"]
    assert Credentials().or_environment({}) == Credentials()
    assert Credentials(token="t").or_environment(environment) == Credentials(
        token="t", ca="of ca", certificate="of certificate", key="of key"
    )
    given = Credentials(ca="a", certificate="c", key="k")
    assert given.or_environment(environment) == Credentials(
        token_file="of token_file", ca="a", certificate="c", key="k"
    )


def test_a_token_file_is_read_at_each_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    credentials = Credentials(token_file=str(file))
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        assert credentials.headers("https://far") == {"Authorization": f"Bearer {token}"}
    for wrong in ("", "two words", "line\nbreak", "naïve"):
        file.write_text(wrong)
        with pytest.raises(ConfigError) as refused:
            credentials.headers("https://far")
        assert not wrong or wrong not in refused.value.message
    file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        credentials.headers("https://far")


def test_a_token_does_not_cross_a_network_unencrypted() -> None:
    credentials = Credentials(token="secret")
    for url in ("http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1", "https://far"):
        assert credentials.headers(url)
    for url in ("http://far:8700/v1", "http://10.0.0.1", "http://localhost.evil.example"):
        with pytest.raises(ConfigError, match="unencrypted") as refused:
            credentials.headers(url)
        assert "secret" not in refused.value.message
    assert Credentials().headers("http://far") == {}
    assert credentials.headers("https://user:password@far") == {}


def test_a_token_is_not_printed() -> None:
    assert "secret" not in repr(Credentials(token="secret"))
    assert "secret" not in repr(parse_options({"token": "secret"}))


def test_halves_and_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="certificate and key"):
        Credentials(certificate="c")
    with pytest.raises(ConfigError, match="token and token_file"):
        parse_options({"token": "t", "token_file": "f"})


def test_a_context_is_shared_until_a_file_changes(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    credentials = authority.credentials("app")
    assert credentials.context("http://far") is None
    first = credentials.context("https://far")
    assert first is not None
    assert credentials.context("https://near") is first
    authority.issue("app", is_client=True)
    assert credentials.context("https://far") is not first
    with pytest.raises(ConfigError, match=r"none\.pem: No such file"):
        Credentials(ca="none.pem").context("https://far")
