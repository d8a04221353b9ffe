"""The document of a cluster in memory, with faults to order."""

from __future__ import annotations

from collections.abc import Callable

from databus.common.errors import StoreError
from databus.relay.cluster.cluster_document import ClusterDocument
from databus.relay.cluster.shared_document import StoredDocument


class MemoryDocument:
    """A document in memory; ``between`` runs in front of each replacement."""

    name = "the document"

    def __init__(self) -> None:
        self.content: bytes | None = None
        self.number = 0
        self.between: Callable[[], None] = lambda: None
        self.loses_answer = False

    def read(self) -> StoredDocument | None:
        return StoredDocument(self.content, str(self.number)) if self.content is not None else None

    def replace(self, content: bytes, tag: str | None) -> bool:
        self.between()
        if tag != (str(self.number) if self.content is not None else None):
            return False
        self.content, self.number = content, self.number + 1
        ClusterDocument.from_bytes(content).check()
        if self.loses_answer:
            self.loses_answer = False
            raise StoreError("the answer is lost")
        return True

    def close(self) -> None:
        """Nothing."""
