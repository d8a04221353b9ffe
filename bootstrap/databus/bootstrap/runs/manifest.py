"""The manifest: which runs exist, as one small file that is replaced atomically.

Files are written first and the manifest is switched after, so a crash at any point leaves
either the old set of runs or the new one; what no manifest names is an orphan and is swept.
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
from databus.bootstrap.runs.parquet_runs import OpenRun, Run, RunKind
from databus.bootstrap.runs.run_storage import (
    MANIFEST,
    RUNS,
    Lease,
    LocalStorage,
    RunFiles,
    Storage,
)
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import FormatError, StoreBusy, StoreError

VERSION = 1
APPLIES_KEPT = 50
SWITCH_ATTEMPTS = 20
SWITCHES_KEPT = 32
DROPPED = "dropped.json"
"""The note of up to where the hot log has dropped what runs have."""


@dataclass(frozen=True, slots=True)
class Retired:
    """A run that is no longer planned with, kept a while for readers that are inside it."""

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

    ``fences`` are, by role, the number of the last holder of a lease that wrote; ``switches``
    are marks of the last switches, by which one whose answer was lost is known.  Both are
    empty where the store is a folder.
    """

    version: int = 0
    runs: tuple[Run, ...] = ()
    retired: tuple[Retired, ...] = ()
    applies: tuple[Mapping[str, Any], ...] = ()
    fences: tuple[tuple[str, int], ...] = ()
    switches: tuple[str, ...] = ()

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

    def find(self, run_id: str) -> Run | None:
        """The run of this id, retired or not."""
        everything = (*self.runs, *(retired.run for retired in self.retired))
        return next((run for run in everything if run.id == run_id), None)

    def with_changes(
        self, *, add: Run, drop: tuple[Run, ...] = (), made_of: tuple[Run, ...] = (), now_us: int
    ) -> Manifest:
        """``add`` in the place of ``drop``, which retire.

        Raises:
            StoreError: one of these, or of those that ``add`` was made of, is not there any more.
        """
        gone = {run.id for run in drop}
        needed = gone | {run.id for run in made_of}
        if needed - {run.id for run in self.runs}:
            raise StoreError(f"runs {sorted(needed)} are not all in manifest {self.version}")
        kept = [run for run in self.runs if run.id not in gone]
        kept.append(add)
        kept.sort(key=lambda run: (run.kind is not RunKind.BASE, run.start, run.stop))
        return replace(
            self,
            runs=tuple(kept),
            retired=(*self.retired, *(Retired(run, now_us) for run in drop)),
        )

    def without(self, drop: tuple[Run, ...], now_us: int) -> Manifest:
        """The manifest with ``drop`` retired."""
        gone = {run.id for run in drop}
        return replace(
            self,
            runs=tuple(run for run in self.runs if run.id not in gone),
            retired=(*self.retired, *(Retired(run, now_us) for run in drop)),
        )

    def with_apply(self, record: Mapping[str, Any]) -> Manifest:
        """The manifest with the record of an apply added, old ones dropped."""
        return replace(self, applies=(*self.applies, record)[-APPLIES_KEPT:])

    def problems(self) -> list[str]:
        """Which invariants do not hold, in words."""
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
        ids = [run.id for run in (*self.runs, *(retired.run for retired in self.retired))]
        if len(set(ids)) != len(ids):
            found.append(f"I3: run ids are not unique: {ids}")
        return found

    def encode(self) -> bytes:
        """The file's content."""
        document = {
            "v": VERSION,
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
            if document["v"] != VERSION:
                raise FormatError(
                    f"manifest: format {document['v']!r}, this program reads {VERSION}"
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
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"manifest: {error!r}") from error
        if problems := manifest.problems():
            raise FormatError(f"manifest {manifest.version}: {'; '.join(problems)}")
        return manifest


class Store:
    """One database's runs and their manifest, in a folder or wherever a ``Storage`` has them.

    Invariants:
        I1. A file that the manifest names is complete and durable.
        I2. The manifest is replaced, never written in place, and only by who has seen it.
        I3. Who lost its lease, knowing it or not, replaces nothing and deletes nothing.
        I4. Nothing is swept by a manifest that lacks what the log has dropped, or that is older
            than the runs that are there.

    Owner: any process reads; ``switch`` serialises those that write.
    Durability: when ``switch`` returns, the new manifest survives a power loss.
    Raises: StoreError for what the storage refuses, FormatError for a damaged manifest.
    """

    def __init__(self, place: Path | Storage) -> None:
        self.storage: Storage = LocalStorage(place) if isinstance(place, Path) else place
        self._leases: dict[str, Lease] = {}

    @property
    def url(self) -> str:
        """The place, for messages."""
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
        """Where a local store has its runs."""
        return self.folder / RUNS

    @property
    def manifest_path(self) -> Path:
        """Where a local store has its manifest."""
        return self.folder / MANIFEST

    def create(self) -> None:
        """Make what must exist before anything is written."""
        self.storage.create()

    def run_folder(self, run: Run | str) -> Path:
        """Where a local store has the files of a run."""
        return self.runs_folder / (run if isinstance(run, str) else run.id)

    def files(self, run: Run | str) -> RunFiles:
        """The files of a run, wherever they are."""
        return self.storage.files(run if isinstance(run, str) else run.id)

    def open_run(self, run: Run) -> OpenRun:
        """A run, open for reading.

        Raises:
            StoreError: a file is missing, cut or damaged.
        """
        return OpenRun(run, self.files(run))

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
            return Manifest.decode(found.content), found.tag
        except FormatError as error:
            raise FormatError(f"{self.url}/{MANIFEST}: {error.message}") from error

    def note_dropped(self, upto: Position | None) -> None:
        """Write down up to where the log has dropped what runs have; None: it has everything.

        A position is written after the manifest has it, and None before runs retire by a gap.
        """
        document = {"upto": None if upto is None else [upto.scn, upto.seq]}
        self.storage.write_note(DROPPED, json.dumps(document).encode())

    def dropped(self) -> Position | None:
        """What was written down last, or earlier; None too if nobody did."""
        try:
            upto = json.loads(self.storage.read_note(DROPPED) or b"{}")["upto"]
            return Position(int(upto[0]), int(upto[1]))
        except (IndexError, KeyError, TypeError, ValueError):
            return None  # No power loss that tears a note may stop anything.

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
            "names another place than before. Nothing was deleted. Bring back the newest "
            f"{MANIFEST}, or let store= name the place where the runs are; if they are lost, "
            "begin again with an empty data_dir (and an empty store)"
        )

    def _read_reaching(self) -> Manifest:
        """The manifest, which reaches what was written down as dropped."""
        while True:
            # The note first: the manifest has a position before it is written down.
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
        """Replace the manifest by what ``change`` makes of it, and return that.

        Raises:
            StoreBusy: a lease was lost, or others switch all the time.
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
                    changed = replace(changed, switches=(*current.switches, mark)[-SWITCHES_KEPT:])
                if problems := changed.problems():
                    raise StoreError(f"refusing to write a manifest that breaks {problems}")
                if self.storage.replace_manifest(changed.encode(), tag):
                    return changed
                time.sleep(0.01 * 2 ** min(attempt, 6) * (1 + os.urandom(1)[0] / 255))
        raise StoreBusy(f"{self.url}: the manifest was replaced by others {SWITCH_ATTEMPTS} times")

    def _fenced(self, current: Manifest) -> tuple[tuple[str, int], ...]:
        """The fences with our numbers in them; refuses one that another holder has passed."""
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

        ``owner`` names one that cannot run twice, and may take over from itself at once.

        Raises:
            StoreBusy: another process is; the message names it.
        """
        with self.storage.lease(role, owner) as lease:
            self._leases[role] = lease
            try:
                yield lease
            finally:
                del self._leases[role]

    def sweep(self, letters: str) -> list[str]:
        """Delete runs that no manifest names; returns their ids.

        Only runs whose id begins with one of ``letters`` are looked at: the caller holds the
        lease of the role that makes those, so none of them is just being written.

        Raises:
            StoreError: the manifest is not the newest; nothing was deleted.
        """
        found = [one for one in self.storage.run_ids() if one[:1] in letters and one[1:2] == "-"]
        named = self._read_reaching()
        if orphans := set(found) - _ids(named):
            self._require_newest(named, orphans)
            if any(lease.number for lease in self._leases.values()):
                # From here on nobody who held the lease before can name what is deleted now.
                named = self.switch(lambda manifest: manifest)
        known = _ids(named)
        swept = []
        for run_id in found:
            if run_id not in known:
                self.storage.delete_run(run_id)
                failpoints.reach("sweep.one_deleted")
                swept.append(run_id)
        return swept

    def _require_newest(self, manifest: Manifest, orphans: set[str]) -> None:
        """Refuse to delete runs beside a manifest that is older than they are.

        Merging takes a manifest, and what a merge replaced is deleted no earlier than a newer one
        is there.
        """
        there = set(self.storage.run_ids())
        active = _ids(replace(self.read(), retired=()))
        gone = sorted(
            run.id
            for run in manifest.runs
            if run.files and run.id not in there and run.id in active
        )
        merged = [one for one in orphans if one.startswith("c-")] if not manifest.version else []
        if not gone and not merged:
            return
        state = f"names {', '.join(gone[:3])}, of which no file is there" if gone else "is missing"
        raise StoreError(
            f"{self.url}/{MANIFEST} {state}, while there are {len(orphans)} runs that it does not "
            f"name ({', '.join(sorted(orphans)[:3])}): it was deleted or replaced by an older one. "
            f"Nothing was deleted. Bring back the newest {MANIFEST}; if it is lost, begin again "
            "with an empty data_dir (and an empty store)"
        )

    def collect(self, grace_us: int, letters: str, now_us: int | None = None) -> list[str]:
        """Forget runs that retired more than ``grace_us`` ago, and delete their files.

        A run stays while a reader is open that began before it retired.  Nothing else is deleted:
        a run that nobody names yet may be one that another role is just writing.
        """
        now = time.time_ns() // 1000 if now_us is None else now_us
        began_us = min((one.began_us for one in open_readers.held(self.storage, now)), default=None)
        forgotten: list[str] = []

        def expired(retired: Retired) -> bool:
            if began_us is not None and began_us <= retired.retired_us:
                return False
            return retired.run.id[0] in letters and retired.retired_us + grace_us <= now

        def forget(manifest: Manifest) -> Manifest:
            forgotten[:] = [r.run.id for r in manifest.retired if expired(r)]
            kept = tuple(r for r in manifest.retired if r.run.id not in forgotten)
            return replace(manifest, retired=kept)

        if any(expired(retired) for retired in self.read().retired):
            self.switch(forget)
            failpoints.reach("collect.manifest_switched")
        for run_id in forgotten:
            self.storage.delete_run(run_id)
            failpoints.reach("collect.one_deleted")
        return forgotten

    def check(self) -> list[str]:
        """Read every frame of every run; what is wrong, in words, one entry a run."""
        try:
            manifest = self.read()
        except (FormatError, StoreError) as error:
            return [error.message]
        problems = []
        try:
            self._read_reaching()
        except (FormatError, StoreError) as error:
            problems.append(error.message)
        for run in manifest.runs:
            try:
                opened = self.open_run(run)
                try:
                    opened.check()
                finally:
                    opened.close()
            except (FormatError, StoreError) as error:
                problems.append(error.message)
        return problems

    def describe(self) -> dict[str, Any]:
        """What ``databus inspect runs`` shows."""
        manifest = self.read()
        return {
            "manifest": manifest.version,
            "snapshot": manifest.snapshot.to_json(),
            "runs": [
                {
                    "kind": run.kind.value,
                    "start": run.start.to_json(),
                    "stop": run.stop.to_json(),
                    "rows": run.rows,
                    "file_bytes": run.file_bytes,
                    "files": len(run.files),
                    "id": run.id,
                }
                for run in manifest.runs
            ],
            "retired": [retired.run.id for retired in manifest.retired],
            "applies": list(manifest.applies[-10:]),
        }


def _ids(manifest: Manifest) -> set[str]:
    return {run.id for run in (*manifest.runs, *(r.run for r in manifest.retired))}


def new_run_id(kind: RunKind, stop: Position, entropy: Callable[[int], bytes] = os.urandom) -> str:
    """An id that no other run has; its letter says which role makes such runs."""
    letter = "s" if kind is RunKind.SEGMENT else "c"
    return f"{letter}-{stop.scn:016x}-{stop.seq:08x}-{entropy(4).hex()}"


def stop_of(run_id: str) -> Position | None:
    """Where the run of this id stops, told by the id alone; None for what is no run's id."""
    found = re.fullmatch(r"[cs]-([0-9a-f]{16})-([0-9a-f]{8})-[0-9a-f]+", run_id)
    return Position(int(found[1], 16), int(found[2], 16)) if found else None
