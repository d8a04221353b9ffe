"""Whether the packages of an extra are installed, by the package's own metadata.

What belongs here: the check, and the error that names the extra.  What does not: which module
needs which package; pyproject.toml lists the packages of each extra.

``importlib.metadata`` takes as long to import as this package's command line: functions import it.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator

from databus.common.errors import MissingDependency

DISTRIBUTION = "databus-cdc"
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")
_OF_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def version() -> str:
    """The version of the installed distribution; "unknown" in a tree that is not installed."""
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def require_extra(extra: str) -> None:
    """Check that every package of an extra is installed.

    Raises:
        MissingDependency: one is not.  It names the extra and the packages.
    """
    absent = sorted({name for name in packages_of(extra) if not _is_installed(name)})
    if absent:
        raise missing_extra(extra, absent)


def missing_extra(extra: str, packages: list[str], needed_by: str = "") -> MissingDependency:
    """The error for an extra some of whose packages, these, are not installed."""
    is_one = len(packages) == 1
    needs = f"; {needed_by} needs {'it' if is_one else 'them'}" if needed_by else ""
    return MissingDependency(
        f"{', '.join(packages)} {'is' if is_one else 'are'} not installed{needs}. "
        f"Install the extra that has it: pip install '{DISTRIBUTION}[{extra}]'",
        extra=extra,
        packages=packages,
    )


@contextlib.contextmanager
def imports_of_extra(extra: str, *, needed_by: str, package: str = "") -> Iterator[None]:
    """Imports in the block, of a package that an extra has.

    Raises:
        MissingDependency: it is not installed.  The error names package, extra and ``needed_by``.
    """
    try:
        yield
    except ImportError as error:
        missing = package or (error.name or "a package").partition(".")[0]
        raise missing_extra(extra, [missing], needed_by) from error


def extra_of(module: str) -> str | None:
    """The smallest extra that brings a module, by the name of its package; None if none does.

    The extra of a target of sinks only if no other one has the package: a sink names its own.
    """
    wanted = _canonical(module.partition(".")[0])
    sizes = Counter(extra for _, extra in _requirements() if extra)
    having = [extra for name, extra in _requirements() if extra and _canonical(name) == wanted]
    return min(having, key=lambda of: (of.startswith("sink-"), sizes[of], of), default=None)


def packages_of(extra: str) -> Iterator[str]:
    """The packages of an extra, with those of the extras that it includes."""
    return (name for name, of in _requirements() if of == extra)


def _requirements() -> Iterator[tuple[str, str | None]]:
    """Each requirement as (package, the extra of ours that requires it).

    In a wheel's metadata, the packages of included extras replace their names.
    """
    from importlib import metadata

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # A tree that is not installed has no metadata.
        return
    for line in lines:
        found, of = _REQUIREMENT.match(line), _OF_EXTRA.search(line)
        if found is not None:
            yield found[0], of[1] if of else None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(package: str) -> bool:
    from importlib import metadata

    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
