"""The documents are correct: README's examples run, its commands and files are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from databus.cli.main import cli
from databus.client import DatabusClient
from databus.common import config
from databus.common.filters.predicate import parse_where
from databus.common.filters.stream_filter import parse_ops, parse_partition, parse_sources
from databus.relay.capture.source_catalogue import create_source
from docs.generate.hooks import PAGES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def texts() -> Iterator[Path]:
    """Every text in Markdown that belongs to us."""
    for pattern in ("*.md", "docs/**/*.md", "*/README.md", "*/databus/**/*.md", "tests/*.md"):
        yield from sorted(ROOT.glob(pattern))


def block(start: str, end: str) -> str:
    """What README has between two lines."""
    return README.partition(start)[2].partition(end)[0]


def test_readmes_configuration_is_accepted_as_it_is_and_with_all_that_is_left_out() -> None:
    text = block("<<'TOML'\n", "\nTOML\n")
    made = config.parse(text, folder=ROOT)
    assert made.relay is not None
    assert made.bootstrap is not None
    whole = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    assert whole != text
    more = config.parse(whole, folder=ROOT)
    assert more.database[0].exclude_columns == ("*.password",)
    assert more.bootstrap is not None
    assert (more.bootstrap.store, more.bootstrap.spark_master) == (
        "s3://bucket/prefix",
        "spark://host:7077",
    )


def test_every_kind_of_url_in_readme_has_a_source() -> None:
    urls = re.findall(r"[a-z+]+://[^\s\"…]*", block('name = "shop"\n', "\nsources"))
    assert len(urls) == 6
    for url in urls:
        if url == "mysql://":
            url = urls[-1].replace("mariadb:", "mysql:")
        made = create_source(config.DatabaseConfig(name="shop", url=config.SourceUrl(url)))
        assert callable(made.read_chunk)


def test_readmes_client_can_be_made() -> None:
    code = block("```python\n", ".run()\n") + "\n"
    assert code.rstrip().endswith(")")
    names: dict[str, Any] = {}
    exec(code.replace("\nDatabusClient(", "\nclient = DatabusClient("), names)
    assert isinstance(names["client"], DatabusClient)
    assert names["client"].database == "shop"


def test_readmes_filters_are_understood() -> None:
    row = block("| **Relay** |", "\n")
    parsers: dict[str, Callable[[str], object]] = {
        "sources": parse_sources,
        "ops": parse_ops,
        "partition": parse_partition,
        "where": parse_where,
    }
    for text in re.findall(r"`(\w+=[^`]+)`", row):
        name, _, value = text.partition("=")
        parsers[name](value)


def test_readme_lists_the_commands_that_there_are() -> None:
    listed = block("| **Commands** | `databus ", "`").split(" · ")
    assert sorted(listed) == sorted(typer.main.get_group(cli).commands)


def test_every_target_that_a_text_names_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for path in texts():
        named = set(
            re.findall(r"`make ([a-z-]+)|^(?: {4})?make ([a-z-]+) +#", path.read_text(), re.M)
        )
        assert {one or other for one, other in named} <= targets, path


def test_every_link_leads_to_a_file() -> None:
    """Or to a page that the manual's build makes."""
    made = {ROOT / "docs" / uri for uri in (*PAGES, "decisions/index.md")}
    broken = []
    for path in texts():
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            target = (path.parent / link).resolve()
            if "://" not in link and not target.exists() and target not in made:
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_module_that_a_text_names_is_there() -> None:
    there = {path.name for folder in ROOT.iterdir() for path in folder.rglob("*.py")}
    missing = []
    for path in texts():
        for name in re.findall(r"`(?:[\w.]+/)*(\w+\.py)`", path.read_text()):
            if name not in there:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


def test_a_decision_has_a_number_of_its_own_in_name_and_title() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    for page in pages:
        assert page.read_text().startswith(f"# {page.name[:4]}: "), page.name


def test_every_module_is_in_a_reading_order() -> None:
    """In the README of its room, or in the first lines of the folder that it lies in."""
    left_out = []
    for room in ("relay", "bootstrap", "client", "common", "cli"):
        readme = (ROOT / room / "README.md").read_text()
        for path in (ROOT / room / "databus" / room).rglob("*.py"):
            folder = (path.parent / "__init__.py").read_text()
            is_named = path.name in readme or f"``{path.stem}``" in folder
            if path.name != "__init__.py" and not is_named:
                left_out.append(str(path.relative_to(ROOT)))
    assert sorted(left_out) == []
