"""A store's runs as a document for terminals."""

from __future__ import annotations

from typing import Any

from databus.bootstrap.runs.manifest import Store


def describe(store: Store) -> dict[str, Any]:
    """What ``databus inspect runs`` shows."""
    manifest = store.read()
    return {
        "manifest": manifest.version,
        "snapshot": manifest.snapshot.to_json(),
        "runs": [run.summary() for run in manifest.runs],
        "retired": [retired.run.id for retired in manifest.retired],
        "unfinished": manifest.unfinished.summary() if manifest.unfinished else None,
        "applies": list(manifest.applies[-10:]),
    }
