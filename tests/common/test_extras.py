"""Which packages an extra needs, read from the installed distribution's own metadata."""

from __future__ import annotations

from importlib import metadata

import pytest

from databus.common.errors import MissingDependency
from databus.common.extras import extra_of, packages_of, require_extra, version


def test_every_extra_that_a_command_needs_is_declared_and_installed_here() -> None:
    for extra in ("client", "relay", "bootstrap", "export", "spark", "demo", "inspect"):
        assert set(packages_of(extra)), extra
        require_extra(extra)
    assert "aiohttp" in set(packages_of("bootstrap")), "an extra brings what it includes"
    assert not set(packages_of("no-such-extra"))


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = metadata.distribution

    def without(name: str) -> metadata.Distribution:
        if name in ("uvloop", "numba"):
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", without)
    with pytest.raises(MissingDependency) as caught:
        require_extra("relay")
    assert caught.value.message == (
        "numba, uvloop are not installed. "
        "Install the extra that has it: pip install 'databus-cdc[relay]'"
    )
    assert caught.value.details["packages"] == ["numba", "uvloop"]
    require_extra("client")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("aiohttp.web", "client"),
        ("pymysql", "relay"),
        ("uvloop", "bootstrap"),
        ("pyiceberg.catalog", "export"),
        ("psycopg", "demo"),
        ("no_such_module", None),
    ],
)
def test_the_extra_of_a_module_is_the_smallest_that_brings_its_package(
    module: str, extra: str | None
) -> None:
    assert extra_of(module) == extra


def test_the_version_is_that_of_the_distribution() -> None:
    assert version() == metadata.version("databus-cdc")
