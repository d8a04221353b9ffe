"""New consumers cost the source nothing: they get its state though it is there no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Processes
from tests.support.system import System, sqlite_shop
from tests.support.tables import write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_new_consumers_get_the_whole_state_though_source_and_relay_are_gone(
    tmp_path: Path, processes: Processes
) -> None:
    shop, url = sqlite_shop(tmp_path / "shop.db")
    system = System(tmp_path, shop, url, processes)
    relay = system.start_relay()
    system.start_bootstrap("--no-apply").wait_ready(f"{system.bootstrap_url}/readyz", 90)
    write(system, 40)
    expected = shop.rows()
    relay.kill9()
    for file in tmp_path.glob("shop.db*"):
        file.unlink()

    for name in ("first", "second"):
        system.start_consumer(name)
    for name in ("first", "second"):
        system.wait_until(expected, name)
        assert system.assert_faultless(name)["windows_bootstrap"] > 0
