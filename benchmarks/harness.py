"""What all benchmarks share: seeds, warm-up, repetition, machine facts, JSON.

A benchmark measures; it asserts nothing about time.  It prints a table, and writes one JSON
document, which is all that its plot reads (``python -m benchmarks.plot FILE``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Run:
    """The options of this run."""

    name: str
    smoke: bool
    seed: int
    repeats: int
    out: Path
    options: argparse.Namespace = field(default_factory=argparse.Namespace)


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one point: the median and how far they spread."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Largest less smallest, as a part of the median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "spread": self.spread, "values": list(self.values)}


@dataclass
class Report:
    """What a benchmark found, on its way to a table and a JSON document."""

    run: Run
    title: str
    unit: str
    settings: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    output_hash: str = ""
    notes: list[str] = field(default_factory=list)
    _cpu_before: Any = field(default_factory=psutil.cpu_times, repr=False)

    def add(self, sample: Sample, **labels: Any) -> None:
        """A measured point with its ``labels`` (series, x, and whatever distinguishes it)."""
        self.points.append({**labels, **sample.to_json()})
        where = ", ".join(f"{name} {value}" for name, value in labels.items())
        print(
            f"  {where:<58} {sample.median:>12,.1f} {self.unit}  ±{sample.spread / 2:.0%}",
            flush=True,
        )

    def note(self, text: str) -> None:
        """A line for people, such as a ratio to a limit."""
        self.notes.append(text)
        print(f"  {text}", flush=True)

    def write(self) -> Path:
        """Write the JSON document and print its path."""
        document: dict[str, Any] = {
            "name": self.run.name,
            "title": self.title,
            "unit": self.unit,
            "smoke": self.run.smoke,
            "seed": self.run.seed,
            "command": " ".join(["python", "-m", f"benchmarks.{self.run.name}", *sys.argv[1:]]),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine() | {"stolen": stolen(self._cpu_before)},
            "settings": self.settings,
            "points": self.points,
            "output_hash": self.output_hash,
            "notes": self.notes,
        }
        print(
            f"  of the processors' time, {document['machine']['stolen']:.0%} was the host's others'"
        )
        self.run.out.parent.mkdir(parents=True, exist_ok=True)
        self.run.out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"  output hash {self.output_hash}; written to {self.run.out}")
        return self.run.out


def start(
    name: str, description: str, extend: Callable[[argparse.ArgumentParser], None] | None = None
) -> Run:
    """Read the command line of a benchmark, with the options of its own that ``extend`` adds."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    if extend is not None:
        extend(parser)
    given = parser.parse_args()
    suffix = "-smoke" if given.smoke else ""
    out = given.out or RESULTS / f"{name}{suffix}.json"
    print(f"{name}: {description}")
    return Run(name, given.smoke, given.seed, 1 if given.smoke else given.repeats, out, given)


def measure(run: Run, once: Callable[[], float]) -> Sample:
    """``once`` measured ``repeats`` times after a warm-up that does not count."""
    if not run.smoke:
        once()
    return Sample(tuple(once() for _ in range(run.repeats)))


def measure_in_turns(run: Run, contenders: Mapping[str, Callable[[], float]]) -> dict[str, Sample]:
    """Each contender measured ``repeats`` times, one after the other in every round.

    So that what the machine does besides is the same for all of them, and a round's ratios are
    true even where its numbers are not.
    """
    if not run.smoke:
        for once in contenders.values():
            once()
    rounds = [[once() for once in contenders.values()] for _ in range(run.repeats)]
    return {
        name: Sample(values)
        for name, values in zip(contenders, zip(*rounds, strict=True), strict=True)
    }


def ratio(one: Sample, other: Sample) -> float:
    """The median of the ratios of rounds that were measured alternately."""
    return statistics.median(a / b for a, b in zip(one.values, other.values, strict=True))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def stolen(before: Any) -> float:
    """The part of the processors' time that other guests of the host have had since ``before``.

    Over a few hundredths, times are those of the host's other guests, and only ratios within one
    run are comparable.
    """
    now = psutil.cpu_times()
    spent = sum(now) - sum(before)
    return (
        round((getattr(now, "steal", 0.0) - getattr(before, "steal", 0.0)) / spent, 3)
        if spent
        else 0.0
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def numbers(text: str) -> list[int]:
    """An option that is a list, such as 1,5,10."""
    return [int(number) for number in text.split(",")]


def grid(*axes: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
    """All combinations, the last axis fastest."""
    if not axes:
        yield ()
        return
    first, *rest = (list(axis) for axis in axes)
    for value in first:
        for others in grid(*rest):
            yield (value, *others)
