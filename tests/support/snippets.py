"""The code blocks of the manual, and what each of them must be able to do.

A block is checked by its language: ``check`` raises AssertionError with the page and the line.
Shell commands are compared with the commands, targets, extras and endpoints that there are.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl, urlsplit

import typer.main
import yaml

from databus.cli.commands.schema_command import ShownByDefault
from databus.cli.main import cli
from databus.common import config
from databus.relay.capture.source_catalogue import create_source
from docs.generate import commands, configuration, endpoints, errors, library, metrics

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
_MADE = {"configuration": configuration, "commands": commands, "http": endpoints}
_MADE |= {"errors": errors, "metrics": metrics, "python": library}
_PROGRAMS = frozenset(
    {
        *(
            "cat",
            "cd",
            "createdb",
            "cp",
            "docker",
            "go",
            "install",
            "kubectl",
            "mv",
            "node",
            "psql",
        ),
        *("python", "python3", "rm", "systemctl", "tar", "useradd"),
    }
)
"""Others' programs: a block that runs one is at least valid shell."""


@dataclass(frozen=True)
class Snippet:
    """One fenced block: where it is, what its first line says, and its text."""

    page: str
    line: int
    info: str
    text: str
    marker: str = ""

    @property
    def language(self) -> str:
        """The first word behind the fence."""
        return self.info.split(" ")[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> Iterator[tuple[str, str]]:
    """Every page of the manual and the README, with its text; made pages too."""
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        if "decisions" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_text()
    for name, module in _MADE.items():
        yield f"reference/{name}.md", module.page()


def snippets() -> list[Snippet]:
    """All blocks of all pages."""
    return [one for page, text in pages() for one in blocks(page, text)]


def blocks(page: str, text: str) -> Iterator[Snippet]:
    """The blocks of one page; the marker is the comment on the line above, if there is one."""
    for found in _FENCE.finditer(text):
        above = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        marker = re.fullmatch(r"\s*<!-- (.*) -->\s*", above)
        line = text.count("\n", 0, found.start()) + 1
        body = re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
        included = re.sub(r'^--8<-- "([^"]+)"$', _included, body, flags=re.MULTILINE)
        yield Snippet(page, line, found[2].strip(), included, marker[1] if marker else "")


def _included(found: re.Match[str]) -> str:
    return (ROOT / "examples" / found[1]).read_text().rstrip("\n")


def check(snippet: Snippet) -> None:
    """Check that a block is right, as far as that can be checked without running it."""
    checker = _CHECKERS.get(snippet.language)
    assert checker is not None, f"{snippet}: a block of the language {snippet.language!r}"
    try:
        checker(snippet)
    except Exception as error:
        raise AssertionError(f"{snippet}: {error}") from error


def _check_python(snippet: Snippet) -> None:
    tree = ast.parse(snippet.text)
    lines = [ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Import)]
    lines += [ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    future = [line for line in lines if "__future__" in line]
    whole = snippet.marker == "run"
    imports = "\n".join(future + [line for line in lines if line not in future])
    exec(snippet.text if whole else imports, {"__name__": "snippet"})


def _check_toml(snippet: Snippet) -> None:
    document = tomllib.loads(snippet.text)
    title = re.search(r"title='(\[+)([^\]]*)\]", snippet.info)
    if title:  # a key of the reference, which belongs into the section of its title
        return  # tests/docs/test_reference.py gives it to the model
    made = config.parse(snippet.text if "relay" in document else f"[relay]\n{snippet.text}")
    with mock.patch.dict(os.environ, dict.fromkeys(re.findall(r"env:(\w+)", snippet.text), "x")):
        for database in made.database:
            create_source(database)


def _check_shell(snippet: Snippet) -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=snippet.text, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    for words in shell_commands(snippet.text):
        program, *arguments = words
        name = Path(program).name
        if name in _KNOWN:
            _KNOWN[name](arguments)
        else:
            assert name in _PROGRAMS, f"the program {name!r} is not one that the manual uses"


def shell_commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, without redirections, assignments and comments."""
    text = re.sub(r"<<'?(\w+)'?([^\n]*\n).*?\n\1$", r"\2", text, flags=re.DOTALL | re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for word in lexer:
            if set(word) <= set("|&;"):
                if words:
                    yield words
                words = []
            elif set(word) <= set("<>"):
                skip = True
            elif skip:
                skip = False
            elif words or not re.match(r"\w+=", word):
                words.append(word)
        if words:
            yield words


def _check_databus(arguments: list[str]) -> None:
    """Names and options of a command: typer parses them, nothing is run."""
    command: Any = typer.main.get_group(cli)
    name = "databus"
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        if isinstance(command, ShownByDefault) and arguments[0] not in command.commands:
            arguments = ["show", *arguments]
        name = arguments[0]
        assert name in command.commands, f"there is no command {name!r}"
        command, arguments = command.commands[name], arguments[1:]
    if arguments not in ([], ["--help"]) or not hasattr(command, "commands"):
        try:
            command.make_context(name, list(arguments))
        except Exception as error:
            if not re.search(r"path '[^']+' does not exist", str(error)):
                raise


def _check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {one for one in arguments if "=" not in one}
    assert named <= targets, f"make has no target {sorted(named - targets)}"


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for argument in (one for one in arguments[1:] if not one.startswith("-")):
        found = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?", argument)
        assert found, f"pip install {argument!r}"
        if found[1] == project["name"]:
            extras = set((found[2] or "").split(",")) - {""}
            assert extras <= set(project["optional-dependencies"]), f"no extras {extras}"


def _check_curl(arguments: list[str]) -> None:
    method = "GET"
    url = ""
    for index, argument in enumerate(arguments):
        if argument in ("-X", "--request"):
            method = arguments[index + 1]
        if argument.startswith("http://"):
            url = argument
    assert url, "curl without a URL"
    parts = urlsplit(url)
    operations = [
        operation
        for document in endpoints.documents().values()
        for path, methods in document["paths"].items()
        if re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), parts.path)
        for name, operation in methods.items()
        if name == method.lower()
    ]
    assert operations, f"no server answers {method} {parts.path}"
    known = {one["name"] for operation in operations for one in operation["parameters"]}
    assert {name for name, _ in parse_qsl(parts.query)} <= known, f"unknown parameter in {url}"


def _check_javascript(snippet: Snippet) -> None:
    node = shutil.which("node")
    if node:
        command = [node, "--input-type=module", "--check", "-"]
        done = subprocess.run(
            command, input=snippet.text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def _check_go(snippet: Snippet) -> None:
    gofmt = shutil.which("gofmt")
    if gofmt:
        done = subprocess.run(
            [gofmt, "-l"], input=snippet.text, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr or "not as gofmt writes it"


def _check_sql(snippet: Snippet) -> None:
    marked = snippet.marker.startswith(("rights:", "run:"))
    assert marked or snippet.text in _example_scripts(), (
        "SQL that no test runs; mark it: <!-- run: ... -->"
    )


def _example_scripts() -> set[str]:
    return {path.read_text() for path in (ROOT / "examples").rglob("*.sql")}


_KNOWN: dict[str, Callable[[list[str]], None]] = {
    "databus": _check_databus,
    "make": _check_make,
    "pip": _check_pip,
    "curl": _check_curl,
}
_CHECKERS: dict[str, Callable[[Snippet], None]] = {
    "python": _check_python,
    "toml": _check_toml,
    "sh": _check_shell,
    "js": _check_javascript,
    "go": _check_go,
    "sql": _check_sql,
    "json": lambda snippet: json.loads(snippet.text),
    "yaml": lambda snippet: yaml.safe_load(snippet.text),
    "text": lambda snippet: None,
}
