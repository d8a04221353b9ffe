"""Which listeners may start."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.bootstrap.processes.bootstrap_processes import run_server
from databus.common.access.listener_rules import require_protection
from databus.common.access_config import AuthConfig, HttpConfig
from databus.common.config import load, parse
from databus.common.errors import ConfigError
from databus.relay.processes.supervisor import Supervisor
from tests.support.callers import Callers
from tests.support.certificates import Authority

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.1.2.3:1", "relay.example:1"])
def test_a_listener_on_a_network_needs_tls_and_callers(listen: str, tmp_path: Path) -> None:
    callers = Callers()
    callers.add("app")
    bare, tls = HttpConfig(), HttpConfig(tls=Authority(tmp_path).server_tls())
    for http, auth, missing in (
        (bare, AuthConfig(), r"no TLS .* and no callers"),
        (bare, callers.auth, r"has no TLS \(\[http\.tls\]\); configure"),
        (tls, AuthConfig(), r"has no callers \("),
    ):
        with pytest.raises(ConfigError, match=missing):
            require_protection(listen, http, auth)
    require_protection(listen, tls, callers.auth)
    require_protection(listen, HttpConfig(insecure=True), AuthConfig())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.1.2.3:1", "[::1]:1", "localhost:1"])
def test_a_listener_of_this_machine_needs_neither(listen: str) -> None:
    require_protection(listen, HttpConfig(), AuthConfig())


def test_both_servers_refuse_to_start_on_a_network_without_protection(tmp_path: Path) -> None:
    text = (
        f'[relay]\nlisten = "0.0.0.0:0"\ndata_dir = "{tmp_path}/relay"\n'
        f'[[database]]\nname = "gen"\nurl = "generator://"\n'
        f'[bootstrap]\nlisten = "0.0.0.0:0"\ndata_dir = "{tmp_path}/bootstrap"\n'
    )
    with pytest.raises(ConfigError, match="can be reached from a network"):
        Supervisor(parse(text))
    with pytest.raises(ConfigError, match="can be reached from a network"):
        run_server(parse(text))
    assert not (tmp_path / "relay").exists()


def test_the_configuration_of_the_containers_says_that_it_is_insecure() -> None:
    for name in ("relay-a", "relay-b", "bootstrap"):
        config = load(ROOT / "docker" / f"{name}.toml")
        section = config.relay or config.bootstrap
        assert section is not None
        require_protection(section.listen, config.http, config.auth)
