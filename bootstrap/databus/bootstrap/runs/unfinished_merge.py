"""A merge of which some buckets are done: several applies bring a large base up, or make a delta.

The manifest names the files that are done, so that no process deletes them.  No reader sees them:
they become a run when the last bucket is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from databus.bootstrap.runs.parquet_runs import Run, RunFile, RunKind, in_order
from databus.common.checkpoint import ORIGIN
from databus.common.errors import FormatError


@dataclass(frozen=True, slots=True)
class UnfinishedMerge:
    """The first ``tasks_done`` tasks of a merge are done, and ``files`` are what they made.

    ``inputs`` are the runs to be merged, oldest first.  ``plan`` identifies the plan of which tasks
    are counted: a release with other buckets starts the merge again.  Each file names its folder:
    every apply has its own, so that one which lost its lease deletes nothing of another one's.
    """

    kind: RunKind
    inputs: tuple[str, ...]
    plan: str
    tasks_done: int
    tasks: int
    files: tuple[RunFile, ...]

    def as_run(self, inputs: Sequence[Run]) -> Run:
        """The files as a run over the range of ``inputs``, to be checked: most of its rows may be
        missing."""
        is_base = self.kind is RunKind.BASE
        return Run(
            id=f"unfinished-{self.kind.value}",
            kind=self.kind,
            start=ORIGIN if is_base else inputs[0].start,
            stop=inputs[-1].stop,
            files=in_order(list(self.files)),
            created_us=0,
        )

    def summary(self) -> dict[str, Any]:
        """What a status shows of it."""
        return {
            "kind": self.kind.value,
            "runs": len(self.inputs),
            "tasks_done": self.tasks_done,
            "tasks": self.tasks,
        }

    def to_json(self) -> dict[str, Any]:
        """The merge as the manifest stores it."""
        return {
            "kind": self.kind.value,
            "inputs": list(self.inputs),
            "plan": self.plan,
            "tasks_done": self.tasks_done,
            "tasks": self.tasks,
            "files": [file.to_json() for file in self.files],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any] | None) -> UnfinishedMerge | None:
        """The merge that ``to_json`` wrote, None if there is none.

        Raises:
            FormatError: a part is missing or not of its form.
        """
        if document is None:
            return None
        try:
            files = tuple(map(RunFile.from_json, document["files"]))
            if not all(file.folder for file in files):
                raise ValueError("a file without a folder")
            return UnfinishedMerge(
                kind=RunKind(document["kind"]),
                inputs=tuple(map(str, document["inputs"])),
                plan=str(document["plan"]),
                tasks_done=int(document["tasks_done"]),
                tasks=int(document["tasks"]),
                files=files,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"not a merge: {error!r} in {str(document)[:200]}") from error
