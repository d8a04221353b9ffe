"""The folder of a database is moved away under a running relay, with all its processes."""

from __future__ import annotations

import contextlib
import urllib.request
from pathlib import Path

import pytest

from databus.relay.ring.ring_check import check
from tests.support.relay_process import RelayProcess
from tests.support.waiting import PATIENCE, eventually_sync


@pytest.mark.slow
@pytest.mark.faults
def test_a_folder_that_is_moved_away_ends_its_streams_and_is_made_again(tmp_path: Path) -> None:
    with RelayProcess.streaming(tmp_path, 500) as relay:
        fetcher = relay.fetcher()
        url = f"{relay.url}/v1/gen/stream?start=oldest&follow=true&format=ndjson"
        with urllib.request.urlopen(url, timeout=60 * PATIENCE) as answer:
            assert answer.readline()
            (tmp_path / "data" / "gen").rename(tmp_path / "elsewhere")
            lines = [line for line in answer if b'"error"' in line]
        (error,) = lines
        assert b"source_unavailable" in error and b"gen/ring" in error
        eventually_sync(lambda: not fetcher.is_running(), 60, "the fetcher ends")
        assert "moved away or deleted while it was open" in relay.log.read_text()

        def streams_again() -> bool:
            with contextlib.suppress(OSError):
                return bool(relay.state("gen")["state"] == "streaming")
            return False

        eventually_sync(streams_again, 60, "another ring is made")
        relay.ready()
    for folder in (tmp_path / "elsewhere", tmp_path / "data" / "gen"):
        assert check(folder) == []
