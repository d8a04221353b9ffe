"""The site is built strictly, and a browser that shows it loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
_LOADS = {
    "audio": "src",
    "embed": "src",
    "form": "action",
    "iframe": "src",
    "img": "src",
    "input": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}
"""Elements whose attribute a browser loads by itself; a link that is clicked is none of them."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=80 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loads(HTMLParser):
    """What a browser loads of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.styles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") == "canonical":
            return
        if tag in _LOADS and (target := values.get(_LOADS[tag])):
            self.found.append(target)
        self.found += [one.split()[0] for one in (values.get("srcset") or "").split(",") if one]
        self.styles.append(values.get("style") or "")


def foreign(page: Path) -> Iterator[str]:
    """Addresses of other hosts that a browser loads for a page, a script or a style sheet."""
    text = page.read_text()
    if page.suffix == ".html":
        loads = Loads()
        loads.feed(text)
        yield from (one for one in loads.found if re.match(r"(\w+:)?//", one))
    if page.suffix in (".html", ".css"):
        yield from re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)", text)
        yield from re.findall(r"@import\s+['\"]((?:https?:)?//[^'\"]+)", text)
    if page.suffix == ".js":
        quoted = re.findall(r"[\"'`](https?://[^\"'`\s]+)", text)
        yield from (one for one in quoted if not one.startswith("http://www.w3.org/"))


@pytest.mark.slow
def test_a_browser_loads_nothing_from_other_hosts(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert len(files) > 60
    found = {str(path.relative_to(site)): list(foreign(path)) for path in files}
    assert {name: urls for name, urls in found.items() if urls} == {}


@pytest.mark.slow
def test_the_site_has_the_made_pages_pictures_and_a_search_index(site: Path) -> None:
    for name in ("configuration", "commands", "http", "metrics", "errors", "python"):
        assert len((site / "reference" / f"{name}.html").read_text()) > 20_000, name
    assert 'id="database-ring_bytes"' in (site / "reference" / "configuration.html").read_text()
    assert "onTableState" in (site / "reference" / "python.html").read_text()
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    assert not list(site.rglob("*.py")), "a program is part of the site"


def test_a_foreign_address_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<a href="https://a.example/"></a><script src="//b.example/x.js"></script>')
    style = tmp_path / "style.css"
    style.write_text("body { background: url(https://c.example/x.png) }")
    script = tmp_path / "script.js"
    script.write_text('a="http://www.w3.org/2000/svg";fetch("https://d.example/x")')
    found = [one for path in (page, style, script) for one in foreign(path)]
    assert found == ["//b.example/x.js", "https://c.example/x.png", "https://d.example/x"]
