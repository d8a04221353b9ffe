"""The TLS contexts of listeners."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

from databus.common.access.listener_tls import LOOK_EVERY_S, ServerTls
from databus.common.config import Config, load, parse
from databus.common.errors import ConfigError
from tests.support.certificates import Authority


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def served_serial(server: ssl.SSLContext, authority: Authority) -> int:
    """The serial number of the certificate that a listener with this context shows."""
    client = ssl.create_default_context(cafile=str(authority.ca))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ours.getpeercert()
    assert shown is not None
    return int(str(shown["serialNumber"]), 16)


def test_a_changed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    authority, clock = Authority(tmp_path), Clock()
    tls = ServerTls(authority.server_tls(), clock)
    before = served_serial(tls.context(), authority)
    authority.issue("server")
    assert served_serial(tls.context(), authority) == before  # it was looked at just now
    clock.now_s += LOOK_EVERY_S
    assert served_serial(tls.context(), authority) != before


def test_files_that_do_not_belong_together_change_nothing_and_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, clock = Authority(tmp_path), Clock()
    config = authority.server_tls()
    tls = ServerTls(config, clock)
    before = served_serial(tls.context(), authority)
    other = authority.issue("other")
    shutil.copy(other.certificate, config.certificate)
    for _ in range(3):
        clock.now_s += LOOK_EVERY_S
        assert served_serial(tls.context(), authority) == before
    assert len(caplog.records) == 1
    shutil.copy(other.key, config.key)
    clock.now_s += LOOK_EVERY_S
    assert served_serial(tls.context(), authority) != before


def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    config = authority.server_tls()
    with pytest.raises(ConfigError, match=r"missing\.pem: No such file"):
        ServerTls(config.model_copy(update={"certificate": tmp_path / "missing.pem"}))
    with pytest.raises(ConfigError, match=r"ca\.pem and the key .* cannot be used"):
        ServerTls(config.model_copy(update={"certificate": authority.ca}))
    with pytest.raises(ConfigError, match=r"the authorities in .* cannot be used"):
        ServerTls(config.model_copy(update={"client_ca": config.key}))


def test_relative_paths_start_at_the_configuration_file(tmp_path: Path) -> None:
    text = (
        '[http.tls]\ncertificate = "a.pem"\nkey = "/b.key"\n'
        '[bootstrap.credentials]\ntoken_file = "c"\n'
    )
    file = tmp_path / "databus.toml"
    file.write_text(text)
    config = load(file)
    assert config.http.tls is not None
    assert config.bootstrap is not None
    assert config.http.scheme == "https"
    assert (config.http.tls.certificate, config.http.tls.key) == (
        tmp_path / "a.pem",
        Path("/b.key"),
    )
    assert config.bootstrap.credentials.token_file == str(tmp_path / "c")
    assert Config.model_validate(config.model_dump(mode="json")).http == config.http
    assert parse("").http.scheme == "http"
