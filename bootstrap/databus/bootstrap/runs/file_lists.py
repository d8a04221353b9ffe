"""The file lists of large runs, each in a file of its own, which is read once.

A run never changes, so neither does its list.  With the lists of large runs apart, the manifest
stays small: a switch rewrites no list, and a process reads the list of a run once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import google_crc32c

from databus.bootstrap.runs.parquet_runs import Run, RunFile
from databus.bootstrap.runs.run_storage import Storage
from databus.common.errors import FormatError, StoreError
from databus.common.json_text import json_bytes

if TYPE_CHECKING:
    from databus.bootstrap.runs.manifest import Manifest

LIST_NAME = "files.json"
LISTED_APART = 256
"""Runs with more files have a list of their own: it costs a read, but shorter switches."""


class FileLists:
    """The lists of one store's runs.

    Invariants:
        I1. A list that a manifest names is complete and durable.
        I2. In memory are the lists of the manifest that was read last, and no others.

    Owner: a ``Store``; any thread.  Two threads may read the same list at once.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._read: dict[tuple[str, str], tuple[RunFile, ...]] = {}

    def complete(self, manifest: Manifest) -> Manifest:
        """A manifest as it was decoded, with the files of all runs.

        Raises:
            FormatError: a list is damaged.  StoreError: it is missing.
        """
        known = self._read
        listed = [run for run in manifest.all_runs if run.listing]
        if not listed:
            return manifest
        self._read = read = {
            (run.id, run.listing): known.get((run.id, run.listing)) or self._load(run)
            for run in listed
        }
        return manifest.with_runs(
            lambda run: replace(run, files=read[run.id, run.listing]) if run.listing else run
        )

    def _load(self, run: Run) -> tuple[RunFile, ...]:
        files = self._storage.files(run.id)
        location = files.location(LIST_NAME)
        try:
            with files.open(LIST_NAME) as source:
                content = source.read()
        except OSError as error:
            raise files.refusal(f"the file list of run {run.id} cannot be read: {error}") from error
        if (crc := f"{google_crc32c.value(content):08x}") != run.listing:
            raise FormatError(f"{location} has the CRC {crc}, the manifest states {run.listing}")
        try:
            # One document a line: a single one would take several times its size in memory.
            return tuple(RunFile.from_json(json.loads(line)) for line in content.splitlines())
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{location}: {error!r}") from error

    def store(self, manifest: Manifest, known: set[str]) -> Manifest:
        """A manifest as it is written; the lists of runs that are not among ``known`` are durable.

        Raises:
            StoreError: a list cannot be written.
        """
        return manifest.with_runs(lambda run: run if run.id in known else self._stored(run))

    def _stored(self, run: Run) -> Run:
        """The run as the manifest names it; its list, if it needs one, is durable.

        Raises:
            StoreError: the list cannot be written.
        """
        if len(run.files) <= LISTED_APART:
            return run
        content = b"".join(json_bytes(file.to_json()) + b"\n" for file in run.files)
        files = self._storage.files(run.id)
        try:
            with files.create(LIST_NAME) as sink:
                sink.write(content)
        except OSError as error:
            location = files.location(LIST_NAME)
            raise StoreError(f"{location} cannot be written: {error}") from error
        files.settle([LIST_NAME])
        listing = f"{google_crc32c.value(content):08x}"
        self._read = {**self._read, (run.id, listing): run.files}
        return replace(run, listing=listing)
