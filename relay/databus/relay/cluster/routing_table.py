"""The routing table: which relay serves which database, in which role, and how far it is.

The thread of the membership writes it into the data folder, and the HTTP workers serve it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from databus.common.errors import NotFound
from databus.relay.ring.data_folder import read_document, write_document

TABLE_NAME = "cluster.json"


def write_table(data_dir: Path, table: dict[str, Any]) -> None:
    """Replace the table."""
    write_document(data_dir / TABLE_NAME, json.dumps(table).encode(), durable=False)


def read_table(data_dir: Path) -> dict[str, Any]:
    """The newest table.

    Raises:
        NotFound: this relay is in no cluster, or has not come into contact with it yet.
    """
    content = read_document(data_dir / TABLE_NAME)
    if content is None:
        raise NotFound("this relay is in no cluster, or has not reached ZooKeeper yet")
    table: dict[str, Any] = json.loads(content)
    return table
