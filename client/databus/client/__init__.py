"""The client library: read the committed changes of a database, at whichever server holds them."""

from __future__ import annotations

from databus.client.application.consumer import Consumer, Result
from databus.client.application.events import Event, Window
from databus.client.application.options import Options
from databus.client.checkpoints.checkpoint_stores import (
    ApplicationCheckpoints,
    CheckpointStore,
    FileCheckpoints,
    LmdbCheckpoints,
    NoCheckpoints,
)
from databus.client.checkpoints.checkpoint_table import StoredCheckpoint
from databus.client.checkpoints.database_checkpoints import (
    AsyncpgCheckpoints,
    DatabaseCheckpoints,
)
from databus.client.client import DatabusClient, Status
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.deadletters.dead_letter_stores import (
    CallbackDeadLetters,
    DatabaseDeadLetters,
    DeadLetterStore,
    FileDeadLetters,
)
from databus.client.delivery.dead_letter_replay import Replayed
from databus.client.delivery.pulled_windows import (
    AsyncPulledWindow,
    AsyncWindows,
    PulledWindow,
    Windows,
)
from databus.client.groups.group_client import GroupClient, GroupStatus, PartitionListener
from databus.client.groups.group_leases import AsyncpgLeases, DatabaseLeases
from databus.client.groups.owned_partition import OwnedPartition
from databus.client.merged.merged_client import MergedClient, MergedStatus, MergeStream
from databus.client.merged.merged_windows import (
    AsyncMergedWindow,
    AsyncMergedWindows,
    MergedWindow,
    MergedWindows,
)
from databus.client.pulling.raw_windows import RawWindows
from databus.client.tables.data_batch import DataBatch
from databus.common.checkpoint import (
    BootstrapCheckpoint,
    Checkpoint,
    MergedCheckpoint,
    OnlineCheckpoint,
    Position,
)
from databus.common.checkpoint import decode as decode_checkpoint
from databus.common.checkpoint import encode as encode_checkpoint

__all__ = [
    "ApplicationCheckpoints",
    "AsyncMergedWindow",
    "AsyncMergedWindows",
    "AsyncPulledWindow",
    "AsyncWindows",
    "AsyncpgCheckpoints",
    "AsyncpgLeases",
    "BootstrapCheckpoint",
    "CallbackDeadLetters",
    "Checkpoint",
    "CheckpointStore",
    "Consumer",
    "DataBatch",
    "DatabaseCheckpoints",
    "DatabaseDeadLetters",
    "DatabaseLeases",
    "DatabusClient",
    "DeadLetter",
    "DeadLetterStore",
    "Event",
    "FileCheckpoints",
    "FileDeadLetters",
    "GroupClient",
    "GroupStatus",
    "LmdbCheckpoints",
    "MergeStream",
    "MergedCheckpoint",
    "MergedClient",
    "MergedStatus",
    "MergedWindow",
    "MergedWindows",
    "NoCheckpoints",
    "OnlineCheckpoint",
    "Options",
    "OwnedPartition",
    "PartitionListener",
    "Position",
    "PulledWindow",
    "RawWindows",
    "Replayed",
    "Result",
    "Status",
    "StoredCheckpoint",
    "Window",
    "Windows",
    "decode_checkpoint",
    "encode_checkpoint",
]
