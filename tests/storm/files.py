"""``python -m tests.storm.files --seed 1``: each file of each store, flipped and cut.

Whatever is wrong with a file, opening and reading its store gives an error that names the file, or
the data that was there: never other data, a crash, or no answer.  A case follows from the seed, the
store and its number.  Cases run in a process of their own, which one may end.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HANG_S = 60
EDGE_BYTES = 640
KINDS = ("right data", "earlier or less data", "named errors", "differences")


@dataclass(frozen=True, slots=True)
class Damage:
    """One file with one bit flipped, or cut at a position (``bit`` of -1)."""

    file: str
    position: int
    bit: int

    def __str__(self) -> str:
        what = "cut" if self.bit < 0 else f"bit {self.bit} flipped"
        return f"{self.file} at {self.position} {what}"


@dataclass(slots=True)
class Report:
    """What was seen of one store."""

    counts: Counter[str] = field(default_factory=Counter)
    files: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)


def damages(sizes: dict[str, int], seed: str, most: int) -> list[Damage]:
    """At most about ``most`` for each file: both ends of it whole, then positions by the seed."""
    rng, found = random.Random(seed), []
    for file, size in sizes.items():
        positions = list(range(size))
        if size > most:
            edges = [*range(min(EDGE_BYTES, size)), *range(max(0, size - EDGE_BYTES), size)]
            rng.shuffle(edges)
            positions = [*edges[: most // 3], *(rng.randrange(size) for _ in range(most * 2 // 3))]
        found += [Damage(file, position, rng.randrange(8)) for position in positions]
        cuts = positions if size <= most else rng.sample(positions, most // 4)
        found += [Damage(file, position, -1) for position in cuts]
    return found


# ---- the child ----------------------------------------------------------------------------


class Cases:
    """A store in a folder, damaged again and again.

    Invariants:
        I1. Each case begins with the files as they were built, in the same inodes.

    Owner: the child process.
    """

    def __init__(self, name: str, folder: Path, seed: str, most: int) -> None:
        from tests.storm.file_stores import STORES

        self.store, self.folder = STORES[name], folder
        self.store.build(folder)
        self.content = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        files = sorted({p for one in self.store.files for p in folder.glob(one) if p.is_file()})
        sizes = {str(p.relative_to(folder)): len(self.content[p]) for p in files}
        self.damages = damages({file: size for file, size in sizes.items() if size}, seed, most)
        self.whole = self.store.read(folder)
        self.restore()
        assert self.store.read(folder) == self.whole, "reading twice gives two results"
        self.restore()

    def restore(self, changed: Path | None = None) -> None:
        """Put back what a case has changed."""
        if changed is not None and not self.store.is_written:
            changed.write_bytes(self.content[changed])
            return
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.content:
                path.unlink()
        for path, content in self.content.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def run(self, case: Damage) -> tuple[int, str]:
        """(which of KINDS, what was seen)."""
        from databus.common.errors import DatabusError

        path = self.folder / case.file
        data = self.content[path]
        if case.bit < 0:
            os.truncate(path, case.position)
        else:
            with path.open("r+b") as file:
                file.seek(case.position)
                file.write(bytes([data[case.position] ^ 1 << case.bit]))
        try:
            found = self.store.read(self.folder)
            if found == self.whole:
                return 0, ""
            if self.store.accepts(found, self.whole):
                return 1, ""
            return 3, f"other data: {_differing(found, self.whole)}"
        except DatabusError as error:
            if str(path) in error.message or (
                path.suffix == ".mdb" and str(path.parent) in error.message
            ):
                return 2, ""
            return 3, f"an error without the file's name: {error.code}: {error.message[:300]}"
        except Exception as error:
            return 3, f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            self.restore(path)


def _differing(found: object, whole: object) -> str:
    if isinstance(found, dict) and isinstance(whole, dict):
        return ", ".join(key for key in whole if found.get(key) != whole[key])
    return repr(found)[:200]


def child(name: str, seed: str, most: int, first: int) -> None:
    """Run the cases from number ``first`` on; a line before and after each."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="files-") as folder:
        cases = Cases(name, Path(folder), seed, most)
        print(f"cases {len(cases.damages)}", flush=True)
        for number, case in enumerate(cases.damages[first:], first):
            print(f"begin {number} {case}", flush=True)
            signal.alarm(HANG_S)
            kind, what = cases.run(case)
            signal.alarm(0)
            print(f"end {kind} {case.file.replace(' ', '_')} {what}".replace("\n", " "), flush=True)


# ---- the parent ---------------------------------------------------------------------------


def run_store(name: str, seed: str, most: int, until_s: float = float("inf")) -> Report:
    """All cases of a store, or those until a moment."""
    report, number, total = Report(), 0, -1
    while total < 0 or number < total:
        argv = ["--child", name, "--seed", seed, "--cases", str(most), "--first", str(number)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.storm.files", *argv],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        begun = ""
        with process:
            for line in process.stdout:
                word, _, rest = line.rstrip("\n").partition(" ")
                if word == "cases":
                    total = int(rest)
                elif word == "begin":
                    begun = rest
                elif word == "end":
                    kind, file, what = rest.split(" ", 2)
                    number, begun = (
                        int(begun.split(" ", 1)[0]) + 1,
                        _note(report, kind, file, what, begun),
                    )
                if time.monotonic() > until_s:
                    process.kill()
                    return report
            said = process.stderr.read()[-2000:]
        if process.returncode and not begun:
            raise RuntimeError(f"{name}: {said}")
        if process.returncode:
            number = int(begun.split(" ", 1)[0]) + 1
            code = -process.returncode
            how = signal.Signals(code).name if code > 0 else f"exit code {-code}"
            report.counts[KINDS[3]] += 1
            report.differences.append(f"{begun}: the process ended by {how} {said[-300:]}")
    return report


def _note(report: Report, kind: str, file: str, what: str, begun: str) -> str:
    report.counts[KINDS[int(kind)]] += 1
    report.files.add(file)
    if what:
        report.differences.append(f"{begun}: {what}")
    return ""


def main(arguments: Sequence[str]) -> int:
    """Exit code 1: something differed."""
    parser = argparse.ArgumentParser(prog="storm-files", description=__doc__)
    parser.add_argument("--seed", default="0", help="0: a fresh one")
    parser.add_argument("--cases", type=int, default=20_000, help="positions of a file, at most")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each store, at most")
    parser.add_argument("--stores", default="", help="some of them, with commas between")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child, options.seed, options.cases, options.first)
        return 0
    from tests.storm.file_stores import STORES

    seed = options.seed if options.seed != "0" else str(secrets.randbelow(10**9) + 1)
    print(f"seed {seed}")
    failed = False
    for name in options.stores.split(",") if options.stores else STORES:
        started_s = time.monotonic()
        report = run_store(name, seed, options.cases, started_s + 60 * options.minutes)
        counted = ", ".join(f"{report.counts[kind]:,} {kind}" for kind in KINDS)
        total = sum(report.counts.values())
        print(
            f"{name}: {len(report.files)} files, {total:,} positions: {counted} "
            f"({time.monotonic() - started_s:.0f} s)",
            flush=True,
        )
        for one in report.differences[:20]:
            print(f"  {one}")
        failed |= bool(report.differences)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
