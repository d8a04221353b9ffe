"""A store on S3, or on any server with its protocol.

Data goes through ``pyarrow.fs``; conditional writes (the manifest, the leases) and lists go
through boto3: see ``Bucket``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.run_storage import MANIFEST, RUNS, Document, Lease, RunFiles
from databus.common.errors import BucketError, StoreBusy, StoreError
from databus.common.storage.bucket import Bucket

_LOG = logging.getLogger("databus.bootstrap.runs.s3_storage")


@dataclass(frozen=True, slots=True)
class S3Files:
    """The objects of one run."""

    bucket: Bucket
    prefix: str

    @property
    def refusal(self) -> type[StoreError]:
        """The error that is raised for S3."""
        return BucketError

    def location(self, name: str) -> str:
        """``bucket/key``, as Arrow writes it."""
        return f"{self.bucket.name}/{self.prefix}{name}"

    def open(self, name: str) -> Any:
        """The object; it can go away while it is being read, and then reading fails."""
        return self.bucket.filesystem.open_input_file(self.location(name))

    def create(self, name: str) -> Any:
        """A new object; it appears when it is closed."""
        return self.bucket.filesystem.open_output_stream(self.location(name))

    def names(self) -> list[str]:
        """The names of the objects."""
        return self.bucket.keys(self.prefix)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self.bucket.delete([self.prefix + name])

    def settle(self, names: list[str]) -> None:
        """Nothing: an object is durable once its write was answered."""


class S3Storage:
    """One database's part of a bucket.

    Assumptions: reads and lists see every write that was answered before, and conditional
    writes (If-None-Match, If-Match) are respected.  Amazon's S3 does all of it since November 2024.
    """

    folder = None

    def __init__(
        self, bucket: Bucket, prefix: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self._now_s = now_s

    @property
    def url(self) -> str:
        """s3://bucket/prefix"""
        return f"s3://{self.bucket.name}/{self.prefix.rstrip('/')}"

    def create(self) -> None:
        """Nothing: there are no folders."""

    def read_manifest(self) -> Document | None:
        """The object, with its ETag."""
        found = self.bucket.get(self.prefix + MANIFEST)
        return Document(found.content, found.tag) if found else None

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """No lock: the condition of the write decides."""
        yield

    def replace_manifest(self, content: bytes, tag: str | None) -> bool:
        """One conditional write."""
        failpoints.reach("manifest.file_written")
        written = self.bucket.put(self.prefix + MANIFEST, content, tag) is not None
        failpoints.reach("manifest.renamed")
        return written

    @contextlib.contextmanager
    def lease(self, role: str, owner: str | None) -> Iterator[Lease]:
        """Hold an object that is renewed for as long as the block runs."""
        key = f"{self.prefix}{role}.lease"
        lease = S3Lease(self.bucket, key, role, owner, self._now_s)
        try:
            yield lease
        finally:
            lease.release()

    def run_ids(self) -> list[str]:
        """The folders below ``runs/``."""
        return self.bucket.keys(f"{self.prefix}{RUNS}/", folders=True)

    def files(self, run_id: str) -> RunFiles:
        """The objects below ``runs/<id>/``."""
        return S3Files(self.bucket, f"{self.prefix}{RUNS}/{run_id}/")

    def delete_run(self, run_id: str) -> None:
        """Delete the run's objects."""
        files = self.files(run_id)
        prefix = f"{self.prefix}{RUNS}/{run_id}/"
        self.bucket.delete([prefix + name for name in files.names()])

    def write_note(self, name: str, content: bytes, *, durable: bool = False) -> None:
        """Replace an object, without a condition; it is durable in any case."""
        self.bucket.replace(self.prefix + name, content)

    def read_note(self, name: str) -> bytes | None:
        """The object's content."""
        found = self.bucket.get(self.prefix + name)
        return found.content if found else None

    def note_names(self, prefix: str) -> list[str]:
        """The keys that begin with ``prefix``."""
        return [prefix + rest for rest in self.bucket.keys(self.prefix + prefix)]

    def delete_note(self, name: str) -> None:
        """Delete the object."""
        self.bucket.delete([self.prefix + name])


class S3Lease:
    """An object that names the writer or the applier, renewed every third of its time.

    Invariants:
        I1. It is taken from a holder only if that did not renew it for ``ttl_s``, by S3's own
            clock, or at once by the same ``owner``.
        I2. ``number`` grows with each holder.  The manifest stores the number of the last one that
            wrote, so a holder that slept past its time cannot write any more.

    Owner: the process; a thread of its own renews it.
    Raises: StoreBusy if another process holds it.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        role: str,
        owner: str | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket, self._key, self._role = bucket, key, role
        self._owner = owner or uuid.uuid4().hex
        self._ttl_s = bucket.options.lease_ttl
        self._now_s = now_s
        self._ended = threading.Event()
        self._is_lost = False
        self.number = 0
        self._renewals = 0
        self._take()
        self._renewed_s = now_s()
        self._thread = threading.Thread(target=self._keep, name=f"{role} lease", daemon=True)
        self._thread.start()

    def _holder(self) -> Mapping[str, Any]:
        """The part that identifies this holder."""
        return {
            "owner": self._owner,
            "number": self.number,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def _content(self, state: str) -> bytes:
        document = {
            "state": state,
            # Without it a renewal would not change the tag, and a waiting process could take a
            # lease that is held.
            "renewals": self._renewals,
            "ttl_s": self._ttl_s,
            **self._holder(),
        }
        return json.dumps(document).encode()

    def _take(self) -> None:
        found = self._bucket.get(self._key)
        tag = None
        if found is not None:
            tag = found.tag
            document = _lease_document(found.content, self._key)
            self.number = int(document["number"])
            is_held = document["state"] == "held" and found.age_s <= float(document["ttl_s"])
            if is_held and document["owner"] != self._owner:
                raise StoreBusy(
                    f"process {document['pid']} on {document['host']} is the {self._role} of "
                    f"s3://{self._bucket.name}/{self._key}, renewed {found.age_s:.0f} s ago; "
                    "there can be only one, and it is given up after "
                    f"{document['ttl_s']:.0f} s"
                )
        self.number += 1
        self._tag = self._write("held", tag)

    def _write(self, state: str, tag: str | None) -> str:
        content = self._content(state)
        for _ in range(2):
            written = self._bucket.put(self._key, content, tag)
            if written is not None:
                return written
            found = self._bucket.get(self._key)
            if found is None:
                break
            if found.content == content:
                return found.tag  # an attempt whose answer was lost
            document = _lease_document(found.content, self._key)
            if not self._holder().items() <= document.items():
                break
            tag = found.tag  # an earlier renewal, whose answer was lost
        raise StoreBusy(f"another {self._role} has just taken s3://{self._bucket.name}/{self._key}")

    def check(self) -> None:
        """Check that no other process can have taken it yet."""
        if self._is_lost or self._now_s() - self._renewed_s > self._ttl_s:
            raise StoreBusy(
                f"the lease of the {self._role} at s3://{self._bucket.name}/{self._key} was lost: "
                f"it was not renewed for {self._ttl_s:.0f} s; start again"
            )

    def renew(self) -> None:
        """Hold it for another ``ttl_s``."""
        began_s = self._now_s()
        self._renewals += 1
        self._tag = self._write("held", self._tag)
        self._renewed_s = began_s

    def _keep(self) -> None:
        while not self._ended.wait(self._ttl_s / 3):
            try:
                self.renew()
            except StoreBusy as error:
                self._is_lost = True
                _LOG.error("%s", error.message)
                return
            except StoreError as error:
                _LOG.warning("renewing a lease: %s", error.message)
            except Exception:
                _LOG.exception("renewing a lease")

    def release(self) -> None:
        """Release it, so that the next holder need not wait."""
        self._ended.set()
        self._thread.join()
        if not self._is_lost:
            with contextlib.suppress(StoreError):
                self._write("free", self._tag)


def _lease_document(content: bytes, key: str) -> Mapping[str, Any]:
    try:
        document = json.loads(content)
        if not isinstance(document, dict) or {"number", "state", "ttl_s"} - set(document):
            raise ValueError("not a lease")
    except ValueError as error:
        raise StoreError(
            f"{key} is no lease: {content[:80]!r}; delete it if no such process runs"
        ) from error
    return document
