"""What a relay of a cluster does for a database: it leads, or it follows the leader.  Pure."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

from databus.common.config import ClusterConfig, DatabaseConfig
from databus.common.config_values import SourceUrl

CLUSTER_TABLE = "databus_cluster"
"""The table of a cluster without ZooKeeper; see ``document_row``."""
_SERVER_IDS = 1 << 30
_RULES = (
    "exclude_sources",
    "include_columns",
    "exclude_columns",
    "hash_columns",
    "hash_salt",
    "mask_columns",
    "null_columns",
    "truncate_columns",
    "skipped_operations",
    "keys",
    "sources",
)


@dataclass(frozen=True, slots=True)
class DatabaseRole:
    """``leader`` and ``address`` are the leader's name and URL, ``epoch`` its fencing number."""

    kind: Literal["leader", "follower"]
    epoch: int
    leader: str
    address: str

    @property
    def leads(self) -> bool:
        """Whether this relay reads the database itself."""
        return self.kind == "leader"

    def to_json(self) -> dict[str, Any]:
        """For the handover."""
        return asdict(self)


def as_configured(
    role: DatabaseRole, database: DatabaseConfig, cluster: ClusterConfig
) -> DatabaseConfig:
    """The configuration of the fetcher: that of the file, or of a relay that follows the leader."""
    if role.leads:
        options = _leaders_options(database, cluster)
        # Each beat of each relay changes the row.
        own = () if cluster.zookeeper else (f"*.{CLUSTER_TABLE}",)
        excluded = (*database.exclude_sources, *own)
        return database.model_copy(update={"options": options, "exclude_sources": excluded})
    fields = DatabaseConfig.model_fields
    rules = {name: fields[name].get_default(call_default_factory=True) for name in _RULES}
    credentials = {name: path for name, path in cluster.credentials if path}
    options = {
        **credentials,
        "release": True,
        "follower": cluster.relay,
        "least_epoch": role.epoch,
    }
    url = SourceUrl(f"relay+{role.address}/{database.name}")
    return database.model_copy(update={**rules, "url": url, "options": options})


def _leaders_options(
    database: DatabaseConfig, cluster: ClusterConfig
) -> dict[str, str | int | float | bool]:
    """The options with which the server ends the connection of a leader before this one."""
    url = database.url.reveal
    if url.startswith("postgres"):
        return {**database.options, "take_over": True}
    if not url.startswith(("mariadb", "mysql")) or "server_id=" in url:
        return database.options
    server_id = _SERVER_IDS + zlib.crc32(f"{cluster.name}:{database.name}".encode()) % _SERVER_IDS
    return {"server_id": server_id, **database.options}
