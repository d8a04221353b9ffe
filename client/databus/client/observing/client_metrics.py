"""The metrics of a client: their names, and their values out of ``Status``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from databus.client.client import DatabusClient, Status
from databus.client.groups.group_client import GroupClient, GroupStatus
from databus.client.merged.merged_client import MergedClient, MergedStatus


@dataclass(frozen=True, slots=True)
class ClientMetric:
    """One metric; its value is None where it is not known."""

    name: str
    is_counter: bool
    meaning: str
    value: Callable[[Status], float | None]

    def samples(self, clients: tuple[DatabusClient, ...]) -> Iterator[tuple[float, dict[str, str]]]:
        """The value of each client where it is known, and its labels."""
        for client in clients:
            value = self.value(client.status)
            if value is not None:
                labels = {"database": client.database, "client": client.options.client_name}
                yield float(value), labels


CLIENT_METRICS = (
    ClientMetric("events", True, "Events delivered.", lambda one: one.event_count),
    ClientMetric("windows", True, "Windows delivered.", lambda one: one.window_count),
    ClientMetric("rollbacks", True, "Rollbacks.", lambda one: one.rollback_count),
    ClientMetric("bootstraps", True, "Bootstraps started.", lambda one: one.bootstrap_count),
    ClientMetric("gaps", True, "Gaps accepted with on_gap.", lambda one: one.gap_count),
    ClientMetric("failures", True, "Failed requests to servers.", lambda one: one.failure_count),
    ClientMetric(
        "lag_seconds",
        False,
        "Time since the commit of the oldest event that is not delivered; 0 if there is none.",
        lambda one: one.lag_s,
    ),
    ClientMetric(
        "lag_windows",
        False,
        "Windows that have arrived whole or in part and are not delivered.",
        lambda one: one.lag_windows,
    ),
    ClientMetric(
        "buffered_bytes",
        False,
        "Bytes received that no checkpoint covers.",
        lambda one: one.buffered_bytes,
    ),
    ClientMetric(
        "position_scn",
        False,
        "SCN of the last window delivered.",
        lambda one: one.position.scn if one.position else None,
    ),
    ClientMetric(
        "checkpoint_scn",
        False,
        "SCN of the last stored checkpoint.",
        lambda one: one.checkpoint.position.scn if one.checkpoint else None,
    ),
    ClientMetric(
        "newest_scn",
        False,
        "SCN of the newest position that a server has reported.",
        lambda one: one.newest.scn if one.newest else None,
    ),
    ClientMetric("flowing", False, "1 while an answer of a relay is open.", lambda s: s.is_flowing),
    ClientMetric("paused", False, "1 while the client is paused.", lambda one: one.is_paused),
)


@dataclass(frozen=True, slots=True)
class GroupMetric:
    """One metric of a member of a group."""

    name: str
    is_counter: bool
    meaning: str
    value: Callable[[GroupStatus], float]

    def samples(self, members: tuple[GroupClient, ...]) -> Iterator[tuple[float, dict[str, str]]]:
        """The value of each member, and its labels."""
        for member in members:
            status = member.status
            yield float(self.value(status)), {"group": member.group, "member": status.member}


GROUP_METRICS = (
    GroupMetric(
        "group_partitions_owned",
        False,
        "Partitions that the member delivers.",
        lambda one: len(one.owned),
    ),
    GroupMetric(
        "group_partitions", False, "Partitions of the group.", lambda one: one.partition_count
    ),
    GroupMetric(
        "group_members",
        False,
        "Members whose leases have not ended, as this one has read them.",
        lambda one: one.member_count,
    ),
    GroupMetric(
        "group_lease_left_seconds",
        False,
        "Time until the member's lease ends if it is not renewed.",
        lambda one: one.lease_left_s,
    ),
    GroupMetric(
        "group_partitions_assigned",
        True,
        "Partitions that the member has got.",
        lambda one: one.assigned_count,
    ),
    GroupMetric(
        "group_partitions_lost",
        True,
        "Partitions whose lease ended before the member had given them up.",
        lambda one: one.lost_count,
    ),
)


@dataclass(frozen=True, slots=True)
class MergeMetric:
    """One metric of the streams of a merge; its value is None where it is not known."""

    name: str
    is_counter: bool
    meaning: str
    value: Callable[[MergedStatus, str], float | None]

    def samples(self, merges: tuple[MergedClient, ...]) -> Iterator[tuple[float, dict[str, str]]]:
        """The value of each stream where it is known, and its labels."""
        for merge in merges:
            status = merge.status
            for stream in merge.streams:
                value = self.value(status, stream)
                if value is not None:
                    labels = {"stream": stream, "client": merge.options.client_name}
                    yield float(value), labels


MERGE_METRICS = (
    MergeMetric(
        "merge_stalled",
        False,
        "1 for a stream that has held back the others for stall_s, or is left behind.",
        lambda status, stream: stream in status.stalled,
    ),
    MergeMetric(
        "merge_holds_back",
        False,
        "1 for a stream that must bring more before the next window comes.",
        lambda status, stream: stream in status.held_by,
    ),
    MergeMetric(
        "merge_resolved_timestamp_seconds",
        False,
        "Merged time before which every window was given; the same for all streams of a merge.",
        lambda status, stream: status.resolved_us / 1e6 if status.resolved_us else None,
    ),
)
