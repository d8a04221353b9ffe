"""The operations page in a real browser, over a real relay."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from databus.common.config import parse
from databus.relay.local_relay import LocalRelay
from tests.support.chain import poll
from tests.support.waiting import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RENDER_S = 120.0

NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None or os.environ.get("DATABUS_TEST_SKIP_SERVERS") == "1",
    reason="there is no chromium (Debian's package; make test installs it if it can)",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), NEEDS_CHROMIUM]

CONFIG = """
[relay]
listen = "127.0.0.1:0"
data_dir = "data"

[[database]]
name = "shop"
url = "generator://?events_per_second=2000&events=1000&events_per_window=10"
ring_bytes = "1MiB"
sync_every = "20ms"

[[database]]
name = "broken"
url = "generator://?keys=<script>document.title='taken'</script>"
"""


async def rendered(url: str, folder: Path) -> str:
    """The page's document after its scripts have run and fetched the status."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=4000",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        async with asyncio.timeout(RENDER_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode()


async def test_the_page_shows_each_database_its_range_and_what_ails_it(tmp_path: Path) -> None:
    async with LocalRelay(parse(CONFIG, folder=tmp_path)) as relay:
        await eventually(lambda: relay.fetchers["broken"].status.state == "failed", 60)
        shop = relay.fetchers["shop"]
        await eventually(lambda: shop.intake is not None and shop.intake.complete.scn == 100, 60)
        assert (await poll(relay.url)).frames

        async def shown() -> str:
            page = await rendered(f"{relay.url}/status", tmp_path / "profile")
            assert "Loading" not in page
            assert "newest 100:10" in page
            return page

        page = await eventually(shown, 100)
    text = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    assert re.search(r"<h2>shop</h2><span class=\"state good\">streaming</span>", text)
    assert re.search(r"<h2>broken</h2><span class=\"state bad\">failed</span>", text)
    assert "oldest 1:0 (serves after 0:0)" in text
    assert "<dt>events served</dt><dd>1,000</dd>" in text
    assert "<dt>windows in the ring</dt><dd>100</dd>" in text
    assert "percent of the ring is used" in text
    assert "<th>behind the ring</th>" in text
    assert "<td>unnamed</td>" in text
    # What ails it is shown as text, whatever it holds.
    assert "is no number" in text
    assert "&lt;script&gt;" in text
    assert "<title>Databus relay</title>" in text
    assert 'id="trouble" class="bad" role="status"></span>' in text
