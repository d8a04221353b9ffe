"""The walls of the house: what would silently break the namespace, the wheel or the rules."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.common import config, errors
from tests.support.public_names import LOCK_PATH, public_names
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
ROOMS = ("relay", "bootstrap", "client", "common", "cli")
GENERATED = {".nbi", ".nbc", ".pyc"}

rooms = pytest.mark.parametrize("room", ROOMS)


def package(room: str) -> Path:
    return ROOT / room / "databus" / room


def room_files(room: str) -> Iterator[Path]:
    for path in sorted(package(room).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in GENERATED:
            yield path


def room_modules() -> list[str]:
    found = []
    for room in ROOMS:
        for path in room_files(room):
            if path.suffix == ".py":
                parts = path.relative_to(ROOT / room).with_suffix("").parts
                found.append(".".join(parts).removesuffix(".__init__"))
    return found


def python_files() -> list[Path]:
    """All of our Python files; caches and generated folders are not ours."""
    folders = [package(room) for room in ROOMS] + [ROOT / "tests", ROOT / "benchmarks"]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def project_texts() -> list[Path]:
    """Every file that git knows or would take; without git, what the folders hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        suffixes = {".py", ".md", ".toml", ".yml", ".yaml", ".sh"}
        folders = [ROOT / name for name in (*ROOMS, "tests", "benchmarks", "docs", "scripts")]
        inside = [path for folder in folders for path in folder.rglob("*")]
        return [path for path in [*ROOT.glob("*.*"), *inside] if path.suffix in suffixes]
    names = listed.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


# -- the namespace


@rooms
def test_a_rooms_namespace_folder_holds_the_room_and_nothing_else(room: str) -> None:
    inside = {path.name for path in (ROOT / room / "databus").iterdir()} - {"__pycache__"}
    assert inside == {room}, "a stray file in a databus/ folder hides the other rooms"


@rooms
def test_a_room_and_its_folders_are_packages_and_typed(room: str) -> None:
    assert (package(room) / "py.typed").is_file()
    for folder in {path.parent for path in room_files(room) if path.suffix == ".py"}:
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


@rooms
def test_a_room_has_a_readme_of_one_screen(room: str) -> None:
    found = [
        path for path in (ROOT / room / "README.md", package(room) / "README.md") if path.is_file()
    ]
    assert len(found) == 1, f"{room} has {len(found)} README.md"
    assert len(found[0].read_text().splitlines()) <= 80


@pytest.mark.timeout(300)
def test_the_wheel_holds_every_file_of_every_room_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("databus_cdc-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {str(path.relative_to(ROOT / room)) for room in ROOMS for path in room_files(room)}
    assert packed == ours


def test_every_module_can_be_imported() -> None:
    for name in room_modules():
        importlib.import_module(name)


def test_the_client_imports_without_the_packages_of_the_other_rooms() -> None:
    foreign = "numba lmdb pyarrow pyspark asyncpg psycopg pymysql pymysqlreplication kazoo sqlglot"
    script = (
        "import sys\n"
        f"for name in {foreign.split()!r}: sys.modules[name] = None\n"
        "import databus.client\n"
        "[getattr(databus.client, name) for name in databus.client.__all__]\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=50 * PATIENCE)


# -- the public surface


@rooms
def test_the_public_names_of_a_room_exist(room: str) -> None:
    module = importlib.import_module(f"databus.{room}")
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []
    assert len(module.__all__) == len(set(module.__all__))


def test_the_public_names_are_those_that_are_locked() -> None:
    """After a wanted change: python -m tests.support.public_names > tests/public_names.txt"""
    assert public_names() == LOCK_PATH.read_text()


# -- the tools look at everything


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_mypy_checks_every_room_by_its_files() -> None:
    mypy = pyproject()["tool"]["mypy"]
    assert {f"{room}/databus/{room}" for room in ROOMS} <= set(mypy["files"])
    assert set(ROOMS) <= set(mypy["mypy_path"])
    assert mypy["strict"] is True
    for name in ("Makefile", ".pre-commit-config.yaml", ".ci/run"):
        assert not re.search(r"mypy.* (-p|--package)\b", (ROOT / name).read_text())


def test_ruff_coverage_and_the_import_contracts_know_every_room() -> None:
    tool = pyproject()["tool"]
    packages = {f"databus.{room}" for room in ROOMS}
    assert set(ROOMS) <= set(tool["ruff"]["src"])
    assert packages == set(tool["coverage"]["run"]["source_pkgs"])
    assert packages == set(tool["importlinter"]["root_packages"])


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_configuration_of_the_compose_file_is_accepted() -> None:
    for name in ("relay-a", "relay-b"):
        loaded = config.load(ROOT / "docker" / f"{name}.toml")
        assert [database.name for database in loaded.database] == ["shop", "crm"]
        assert loaded.cluster is not None
        assert loaded.cluster.relay == name
    assert config.load(ROOT / "docker" / "bootstrap.toml").bootstrap is not None
    assert config.load(ROOT / "docker" / "sink.toml").sink is not None


# -- house style


def test_no_file_of_a_room_is_longer_than_600_lines_and_no_test_longer_than_800() -> None:
    def limit(path: Path) -> int:
        return 600 if path.relative_to(ROOT).parts[0] in ROOMS else 800

    sizes = {path: len(path.read_text().splitlines()) for path in python_files()}
    assert {str(path): count for path, count in sizes.items() if count > limit(path)} == {}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("relay/databus/relay/processes/fetcher.py", "Fetcher"),
        ("client/databus/client/delivery/consumer_calls.py", "Delivery"),
        ("bootstrap/databus/bootstrap/log/hot_log.py", "HotLog"),
        ("relay/databus/relay/sources/mysql/binlog/binlog_decoder.py", "BinlogDecoder"),
    ],
)
def test_a_central_class_holds_fewer_than_twenty_attributes(path: str, name: str) -> None:
    """Those of its bases, which are in the same folder, included."""
    files = (ROOT / path).parent.glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    names = [name]
    for one in names:
        names += [base for base in map(ast.unparse, classes[one].bases) if base in classes]
    attributes = {
        node.attr
        for one in names
        for node in ast.walk(classes[one])
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    assert 5 < len(attributes) < 20, sorted(attributes)


def test_modules_are_named_after_things_of_the_domain() -> None:
    vague = {"utils", "util", "helpers", "helper", "base", "manager", "impl", "misc"}
    assert [path for path in python_files() if path.stem in vague] == []


def test_no_folder_holds_more_than_fifteen_modules() -> None:
    paths = [path for room in ROOMS for path in package(room).rglob("*.py")]
    counts = Counter(path.parent for path in paths if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > 15} == {}


def test_modules_and_classes_have_names_of_their_own_over_all_rooms() -> None:
    paths = [path for room in ROOMS for path in package(room).rglob("*.py")]
    modules = Counter(path.stem for path in paths if path.name != "__init__.py")
    classes = Counter(
        name
        for path in paths
        for name in re.findall(r"^class ([^\W_]\w*)", path.read_text(), re.MULTILINE)
    )
    assert [name for name, count in (modules + classes).items() if count > 1] == []


def test_folders_import_each_other_in_one_direction() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "import_graph.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_module_documents_what_it_is_for() -> None:
    docstring = re.compile(r"(?:#.*\n|\s)*r?[\"']")
    silent = [
        str(path)
        for path in python_files()
        if path.name != "__init__.py" and not docstring.match(path.read_text())
    ]
    assert silent == []


def test_nothing_is_left_to_do_in_the_code() -> None:
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
    found = [
        f"{path}:{number}"
        for path in python_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_each_silenced_tool_has_its_reason() -> None:
    """Behind the mark, or in a comment on the line above."""
    silenced = re.compile(r"# (?:no" + r"qa: [A-Z]+\d+|type: ig" + r"nore\[[a-z, -]+\])(.*)$")
    found = []
    for path in python_files():
        above = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            mark = silenced.search(line)
            if mark and len(mark[1]) < 8 and not above.lstrip().startswith("#"):
                found.append(f"{path}:{number}: {line.strip()}")
            above = line
    assert found == []


def test_the_texts_name_no_machine_and_no_registry() -> None:
    hosts = [
        "pypi" + ".org",
        "python" + "hosted",
        "deb." + "debian",
        "repo1." + "maven",
        "npm" + "js",
    ]
    paths = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/tmp/" + "brief"]
    unwanted = re.compile("|".join(re.escape(part) for part in [*hosts, *paths]))
    found = []
    for path in project_texts():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path}:{n}: {line}" for n, line in enumerate(lines, 1) if unwanted.search(line)]
    assert found == []


# -- what common promises to all


def test_every_error_has_a_code_of_its_own_and_a_hint_for_the_operator() -> None:
    for name in room_modules():
        importlib.import_module(name)
    pending = list(errors.DatabusError.__subclasses__())
    seen: dict[str, type[errors.DatabusError]] = {}
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if not cls.__module__.startswith("databus."):
            continue
        assert "code" in vars(cls), f"{cls.__name__} inherits its code"
        assert seen.setdefault(cls.code, cls) is cls, f"{cls.code} stands for two classes"
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
        assert 400 <= cls.status <= 599
        assert isinstance(cls.retry, bool)
        assert cls.hint.endswith(".")
        assert len(cls.hint) > 15
    assert {"scn_too_old", "unknown_database", "bad_filter", "not_seeded"} <= set(seen)
