"""The manifest: which runs exist, as one small file that is replaced atomically.

Files are written first and the manifest is switched after, so a crash at any point leaves
either the old set of runs or the new one; what no manifest names is an orphan and is deleted.
Two processes switch it, the log writer (segments) and the applier (compacted runs); each
holds its own lease for as long as it works.  A switch is a compare-and-set: under a short lock
in a folder, by a conditional write on an object store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import google_crc32c

from databus.bootstrap.runs import failpoints, open_readers
from databus.bootstrap.runs.file_lists import FileLists
from databus.bootstrap.runs.open_run import FileSlot, OpenRun, Wanted
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.bootstrap.runs.run_storage import (
    MANIFEST,
    RUNS,
    Lease,
    LocalStorage,
    RunFiles,
    Storage,
)
from databus.bootstrap.runs.unfinished_merge import UnfinishedMerge
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import FormatError, StoreBusy, StoreError

VERSION, LISTING_VERSION = 2, 3
"""The formats that are written: the second one if the file list of a run is apart."""
READABLE = (1, 2, 3)
MOST_APPLIES = 50
SWITCH_ATTEMPTS = 20
MOST_SWITCHES = 32
DROPPED = "dropped.json"
"""The note with the position up to which the hot log has dropped what runs have."""


@dataclass(frozen=True, slots=True)
class Retired:
    """A run that no plan uses any more, stored a while for readers that are inside it."""

    run: Run
    retired_us: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The runs of one database's store.

    Invariants:
        I1. ``chain`` (segments and deltas) is adjacent and ascending: each run starts where
            the one before stops.
        I2. There is at most one base; it starts at the origin and stops where a run of the
            chain stops, or inside one, or where the chain starts.
        I3. Run ids are unique, retired ones included.
        I4. The inputs of ``unfinished`` are runs, in order.

    ``fences`` are, by role, the number of the last holder of a lease that wrote.  ``switches`` are
    marks of the last switches: a writer that lost the answer to a switch finds its mark here.  Both
    are empty if the store is a folder.  ``record`` names the log's record, if there is one.
    """

    version: int = 0
    runs: tuple[Run, ...] = ()
    retired: tuple[Retired, ...] = ()
    applies: tuple[Mapping[str, Any], ...] = ()
    fences: tuple[tuple[str, int], ...] = ()
    switches: tuple[str, ...] = ()
    record: str = ""
    unfinished: UnfinishedMerge | None = None

    @property
    def base(self) -> Run | None:
        """The snapshot, if there is one."""
        return next((run for run in self.runs if run.kind is RunKind.BASE), None)

    @property
    def chain(self) -> tuple[Run, ...]:
        """Segments and deltas, oldest first."""
        return tuple(run for run in self.runs if run.kind is not RunKind.BASE)

    @property
    def stop(self) -> Position | None:
        """Where the runs end and the hot log begins; None while there are none."""
        chain = self.chain
        return chain[-1].stop if chain else None

    @property
    def snapshot(self) -> Position:
        """Where the base ends."""
        return self.base.stop if self.base else ORIGIN

    @property
    def unfinished_inputs(self) -> tuple[Run, ...]:
        """The runs that the unfinished merge merges; none without one."""
        inputs = self.unfinished.inputs if self.unfinished else ()
        return tuple(run for run in self.runs if run.id in inputs)

    @property
    def all_runs(self) -> tuple[Run, ...]:
        """The runs, retired ones included."""
        return (*self.runs, *(retired.run for retired in self.retired))

    def find(self, run_id: str) -> Run | None:
        """The run of this id, retired or not."""
        return next((run for run in self.all_runs if run.id == run_id), None)

    def with_runs(self, change: Callable[[Run], Run]) -> Manifest:
        """The manifest with each run, retired or not, as ``change`` returns it."""
        return replace(
            self,
            runs=tuple(map(change, self.runs)),
            retired=tuple(replace(one, run=change(one.run)) for one in self.retired),
        )

    def with_changes(
        self, *, add: Run, drop: tuple[Run, ...] = (), made_of: tuple[Run, ...] = (), now_us: int
    ) -> Manifest:
        """The manifest with ``add`` in location of the runs ``drop``, which retire.

        Raises:
            StoreError: one of these, or of the inputs of ``add``, is gone.
        """
        gone = {run.id for run in drop}
        needed = gone | {run.id for run in made_of}
        if needed - {run.id for run in self.runs}:
            raise StoreError(f"runs {sorted(needed)} are not all in manifest {self.version}")
        remaining = [run for run in self.runs if run.id not in gone]
        remaining.append(add)
        remaining.sort(key=lambda run: (run.kind is not RunKind.BASE, run.start, run.stop))
        return replace(
            self,
            runs=tuple(remaining),
            retired=(*self.retired, *(Retired(run, now_us) for run in drop)),
            unfinished=self._unfinished_without(needed, add.kind),
        )

    def without(self, drop: tuple[Run, ...], now_us: int) -> Manifest:
        """The manifest with ``drop`` retired."""
        gone = {run.id for run in drop}
        return replace(
            self,
            runs=tuple(run for run in self.runs if run.id not in gone),
            retired=(*self.retired, *(Retired(run, now_us) for run in drop)),
            unfinished=self._unfinished_without(gone),
        )

    def _unfinished_without(
        self, gone: set[str], added: RunKind | None = None
    ) -> UnfinishedMerge | None:
        """The unfinished merge; None if an input is gone or merged, or if it made a second base."""
        one = self.unfinished
        if one is None or gone & set(one.inputs):
            return None
        return None if added is RunKind.BASE and one.kind is RunKind.BASE else one

    def with_unfinished(self, unfinished: UnfinishedMerge) -> Manifest:
        """The manifest with the state of a merge.

        Raises:
            StoreError: one of its inputs is gone.
        """
        if missing := set(unfinished.inputs) - {run.id for run in self.runs}:
            raise StoreError(f"runs {sorted(missing)} are not in manifest {self.version}")
        return replace(self, unfinished=unfinished)

    def with_apply(self, record: Mapping[str, Any]) -> Manifest:
        """The manifest with the record of an apply added, old ones dropped."""
        return replace(self, applies=(*self.applies, record)[-MOST_APPLIES:])

    def problems(self) -> list[str]:
        """The invariants that do not hold, as messages."""
        found = []
        chain = self.chain
        for before, after in itertools.pairwise(chain):
            if before.stop != after.start:
                found.append(f"I1: {before.id} stops at {before.stop}, {after.id} starts later")
        found += [f"I1: {run.id} covers nothing" for run in chain if run.start >= run.stop]
        bases = [run for run in self.runs if run.kind is RunKind.BASE]
        if len(bases) > 1 or any(run.start != ORIGIN for run in bases):
            found.append(f"I2: bases are {[(run.id, run.start) for run in bases]}")
        if bases and chain and not chain[0].start <= bases[0].stop <= chain[-1].stop:
            found.append(f"I2: the base stops at {bases[0].stop}, outside of the chain")
        ids = [run.id for run in self.all_runs]
        if len(set(ids)) != len(ids):
            found.append(f"I3: run ids are not unique: {ids}")
        if self.unfinished is not None:
            inputs = tuple(run.id for run in self.unfinished_inputs)
            if inputs != self.unfinished.inputs:
                found.append(f"I4: {self.unfinished.inputs} are merged, of which {inputs} are here")
        return found

    def encode(self) -> bytes:
        """The file's content."""
        document = {
            "v": LISTING_VERSION if any(run.listing for run in self.all_runs) else VERSION,
            "version": self.version,
            "runs": [run.to_json() for run in self.runs],
            "retired": [
                {"run": retired.run.to_json(), "retired_us": retired.retired_us}
                for retired in self.retired
            ],
            "applies": list(self.applies),
        }
        if self.fences or self.switches:
            document |= {"fences": dict(self.fences), "switches": list(self.switches)}
        document |= {"record": self.record} if self.record else {}
        if self.unfinished is not None:
            document["unfinished"] = self.unfinished.to_json()
        body = json.dumps(document, separators=(",", ":")).encode()
        return body + f"\n{google_crc32c.value(body):08x}\n".encode()

    @staticmethod
    def decode(content: bytes) -> Manifest:
        """The manifest that ``encode`` wrote.

        Raises:
            FormatError: any other bytes.
        """
        body, _, rest = content.partition(b"\n")
        expected = f"{google_crc32c.value(body):08x}\n".encode()
        if rest != expected:
            raise FormatError(f"manifest: CRC line is {rest[:20]!r}, expected {expected!r}")
        try:
            document = json.loads(body)
            if document["v"] not in READABLE:
                raise FormatError(
                    f"manifest: format {document['v']!r}, this program reads "
                    f"{', '.join(map(str, READABLE))}"
                )
            manifest = Manifest(
                version=int(document["version"]),
                runs=tuple(Run.from_json(run) for run in document["runs"]),
                retired=tuple(
                    Retired(Run.from_json(item["run"]), int(item["retired_us"]))
                    for item in document["retired"]
                ),
                applies=tuple(dict(record) for record in document["applies"]),
                fences=tuple(
                    sorted((str(k), int(v)) for k, v in document.get("fences", {}).items())
                ),
                switches=tuple(map(str, document.get("switches", ()))),
                record=_note_name(document.get("record", "")),
                unfinished=UnfinishedMerge.from_json(document.get("unfinished")),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"manifest: {error!r}") from error
        if problems := manifest.problems():
            raise FormatError(f"manifest {manifest.version}: {'; '.join(problems)}")
        return manifest


class Store:
    """One database's runs and their manifest, in a folder or another ``Storage``.

    Invariants:
        I1. A file that the manifest names is complete and durable.
        I2. The manifest is replaced, never written in location, and only by a process that read it.
        I3. A process that lost its lease, noticed or not, replaces nothing and deletes nothing.
        I4. No orphan is deleted by a manifest that lacks what the log has dropped, or that is older
            than the existing runs.

    Owner: any process reads; ``switch`` serialises those that write.
    Durability: when ``switch`` returns, the new manifest survives a power loss.
    Raises: StoreError for what the storage refuses, FormatError for a damaged manifest.
    """

    def __init__(self, location: Path | Storage) -> None:
        self.storage: Storage = LocalStorage(location) if isinstance(location, Path) else location
        self._leases: dict[str, Lease] = {}
        self._decoded: tuple[bytes, Manifest] = (b"", Manifest())
        self._lists = FileLists(self.storage)

    @property
    def url(self) -> str:
        """The location, for messages."""
        return self.storage.url

    @property
    def folder(self) -> Path:
        """The folder of a local store.

        Raises:
            StoreError: it is not on a local disk.
        """
        if self.storage.folder is None:
            raise StoreError(f"{self.url} is not a local folder")
        return self.storage.folder

    @property
    def runs_folder(self) -> Path:
        """The folder of a local store's runs."""
        return self.folder / RUNS

    @property
    def manifest_path(self) -> Path:
        """The path of a local store's manifest."""
        return self.folder / MANIFEST

    def create(self) -> None:
        """Make what must exist before the first write."""
        self.storage.create()

    def run_folder(self, run: Run | str) -> Path:
        """The folder of a run's files in a local store."""
        return self.runs_folder / (run if isinstance(run, str) else run.id)

    def files(self, run: Run | str) -> RunFiles:
        """The files of a run, in any storage."""
        return self.storage.files(run if isinstance(run, str) else run.id)

    def open_run(
        self, run: Run, wanted: Wanted | None = None, slot: FileSlot | None = None
    ) -> OpenRun:
        """A run to be read: all of its files, or those that ``wanted`` chooses; see ``OpenRun``."""
        return OpenRun(run, self.storage.files, wanted, slot)

    def exists(self) -> bool:
        """Whether there is a manifest."""
        return self.storage.read_manifest() is not None

    def read(self) -> Manifest:
        """The manifest as it is now; an empty one before the first switch."""
        return self._read()[0]

    def _read(self) -> tuple[Manifest, str | None]:
        found = self.storage.read_manifest()
        if found is None:
            return Manifest(), None
        try:
            decoded = self._decoded
            if decoded[0] != found.content:
                manifest = self._lists.complete(Manifest.decode(found.content))
                self._decoded = decoded = found.content, manifest
            return decoded[1], found.tag
        except StoreError:
            # A list may be gone because another manifest has replaced this one meanwhile.
            if self.storage.read_manifest() == found:
                raise
            return self._read()
        except FormatError as error:
            raise FormatError(f"{self.url}/{MANIFEST}: {error.message}") from error

    def note_dropped(self, upto: Position | None) -> None:
        """Store the position up to which the log has dropped what runs have; None: nothing dropped.

        A position is written after the manifest has it, and None before runs retire by a gap.
        """
        document = {"upto": None if upto is None else list(upto)}
        self.storage.write_note(DROPPED, json.dumps(document).encode())

    def dropped(self) -> Position | None:
        """The position stored last, or an earlier one; None also if none was stored."""
        try:
            upto = json.loads(self.storage.read_note(DROPPED) or b"{}")["upto"]
            return Position(int(upto[0]), int(upto[1]))
        except (IndexError, KeyError, TypeError, ValueError):
            return None  # A note that a power loss has torn must not stop anything.

    def require_reach(self, manifest: Manifest, upto: Position | None) -> None:
        """Refuse a manifest whose runs do not reach ``upto``, up to where the log has dropped.

        Raises:
            StoreError: with both positions, and what can be done.
        """
        if upto is None or (manifest.stop is not None and upto <= manifest.stop):
            return
        found = "is not there"
        if manifest.version:
            end = f"end at {manifest.stop}" if manifest.stop else "are none"
            found = f"is version {manifest.version}, whose runs {end}"
        raise StoreError(
            f"the log has dropped everything up to {upto} because runs have it, but "
            f"{self.url}/{MANIFEST} {found}: it was deleted or replaced by an older one, or store= "
            "names another location than before. Nothing was deleted. Restore the newest "
            f"{MANIFEST}, or let store= name the location of the runs; if they are lost, "
            "start again with an empty data_dir (and an empty store)"
        )

    def _read_reaching(self) -> Manifest:
        """The manifest; its runs reach the position that was stored as dropped."""
        while True:
            # The note first: the manifest has a position before the note does.
            upto = self.dropped()
            manifest = self.read()
            try:
                self.require_reach(manifest, upto)
            except StoreError:
                if self.dropped() == upto:
                    raise
            else:
                return manifest

    def switch(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Replace the manifest by the result of ``change``, and return that.

        Raises:
            StoreBusy: a lease was lost, or other processes switch all the time.
        """
        mark = os.urandom(4).hex() if self.storage.folder is None else ""
        with self.storage.switching():
            for attempt in range(SWITCH_ATTEMPTS):
                current, tag = self._read()
                if mark and mark in current.switches:
                    return current  # an attempt whose answer was lost
                changed = replace(
                    change(current), version=current.version + 1, fences=self._fenced(current)
                )
                if mark:
                    changed = replace(changed, switches=(*current.switches, mark)[-MOST_SWITCHES:])
                changed = self._lists.store(changed, _ids(current))
                if problems := changed.problems():
                    raise StoreError(f"refusing to write a manifest that breaks {problems}")
                if self.storage.replace_manifest(content := changed.encode(), tag):
                    self._decoded = content, changed
                    return changed
                time.sleep(0.01 * 2 ** min(attempt, 6) * (1 + os.urandom(1)[0] / 255))
        raise StoreBusy(f"{self.url}: the manifest was replaced by others {SWITCH_ATTEMPTS} times")

    def _fenced(self, current: Manifest) -> tuple[tuple[str, int], ...]:
        """The fences with our numbers in them; refuses if another holder has a higher one."""
        fences = dict(current.fences)
        for role, lease in self._leases.items():
            lease.check()
            if fences.get(role, 0) > lease.number:
                raise StoreBusy(
                    f"another {role} has taken over {self.url}: its number is {fences[role]}, "
                    f"ours {lease.number}; nothing was changed"
                )
            if lease.number:
                fences[role] = lease.number
        return tuple(sorted(fences.items()))

    @contextlib.contextmanager
    def lease(self, role: str, owner: str | None = None) -> Iterator[Lease]:
        """Be the only ``role`` ("writer", "applier") of this store while the block runs.

        ``owner`` names a process that cannot run twice; it may take over from itself at once.

        Raises:
            StoreBusy: another process holds it; the message names that process.
        """
        with self.storage.lease(role, owner) as lease:
            self._leases[role] = lease
            try:
                yield lease
            finally:
                del self._leases[role]

    def sweep(self, letters: str) -> list[str]:
        """Delete runs that no manifest names; returns their ids.

        Only runs whose id begins with one of ``letters`` are considered: the caller holds the
        lease of the role that makes those, so none of them is just being written.

        Raises:
            StoreError: the manifest is not the newest; nothing was deleted.
        """
        found = [one for one in self.storage.run_ids() if one[:1] in letters and one[1:2] == "-"]
        named = self._read_reaching()
        if orphans := set(found) - _ids(named) - set(_shared(named)):
            self._require_newest(named, orphans)
            if any(lease.number for lease in self._leases.values()):
                # From here on no former holder of the lease can name what is deleted now.
                named = self.switch(lambda manifest: manifest)
        swept = []
        known, shared = _ids(named), _shared(named)
        for run_id in found:
            if run_id not in known and self._delete_unshared(run_id, shared):
                failpoints.reach("sweep.one_deleted")
                swept.append(run_id)
        return swept

    def _delete_unshared(self, run_id: str, shared: Mapping[str, set[str]]) -> bool:
        """Delete the files that no other run has taken over; whether that is the whole folder."""
        names = shared.get(run_id)
        if not names:
            self.storage.delete_run(run_id)
            return True
        files = self.storage.files(run_id)
        for name in files.names():
            if name not in names:
                files.delete(name)
        return False

    def _require_newest(self, manifest: Manifest, orphans: set[str]) -> None:
        """Refuse to delete runs if the manifest is older than they are.

        A merge switches to a new manifest, and deletes what it replaced only after that.
        """
        there = set(self.storage.run_ids())
        active = _ids(replace(self.read(), retired=()))
        gone = sorted(
            run.id
            for run in manifest.runs
            if run.id not in there and run.id in active and not all(f.folder for f in run.files)
        )
        merged = [one for one in orphans if one.startswith("c-")] if not manifest.version else []
        if not gone and not merged:
            return
        state = f"names {', '.join(gone[:3])}, of which no file exists" if gone else "is missing"
        raise StoreError(
            f"{self.url}/{MANIFEST} {state}, while there are {len(orphans)} runs that it does not "
            f"name ({', '.join(sorted(orphans)[:3])}): it was deleted or replaced by an older one. "
            f"Nothing was deleted. Restore the newest {MANIFEST}; if it is lost, start again "
            "with an empty data_dir (and an empty store)"
        )

    def collect(self, grace_us: int, letters: str, now_us: int | None = None) -> list[str]:
        """Remove runs that retired more than ``grace_us`` ago, and delete their files.

        A run stays while a reader is open that began before it retired.  Nothing else is deleted:
        a run that no manifest names yet may be one that another role is just writing.
        """
        now = time.time_ns() // 1000 if now_us is None else now_us
        forgotten: list[Run] = []

        def expired(manifest: Manifest) -> list[Run]:
            # Read within the switch: a reader that notes a retired run waits for its lock.
            began = [one.began_us for one in open_readers.held(self.storage, now)]
            latest_us = min([now - grace_us, *(began_us - 1 for began_us in began)])
            old = (one.run for one in manifest.retired if one.retired_us <= latest_us)
            return [run for run in old if run.id[0] in letters]

        def forget(manifest: Manifest) -> Manifest:
            forgotten[:] = expired(manifest)
            remaining = tuple(r for r in manifest.retired if r.run not in forgotten)
            return replace(manifest, retired=remaining)

        named = self.read()
        if expired(named):
            named = self.switch(forget)
            failpoints.reach("collect.manifest_switched")
        # A file that a later run has taken over stays; its folder may be that of an earlier run.
        known, shared = _ids(named), _shared(named)
        for folder in dict.fromkeys(f for run in forgotten for f in (run.id, *_folders(run))):
            if folder not in known:
                self._delete_unshared(folder, shared)
                failpoints.reach("collect.one_deleted")
        return [run.id for run in forgotten]

    def check(self) -> list[str]:
        """Read all frames of runs and of an unfinished merge; problems as messages, one a run."""
        try:
            manifest = self.read()
        except (FormatError, StoreError) as error:
            return [error.message]
        problems = []
        try:
            self._read_reaching()
        except (FormatError, StoreError) as error:
            problems.append(error.message)
        one = manifest.unfinished
        for run in (*manifest.runs, *([one.as_run(manifest.unfinished_inputs)] if one else ())):
            try:
                with contextlib.closing(self.open_run(run)) as opened:
                    opened.check()
            except (FormatError, StoreError) as error:
                problems.append(error.message)
        return problems


def _note_name(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"(record-[0-9a-f-]+\.json)?", value):
        return value
    raise ValueError(f"{value!r} is not the name of a record")


def _ids(manifest: Manifest) -> set[str]:
    return {run.id for run in manifest.all_runs}


def _folders(run: Run) -> Iterator[str]:
    """The folders of other runs in which files of a run lie."""
    return (file.folder for file in run.files if file.folder)


def _shared(manifest: Manifest) -> dict[str, set[str]]:
    """By folder, the files in it that other runs have taken over, or an unfinished merge made."""
    found: dict[str, set[str]] = {}
    for file in manifest.unfinished.files if manifest.unfinished else ():
        found.setdefault(file.folder, set()).add(file.name)
    for run in manifest.all_runs:
        for file in run.files:
            if file.folder:
                found.setdefault(file.folder, set()).add(file.name)
    return found
