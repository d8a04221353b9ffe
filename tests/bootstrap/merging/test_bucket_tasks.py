"""What a merge does in each bucket, planned from manifests alone."""

from __future__ import annotations

from databus.bootstrap.merging.bucket_tasks import BucketPlan, bits_for, overlap, plan, taken_over
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.parquet_runs import Run, RunFile, RunKind
from databus.common.checkpoint import ORIGIN, Position

MIB = 1 << 20
ORDERS, LINES = 7, 9


def a_file(source: int | None, bucket: str = "", size: int = 100 * MIB, last: int = 50) -> RunFile:
    name = f"{source}-{bucket}.parquet"
    positions = Position(10, 0), Position(last, 0)
    return RunFile(name, 1000, size, size, *positions, source_id=source, bucket=bucket)


def a_run(
    kind: RunKind, start: int, stop: int, *files: RunFile, truncates: dict[int, int] | None = None
) -> Run:
    first = ORIGIN if kind is RunKind.BASE else Position(start, 0)
    cuts = tuple((source, Position(scn, 0)) for source, scn in (truncates or {}).items())
    return Run(f"c-{kind}-{stop}", kind, first, Position(stop, 0), files, 1, truncates=cuts)


def segment(stop: int, truncated_at: int = 0) -> Run:
    cuts = {ORDERS: truncated_at} if truncated_at else {}
    return a_run(RunKind.SEGMENT, 50, stop, a_file(None, size=10 * MIB), truncates=cuts)


def buckets(found: BucketPlan) -> list[tuple[int, str]]:
    return [(task.source_id, task.bucket) for task in found.tasks]


def test_a_table_without_changes_is_taken_over_unread() -> None:
    base = a_run(RunKind.BASE, 0, 50, a_file(ORDERS), a_file(LINES, "0"), a_file(LINES, "1"))
    found = plan(Merge((base, segment(60)), RunKind.BASE), {ORDERS: 10 * MIB})
    assert buckets(found) == [(ORDERS, "")]
    assert [(file.name, file.folder) for file in found.untouched] == [
        ("9-0.parquet", base.id),
        ("9-1.parquet", base.id),
    ]
    again = taken_over(a_run(RunKind.BASE, 0, 60, *found.untouched), found.untouched[0])
    assert again == found.untouched[0], "a file lies in the folder of the run that made it"


def test_a_bucket_may_be_taken_over_unless_its_table_was_truncated() -> None:
    base = a_run(RunKind.BASE, 0, 50, a_file(ORDERS, "0"), a_file(ORDERS, "1"))
    found = plan(Merge((base, segment(60)), RunKind.BASE), {ORDERS: 10 * MIB})
    assert [task.taken for task in found.tasks] == [taken_over(base, one) for one in base.files]
    cut = plan(Merge((base, segment(60, truncated_at=55)), RunKind.BASE), {ORDERS: 10 * MIB})
    assert [(task.taken, task.cut) for task in cut.tasks] == [(None, Position(55, 0))] * 2
    assert not any(task.inputs for task in cut.tasks), "all rows of the base precede the TRUNCATE"


def test_no_file_of_a_delta_becomes_one_of_a_base() -> None:
    delta = a_run(RunKind.DELTA, 0, 50, a_file(ORDERS))
    found = plan(Merge((delta, segment(60)), RunKind.BASE), {LINES: MIB})
    assert buckets(found) == [(ORDERS, ""), (LINES, "")]
    assert all(task.taken is None for task in found.tasks) and not found.untouched


def test_of_a_delta_that_crosses_the_bases_end_only_later_rows_are_read() -> None:
    base = a_run(RunKind.BASE, 0, 50, a_file(ORDERS))
    crossing = a_run(RunKind.DELTA, 20, 60, a_file(ORDERS, last=60), a_file(LINES, last=50))
    found = plan(Merge((base, crossing), RunKind.BASE), {})
    assert buckets(found) == [(ORDERS, "")], "nothing of the other table is later"
    assert [one.after for one in found.tasks[0].inputs] == [ORIGIN, Position(50, 0)]


def test_buckets_divide_all_hashes_though_some_have_no_file() -> None:
    base = a_run(RunKind.BASE, 0, 50, a_file(ORDERS, "00"), a_file(ORDERS, "1"))
    found = plan(Merge((base, segment(60)), RunKind.BASE), {ORDERS: MIB})
    assert [bucket for _, bucket in buckets(found)] == ["00", "01", "1"]
    assert found.unit_bits == {ORDERS: 1} and found.units == 2
    assert [found.worker(task, 2) for task in found.tasks] == [1, 1, 0], "halves are not torn"


def test_a_bucket_that_grows_is_split_and_a_new_table_begins_with_enough() -> None:
    base = a_run(RunKind.BASE, 0, 50, a_file(ORDERS, size=128 * MIB))
    merge = Merge((base, segment(60)), RunKind.BASE)
    found = plan(merge, {ORDERS: 400 * MIB, LINES: 1000 * MIB})
    assert [(task.bucket, task.split_bits) for task in found.tasks[:1]] == [("", 2)]
    assert len(found.tasks) == 1 + 8
    assert all(task.split_bits == 0 for task in found.tasks[1:])


def test_a_table_that_has_shrunk_is_divided_anew() -> None:
    files = [a_file(ORDERS, f"{number:04b}", size=1000) for number in range(16)]
    base = a_run(RunKind.BASE, 0, 50, *files)
    found = plan(Merge((base, segment(60)), RunKind.BASE), {ORDERS: 1000})
    assert buckets(found) == [(ORDERS, "")]
    assert len(found.tasks[0].inputs) == 16 and found.tasks[0].taken is None


def test_runs_of_format_1_are_shuffled_as_changes_are() -> None:
    base = a_run(RunKind.BASE, 0, 50, a_file(None))
    found = plan(Merge((base, segment(60)), RunKind.BASE), {ORDERS: 110 * MIB})
    assert not found.untouched and [task.inputs for task in found.tasks] == [()]


def test_bits_and_buckets() -> None:
    assert [bits_for(size * MIB) for size in (0, 128, 129, 256, 257, 1 << 40)] == [
        0,
        0,
        1,
        1,
        2,
        24,
    ]
    assert overlap("", "01") and overlap("01", "0") and not overlap("01", "00")
