"""What MkDocs calls while it builds the manual.

It adds the pages that are made of the code and the format specifications, turns links that leave
``docs/`` into something that the site has, and takes the addresses of other hosts out of the
theme's scripts, so that a browser loads nothing from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generate import commands, configuration, endpoints, errors, library, metrics

ROOT = Path(__file__).parents[2]
PAGES = {
    "reference/configuration.md": configuration.page,
    "reference/commands.md": commands.page,
    "reference/http.md": endpoints.page,
    "reference/metrics.md": metrics.page,
    "reference/errors.md": errors.page,
    "reference/python.md": library.page,
}
BESIDE = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "common/databus/common/frame/FORMAT.md": "project/frame-format.md",
    "relay/databus/relay/ring/FORMAT.md": "project/ring-format.md",
    "bootstrap/databus/bootstrap/runs/FORMAT.md": "project/runs-format.md",
}
"""Texts that lie outside docs/, and where the site has them."""

_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FOREIGN = re.compile(r"https://(?:unpkg\.com|api\.github\.com|\$\{\w+\}/api)/[^\"'`]*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for uri, make in PAGES.items():
        files.append(File.generated(config, uri, content=make()))
    for source, uri in BESIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    lines = [f"* [{page.read_text().splitlines()[0][2:]}]({page.name})" for page in decisions]
    text = "# Decisions\n\nOne page for each decision that a successor asks about.\n\n"
    files.append(File.generated(config, "decisions/index.md", content=text + "\n".join(lines)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files that the site has elsewhere, or not at all."""
    source = {uri: path for path, uri in BESIDE.items()}.get(page.file.src_uri)
    folder = posixpath.dirname(source or f"docs/{page.file.src_uri}")

    def turned(link: re.Match[str]) -> str:
        mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        uri = BESIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not uri or files.get_file_from_path(uri) is None:
            return text  # a folder or a file of the code, which the site does not have
        start = posixpath.dirname(page.file.src_uri)
        return f"{mark}[{text}]({posixpath.relpath(uri, start or '.')}{anchor})"

    return _LINK.sub(turned, markdown)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Take the addresses of other hosts out of the theme's scripts."""
    for script in Path(config.site_dir).rglob("*.js"):
        text = script.read_text()
        if _FOREIGN.search(text):
            script.write_text(_FOREIGN.sub("about:blank", text))
