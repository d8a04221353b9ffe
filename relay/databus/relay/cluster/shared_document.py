"""The document of a cluster in its store: an object on S3, or a row (``document_row``)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from databus.common.config import ClusterConfig
from databus.common.storage.bucket import Bucket, open_bucket

LEASE_SHARE = 0.25
"""The part of a lease after which a store that does not answer is given up."""


class StoredDocument(NamedTuple):
    """The content, and a tag that every replacement changes."""

    content: bytes
    tag: str


class SharedDocument(Protocol):
    """One document that several relays replace.

    Invariants:
        I1. A replacement is made only on top of the version with the given tag.
        I2. ``read`` gives what every replacement before it has left.

    Raises: DatabusError if the store does not answer.  Then a replacement may have been made.
    """

    @property
    def name(self) -> str:
        """The document for messages."""

    def read(self) -> StoredDocument | None:
        """The document; None if there is none yet."""

    def replace(self, content: bytes, tag: str | None) -> bool:
        """Replace the version with this tag (None: make it if there is none).

        ``content`` differs from every content before.  False if another version is there; on S3 it
        may be on top of this one, if an answer was lost.
        """

    def close(self) -> None:
        """Close the connection."""


class DocumentObject:
    """The document as an object on S3, by conditional writes."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key

    @property
    def name(self) -> str:
        """See ``SharedDocument``."""
        return f"s3://{self._bucket.name}/{self._key}"

    def read(self) -> StoredDocument | None:
        """See ``SharedDocument``."""
        found = self._bucket.get(self._key)
        return StoredDocument(found.content, found.tag) if found is not None else None

    def replace(self, content: bytes, tag: str | None) -> bool:
        """See ``SharedDocument``."""
        return self._bucket.commit(self._key, content, tag) is not None

    def close(self) -> None:
        """Nothing to close."""


def open_document(config: ClusterConfig) -> SharedDocument:
    """The document of a cluster; nothing is connected or made yet.

    Raises:
        ConfigError: the store's URL or an option of it is wrong.
        MissingDependency: its library is not installed.
    """
    answer_s = config.lease * LEASE_SHARE
    if not config.store.reveal.startswith("s3://"):
        from databus.relay.cluster.document_row import open_row

        return open_row(config.store.reveal, config.name, answer_s)
    limits = {"request_timeout": min(config.s3.request_timeout, answer_s), "attempts": 2}
    bucket, prefix = open_bucket(config.store.reveal, config.s3.model_copy(update=limits))
    return DocumentObject(bucket, f"{prefix}{config.name}.cluster")
