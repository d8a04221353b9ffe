"""What a person meets first: help with examples, and errors in one clear line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from databus.cli.main import advice, exit_code
from databus.common.errors import (
    BadFilter,
    BadRequest,
    ConfigError,
    DumpFailed,
    PreflightFailed,
    ServerUnavailable,
)
from tests.support.broken_body import breaking_off

COMMANDS = ("relay", "bootstrap", "apply", "check", "tail", "dump", "status", "demo")
COMMANDS += ("inspect", "init")
INSPECTIONS = ("ring", "log", "runs", "checkpoint")

RELAY = '[relay]\nlisten = "127.0.0.1:{port}"\ndata_dir = "relay"\n'
DATABASE = '[[database]]\nname = "made"\nurl = "{url}"\n'


def config(folder: Path, text: str) -> Path:
    path = folder / "databus.toml"
    path.write_text(text)
    return path


def assert_one_clear_line(done: Any, code: int, *fragments: str) -> None:
    """The error, and below it what to do; no traceback."""
    assert done.code == code, done.err
    lines = done.err.splitlines()
    assert len(lines) == 2, done.err
    assert lines[0].startswith("databus: ")
    assert lines[1].startswith("  ")
    for fragment in fragments:
        assert fragment in lines[0]


@pytest.mark.parametrize(
    "words", [(one,) for one in COMMANDS] + [("inspect", one) for one in INSPECTIONS]
)
def test_the_help_of_each_command_shows_an_example_of_it(
    databus: Any, words: tuple[str, ...]
) -> None:
    done = databus(*words, "--help")
    assert done.code == 0
    _, _, examples = done.out.partition("Example")
    assert f"databus {' '.join(words)}" in examples
    assert done.err == ""


def test_the_version_is_shown(databus: Any) -> None:
    done = databus("--version")
    assert (done.code, done.out) == (0, f"databus {metadata.version('databus-cdc')}\n")


@pytest.mark.parametrize(
    "words",
    [("relay", "-c", "x.toml"), ("check", "x.toml"), ("demo",), ("apply", "--once", "-c", "x")],
)
def test_a_package_that_is_not_installed_is_one_line_with_the_extra_that_has_it(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """As in an installation without extras: neither the module nor its metadata is found."""
    code = (
        "import sys\n"
        "from importlib import metadata\n"
        "found = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name in ('uvloop', 'google-crc32c'):\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.distribution = distribution\n"
        "sys.modules['numba'] = sys.modules['uvloop'] = None\n"
        f"sys.argv = ['databus', *{words!r}]\n"
        "from databus.cli.main import app\n"
        "app()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    first, second = done.stderr.splitlines()
    assert first.startswith("databus: missing_dependency: "), done.stderr
    assert "pip install 'databus-cdc[" in first
    assert second.startswith("  ")
    assert done.returncode == 1


def test_the_help_lists_every_command(databus: Any) -> None:
    done = databus("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert f" {command} " in done.out


HEAVY = ("numba", "pydantic", "aiohttp", "pyarrow", "pyspark", "lmdb", "uvloop", "rich")


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        (
            "from databus.cli.main import app\ntry: app()\nexcept SystemExit: pass",
            (*HEAVY, "numpy", "asyncio", "ssl", "http.client", "importlib.metadata"),
        ),
        ("from databus.client import Consumer, DatabusClient, FileCheckpoints", HEAVY),
    ],
)
def test_the_help_and_the_client_load_nothing_heavy(statement: str, heavy: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.argv = ['databus', '--help']\n{statement}\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_of_a_command_shows_each_example_on_a_line_of_its_own(databus: Any) -> None:
    done = databus("dump", "--help")
    assert done.code == 0
    examples = [line for line in done.out.splitlines() if "databus dump http" in line]
    assert len(examples) > 1
    assert all(line.count("databus dump") == 1 for line in examples)


def test_the_list_of_commands_has_their_whole_summaries(databus: Any) -> None:
    for words in (["--help"], ["checkpoint", "--help"]):
        _, *lines = databus(*words).out.splitlines()
        assert [line for line in lines if line.endswith("...")] == []


@pytest.mark.parametrize(
    "words",
    [
        ("relay",),
        ("relay", "-c"),
        ("nosuch",),
        ("tail",),
        ("tail", "http://127.0.0.1:9/shop", "--bogus"),
        ("status",),
        ("dump", "http://127.0.0.1:9/shop", "--chunk-rows", "many"),
        ("inspect", "ring", "/no/such/folder"),
    ],
)
def test_a_wrong_command_line_is_explained_with_exit_code_2(
    databus: Any, words: tuple[str, ...]
) -> None:
    done = databus(*words)
    assert done.code == 2, done.err
    assert "Error" in done.err
    assert not {"databus:", "Traceback"} & set(done.err.split())


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (("relay", "-c", "missing.toml"), "missing.toml: No such file"),
        (("bootstrap", "-c", "missing.toml"), "missing.toml: No such file"),
        (("check", "missing.toml"), "missing.toml: No such file"),
        (("apply", "-c", "missing.toml"), "either --once or --every"),
        (("apply", "-c", "missing.toml", "--once", "--every", "1s"), "either --once or --every"),
        (("apply", "-c", "missing.toml", "--every", "soon"), "--every: 'soon' is not a duration"),
        (("bootstrap", "-c", "missing.toml", "--role", "chief"), "--role 'chief' is not one of"),
        (("tail", "http://127.0.0.1:9/shop", "--format", "xml"), "--format 'xml' is neither"),
        (("tail", "http://127.0.0.1:9/shop", "--from", "then"), "--from 'then' is not one of"),
        (("tail", "http://127.0.0.1:9/shop", "--from", "bootstrap"), "needs --bootstrap URL"),
        (("tail", "http://127.0.0.1:9/shop", "--until-idle", "2"), "--until-idle: '2' is not"),
        (("tail", "http://127.0.0.1:9/shop", "--partition", "odd"), "partition 'odd' is none of"),
        (("tail", "http://127.0.0.1:9/shop", "--ops", "c,x"), "'x'"),
        (("tail", "127.0.0.1:9/shop"), "is not RELAY_URL/DATABASE"),
        (("tail", "http://127.0.0.1:9"), "is not RELAY_URL/DATABASE"),
        (("dump", "http://127.0.0.1:9/shop", "--list", "--pause", "x"), "give one of --list"),
        (("status", "127.0.0.1:9"), "is not an http:// or https:// URL"),
        (("demo", "--db", "oracle"), "--db 'oracle' is not one of sqlite"),
        (("demo", "--cluster", "--picture", "a.svg"), "--picture is for the demo without"),
        (("demo", "--duration", "3"), "--duration 3.0 is too short"),
    ],
)
def test_a_wrong_argument_is_one_line_with_exit_code_2(
    databus: Any, words: tuple[str, ...], fragment: str
) -> None:
    assert_one_clear_line(databus(*words), 2, fragment)


@pytest.mark.parametrize(
    ("command", "text", "fragment"),
    [
        ("relay", '[relay]\nlistn = "127.0.0.1:1"\n', "relay.listn; did you mean listen?"),
        ("relay", "[relay]\nworkers = 0\n", "relay.workers"),
        ("relay", "[relay\n", "not TOML"),
        ("relay", "[relay]\n", "at least one [[database]]"),
        ("relay", "[bootstrap]\n", "needs [relay]"),
        ("bootstrap", "[relay]\n", "there is no [bootstrap] section"),
        ("relay", RELAY.format(port=1) + DATABASE.format(url="oracle://x"), "scheme is 'oracle'"),
    ],
)
def test_a_wrong_configuration_names_the_file_and_the_key_with_exit_code_2(
    databus: Any, tmp_path: Path, command: str, text: str, fragment: str
) -> None:
    path = config(tmp_path, text)
    assert_one_clear_line(databus(command, "-c", path), 2, str(path), fragment)


def test_apply_without_a_bootstrap_section_is_a_wrong_configuration(
    databus: Any, tmp_path: Path
) -> None:
    path = config(tmp_path, "[relay]\n")
    assert_one_clear_line(databus("apply", "-c", path, "--once"), 2, "no [bootstrap] section")


@pytest.mark.parametrize(
    "words",
    [("status", "{}"), ("tail", "{}/shop"), ("dump", "{}/shop"), ("dump", "{}/shop", "--list")],
)
def test_a_refused_connection_is_one_line_with_the_address_and_exit_code_1(
    databus: Any, free_port: Callable[[], int], words: tuple[str, ...]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = databus(*(word.format(url) for word in words))
    assert_one_clear_line(done, 1, "server_unavailable", url, "Connection refused")


def test_an_error_answer_that_breaks_off_is_one_line_with_the_address(databus: Any) -> None:
    with breaking_off(503) as url:
        assert_one_clear_line(databus("status", url), 1, "server_unavailable", url, "answered 503")


def test_status_shows_the_error_of_every_server_that_does_not_answer(
    databus: Any, free_port: Callable[[], int]
) -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    assert_one_clear_line(databus("status", *urls), 1, *urls)


def test_a_password_is_in_no_message(
    databus: Any, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    url = f"mariadb://reader:hunter2@127.0.0.1:{free_port()}/shop"
    path = config(tmp_path, RELAY.format(port=1) + DATABASE.format(url=url))
    done = databus("check", path)
    assert_one_clear_line(done, 1)
    assert "hunter2" not in done.out + done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (BadRequest("x"), 2),
        (BadFilter("x"), 2),
        (PreflightFailed("x"), 3),
        (DumpFailed("x"), 1),
        (ServerUnavailable("x"), 1),
    ],
)
def test_the_kind_of_an_error_is_in_the_exit_code(error: Any, code: int) -> None:
    assert exit_code(error) == code


def test_advice_speaks_to_the_person_at_the_terminal() -> None:
    assert "--help" in advice(BadRequest("x"))
    assert "again with back-off" not in advice(ServerUnavailable("x"))
    assert advice(DumpFailed("x")) == DumpFailed.hint
