"""Every code block of the manual and the README is right: it is parsed, compared or run."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from docs.generate import commands, metrics
from tests.support.fixtures import FreshDatabase
from tests.support.snippets import Snippet, check, pages, shell_commands, snippets

SNIPPETS = snippets()
BY_PAGE = sorted({one.page for one in SNIPPETS})
RUN = [one for one in SNIPPETS if one.marker.startswith("run:")]
PYTHON = [one for one in SNIPPETS if one.language == "python"]


@pytest.mark.parametrize("page", BY_PAGE)
def test_every_block_of_a_page_is_right(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for snippet in SNIPPETS:
        if snippet.page == page:
            check(snippet)


def test_the_manual_has_blocks_of_every_kind() -> None:
    assert {one.language for one in SNIPPETS} >= {"python", "toml", "sh", "sql", "js", "json"}


def test_python_that_is_marked_runs_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    marked = [one for one in PYTHON if one.marker == "run"]
    assert len(marked) >= 5
    for snippet in marked:
        check(snippet)
    broken = "from databus.client import DatabusClient\nDatabusClient(database='shop', relay='x')"
    with pytest.raises(AssertionError, match="relay"):
        check(Snippet("page.md", 1, "python", broken, "run"))


def test_every_metric_that_a_page_names_is_there() -> None:
    there = {one.name for group in metrics.families().values() for one in group}
    for page, text in pages():
        named = set(re.findall(r"\bdatabus_(?:relay|bootstrap|client)_\w+", text))
        assert {name.removesuffix("_total") for name in named} <= there, page


def test_every_command_and_option_in_a_sentence_is_there() -> None:
    options = {words: options_of(command) for words, command in commands.commands()}
    groups = {words.split()[0] for words in options}
    for page, text in pages():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for span in re.findall(r"`databus ([a-z][^`]*)`", prose):
            if "·" in span:  # README's list, which tests/test_readme.py compares
                continue
            words = span.split()
            name = next((one for one in (" ".join(words[:2]), words[0]) if one in options), "")
            assert name or words[0] in groups, f"{page}: databus {span}"
            given = {one.partition("=")[0] for one in words if one.startswith("-")} - {"--help"}
            assert not name or given <= options[name], f"{page}: databus {span}"


def options_of(command: Any) -> set[str]:
    return {one for item in command.params for one in (*item.opts, *item.secondary_opts)}


def wrong(language: str, text: str, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        check(Snippet("page.md", 1, language, text))


def test_a_wrong_block_is_found() -> None:
    wrong("sh", "databus relays -c databus.toml", "no command 'relays'")
    wrong("sh", "databus relay --port 1 -c databus.toml", "--port")
    wrong("sh", "databus status", "Missing parameter")
    wrong("sh", "make demmo", "no target")
    wrong("sh", "pip install 'databus-cdc[relais]'", "no extras")
    wrong("sh", "curl http://127.0.0.1:8700/v1/shop/streams", "no server answers")
    wrong("sh", "curl 'http://127.0.0.1:8700/v1/shop/stream?folow=true'", "unknown parameter")
    wrong("sh", "wget http://127.0.0.1:8700/", "not one that the manual uses")
    wrong("sh", "if true", "syntax error")
    wrong("python", "from databus.client import Cleint", "Cleint")
    wrong("toml", "[bootstrap]\nlisen = '127.0.0.1:1'", "did you mean listen")
    wrong("toml", "[[database]]\nname = 's'\nurl = 'sqlite:///s'\noptions = {x = 1}", "unknown")
    wrong("sql", "SELECT 1", "no test runs")
    wrong("", "text", "language ''")


def test_commands_are_found_in_pipes_and_behind_assignments() -> None:
    text = "A=1 databus check x.toml | cat > out; make test && cat <<'END' # why\n$!(\nEND\n"
    assert list(shell_commands(text)) == [
        ["databus", "check", "x.toml"],
        ["cat"],
        ["make", "test"],
        ["cat"],
    ]


def run_on(product: str, snippet: Snippet, request: pytest.FixtureRequest) -> None:
    """Run the statements of a block on a database that has the tables that they name."""
    statements = [one.strip() for one in snippet.text.split(";\n") if one.strip()]
    if product == "sqlite":
        connection = sqlite3.connect(":memory:")
        connection.executescript(snippet.text)
        connection.close()
        return
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    for statement in statements:
        database.execute(re.sub(r"\bshop\b", database.name, statement.rstrip(";")))


@pytest.mark.processes
@pytest.mark.parametrize("snippet", RUN, ids=str)
def test_sql_that_is_marked_runs(snippet: Snippet, request: pytest.FixtureRequest) -> None:
    for product in snippet.marker.removeprefix("run:").split(","):
        run_on(product.strip(), snippet, request)
