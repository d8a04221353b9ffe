"""Hidden passwords, and files that only their user can read."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import stat
from pathlib import Path

import pytest

from databus.bootstrap.log.relay_api import RelayApi
from databus.bootstrap.processes.bootstrap_processes import _shown
from databus.client import DatabusClient
from databus.client.checkpoints.checkpoint_stores import FileCheckpoints
from databus.common.checkpoint import OnlineCheckpoint, Position
from databus.common.config import BootstrapConfig, SourceUrl, parse
from databus.common.errors import ConfigError, ServerUnavailable, to_problem
from databus.common.private import HiddenUrl, without_passwords
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings as mysql_settings
from databus.relay.sources.postgres.protocol.postgres_settings import (
    read_settings as postgres_settings,
)
from tests.support.live_relay import LiveRelay

SECRET = "ge/he#im?9@f:3%c"
ENCODED = "ge%2Fhe%23im%3F9%40f%3A3%25c"
PARTS = ("ge/he", "he#im", "im?9", "9@f", "f:3%c", "ge%2F", "im%3F9")


def file(url: str) -> str:
    return f'[relay]\n[[database]]\nname = "d"\nurl = "{url}"\n'


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "postgresql"])
def test_a_password_of_any_characters_is_read_and_never_shown(scheme: str) -> None:
    config = parse(file(f"{scheme}://u:{ENCODED}@host.example:1234/d")).database[0]
    read = postgres_settings if scheme == "postgresql" else mysql_settings
    settings = read(config)
    assert (settings.password, settings.host, settings.port) == (SECRET, "host.example", 1234)
    for shown in (
        str(config.url),
        repr(config),
        f"{config.url}",
        repr(settings),
    ):
        assert not any(part in shown for part in PARTS), shown
    assert str(config.url) == f"{scheme}://u:***@host.example:1234/d"
    assert pickle.loads(pickle.dumps(config.url)).reveal == config.url.reveal


@pytest.mark.parametrize("raw", ["ge/heim", "ge#heim", "ge?heim", "a/b@ge#heim", "ge%zzheim"])
@pytest.mark.parametrize("scheme", ["mysql", "postgresql", "relay+http"])
def test_a_raw_slash_or_hash_is_a_clear_error_without_the_password(scheme: str, raw: str) -> None:
    url = f"{scheme}://u:{raw}@host.example:1234/d"
    with pytest.raises(ConfigError, match=r"%2F|%25") as caught:
        parse(file(url))
    assert "heim" not in str(caught.value) and "heim" not in json.dumps(to_problem(caught.value))
    assert caught.value.__cause__ is None
    assert "heim" not in str(SourceUrl(url)) + repr(SourceUrl(url))
    with pytest.raises(ConfigError) as caught:
        parse(f'[bootstrap]\nrelays = ["http://u:{raw}@host.example:1234"]\n')
    assert "heim" not in str(caught.value)


async def test_a_relays_password_is_in_no_error_and_no_argument() -> None:
    relay = "http://u:geheim@127.0.0.1:1"
    async with RelayApi([relay]) as relays:
        with pytest.raises(ServerUnavailable) as caught:
            await relays.databases()
    problem = json.dumps(to_problem(caught.value))
    assert "127.0.0.1" in problem and "geheim" not in problem + repr(caught.value)
    config = BootstrapConfig.model_validate({"relays": [relay]})
    assert "geheim" not in _shown(config) + repr(config)


def test_a_client_sends_passwords_to_its_servers_and_names_them_without() -> None:
    url = "http://u:geheim@127.0.0.1:1"
    client = DatabusClient(database="d", relays=[HiddenUrl(url)], bootstraps=[url])
    named = [*client._relays, *client._bootstraps]
    assert [one + "/v1" for one in named] == [f"{url}/v1"] * 2
    assert "geheim" not in " ".join(f"{one} {one!r} {[one]}" for one in named)
    assert {str(one) for one in named} == {"http://u:***@127.0.0.1:1"}
    with pytest.raises(ConfigError) as caught:
        DatabusClient(database="d", relays=["ftp://u:geheim@h"])
    assert "geheim" not in str(caught.value)


def test_texts_without_passwords_stay_as_they_are() -> None:
    for text in ("http://a:1/b and x@y.example", "u@host:1/db", "a://b@c", "no colon", "://@"):
        assert without_passwords(text) == text
    shown = without_passwords("x http://u:p@ss/w#o?rd@h:1/x failed, http://v:q@i too")
    assert shown == "x http://u:***@h:1/x failed, http://v:***@i too"


def _modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


async def test_files_are_their_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    """What an embedding program has made; the processes of relay and bootstrap set their own."""
    before = os.umask(0)
    try:
        relay = LiveRelay(tmp_path / "relay")
        async with relay.served():
            await asyncio.sleep(0)
        relay.close()
        checkpoints = FileCheckpoints(tmp_path / "checkpoints" / "shop")
        checkpoints.save(OnlineCheckpoint("shop", "c", Position(1, 2)))
        checkpoints.close()
    finally:
        os.umask(before)
    modes = _modes(tmp_path)
    assert len(modes) > 6
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
