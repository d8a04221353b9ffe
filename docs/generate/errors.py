"""The catalogue of errors, from their classes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import databus
from databus.common.errors import DatabusError, registry

_INTRODUCTION = """# Errors

An error has a stable `code`. Over HTTP it is a problem document (RFC 9457) with the fields `type`,
`title`, `status`, `detail`, `code`, `retry` and `hint`; within a stream of frames it is an ERROR
frame with the same document. In Python it is an exception of the class that is named here, from
`databus.common.errors` unless the entry names another module. **Retry** means that the same call
may succeed later without any change.
"""


def classes() -> dict[str, type[DatabusError]]:
    """Every error by its code; all modules are imported first."""
    for module in pkgutil.walk_packages(databus.__path__, "databus."):
        importlib.import_module(module.name)
    return dict(sorted(registry().items()))


def page() -> str:
    """The page in Markdown."""
    return "\n".join([_INTRODUCTION, *(_entry(*item) for item in classes().items())])


def _entry(code: str, error: type[DatabusError]) -> str:
    module = "" if error.__module__ == "databus.common.errors" else f"`{error.__module__}`."
    meaning = (inspect.getdoc(error) or "").partition("\n\n")[0].replace("``", "`")
    retry = "yes" if error.retry else "no"
    return (
        f"## `{code}` {{ #{code} }}\n\n{' '.join(meaning.split())}\n\n"
        f"**HTTP status:** {error.status} · **Retry:** {retry} · "
        f"**Class:** {module}`{error.__name__}`\n\n**What to do:** {error.hint}\n"
    )
