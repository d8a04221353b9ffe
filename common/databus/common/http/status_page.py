"""The status page of a server: a shared page around the server's own script."""

from __future__ import annotations

from importlib import resources

_SCRIPT = "status.js"


def status_page(title: str, package: str) -> str:
    """The page, with the ``status.js`` of a package: how it shows one of its databases."""
    page = resources.files("databus.common.http").joinpath("status_page.html").read_text("utf-8")
    script = resources.files(package).joinpath(_SCRIPT).read_text("utf-8")
    return page.replace("{{title}}", title).replace("{{script}}", script)
