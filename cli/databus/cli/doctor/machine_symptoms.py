"""What the machine shows on which relay or bootstrap server run: disks, folders, descriptors."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from databus.cli.doctor.symptoms import Symptom, byte_count
from databus.common.config import Config

LEAST_FREE_BYTES = 1 << 30
LEAST_FREE_SHARE = 0.05
OF_THE_PROCESS = 256
"""Descriptors that a server needs beside those of its connections."""


def symptoms_of(config: Config) -> Iterator[Symptom]:
    """What is wrong here for the servers of a configuration."""
    for folder, needed_bytes in _folders(config):
        yield from _of_folder(folder, needed_bytes)
    yield from _of_descriptors(config)
    yield from _of_java(config)


def _folders(config: Config) -> Iterator[tuple[Path, int]]:
    """The folders, and the bytes that their fixed files still take."""
    if config.relay is not None:
        missing = 0
        for database in config.database:
            folder = config.relay.data_dir / database.name
            there = sum(one.stat().st_blocks * 512 for one in folder.rglob("*") if one.is_file())
            missing += max(0, database.ring_bytes - there)
        yield config.relay.data_dir, missing
    if config.bootstrap is not None:
        yield config.bootstrap.data_dir, 0


def _of_folder(folder: Path, needed_bytes: int) -> Iterator[Symptom]:
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    usage = shutil.disk_usage(existing)
    least = max(LEAST_FREE_BYTES, int(usage.total * LEAST_FREE_SHARE))
    if usage.free - needed_bytes < least:
        free = f"{byte_count(usage.free)} of {byte_count(usage.total)} are free"
        if needed_bytes:
            free += f", of which the rings still take {byte_count(needed_bytes)}"
        yield Symptom(
            str(folder),
            free,
            "Free some space, make ring_bytes or log_retention smaller, or move data_dir to a "
            "larger disk. A full disk stops the writer; nothing is lost while the source retains "
            "its log.",
            is_fatal=usage.free < needed_bytes,
        )
    if folder.exists() and folder.stat().st_mode & 0o077:
        yield Symptom(
            str(folder),
            f"other users may open it (mode {folder.stat().st_mode & 0o777:04o}); it has rows of "
            "the database",
            f"Run: chmod 700 {folder}",
        )


def _of_descriptors(config: Config) -> Iterator[Symptom]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    sections = {"relay": config.relay, "bootstrap": config.bootstrap}
    for name, section in sections.items():
        if section is None or soft == resource.RLIM_INFINITY:
            continue
        wanted = section.max_connections + OF_THE_PROCESS
        if soft < wanted:
            yield Symptom(
                "this machine",
                f"a process may open {soft} files, and [{name}] max_connections is "
                f"{section.max_connections}",
                f"Raise the limit (systemd: LimitNOFILE={wanted}; shell: ulimit -n {wanted}), or "
                "lower max_connections. At the limit the server refuses connections.",
            )


def _of_java(config: Config) -> Iterator[Symptom]:
    section = config.bootstrap
    if section is not None and section.merge_with == "spark" and shutil.which("java") is None:
        yield Symptom(
            "this machine",
            'merge_with = "spark", and there is no java',
            'Install Java 17 or later, or set merge_with = "process" in [bootstrap].',
            is_fatal=True,
        )
