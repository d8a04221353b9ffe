"""One finding of ``databus doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Symptom:
    """What is wrong, and the cure."""

    where: str
    """A URL, a database at one, a folder, or this machine."""
    problem: str
    """What was found, with its values."""
    cure: str
    """What to do, as an imperative."""
    is_fatal: bool = False
    """Whether changes do not arrive, or will be lost."""

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}. {self.cure}"


def duration(seconds: float) -> str:
    """Seconds as a text with one unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def byte_count(count: float) -> str:
    """Bytes as a text with one unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
