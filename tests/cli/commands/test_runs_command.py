"""``databus runs`` on a real store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.apply_progress import ApplyProgress
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.bootstrap.runs.unfinished_merge import UnfinishedMerge
from tests.bootstrap.model import CLOCK, START, History, compact, frames_of, write_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file over a store with a base, two segments and the record of an apply."""
    store = Store(tmp_path / "data" / "shop")
    store.create()
    history = History(3)
    log = HotLog(store.folder / "log")
    log.bind("shop", CLOCK, START)
    for _ in range(2):
        log.append(history.block(30), 1)
        segments.seal(log, store, 1_700_000_000_000_000)
    log.close()
    chain = store.read().chain
    rows = compact([one for run in chain for one in frames_of(store, run)], base=True)
    base = write_run(store, RunKind.BASE, START, chain[-1].stop, rows)
    record = {
        "run": base.id,
        "kind": "base",
        "tier": 2,
        "start": START.to_json(),
        "stop": base.stop.to_json(),
        "rows_in": 1234,
        "rows_out": base.rows,
        "bytes_in": 5 << 20,
        "bytes_out": 700,
        "seconds": 1.25,
        "finished_us": 1_700_000_100_000_000,
    }
    store.switch(lambda manifest: manifest.with_changes(add=base, now_us=1).with_apply(record))
    path = tmp_path / "databus.toml"
    path.write_text('[bootstrap]\ndata_dir = "data"\n')
    return path


def test_runs_and_applies_are_shown_with_ranges_rows_bytes_and_seconds(
    databus: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = databus("runs", "-c", config)
    assert (done.code, done.err) == (0, "")
    store = Store(config.parent / "data" / "shop")
    for run in store.read().runs:
        (line,) = [
            one
            for one in done.out.splitlines()
            if f" {run.start} " in one
            and f" {run.stop} " in one
            and f"{run.rows:,} " in one
            and run.kind in one
            and "->" not in one
        ]
        assert f" {len(run.files)} " in line
    (line,) = [one for one in done.out.splitlines() if "->" in one]
    for part in ("base", "1,234 ->", "5.0 MiB -> 700 B", "2023-11-14 22:15:00", " 2 "):
        assert part in line


def test_the_same_is_given_as_json(databus: Any, config: Path) -> None:
    document = json.loads(databus("runs", "-c", config, "--json").out)
    assert document["database"] == "shop"
    assert [run["kind"] for run in document["runs"]] == ["base", "segment", "segment"]
    assert document["applies"][0]["tier"] == 2


def test_a_merge_that_is_done_in_parts_is_shown(databus: Any, config: Path) -> None:
    store = Store(config.parent / "data" / "shop")
    inputs = tuple(run.id for run in store.read().runs)
    merge = UnfinishedMerge(RunKind.BASE, inputs, "0", 2, 5, ())
    store.switch(lambda manifest: manifest.with_unfinished(merge))
    assert "shop: the next base has 2 of 5 buckets" in databus("runs", "-c", config).out
    document = json.loads(databus("runs", "-c", config, "--json").out)
    assert document["unfinished"] == {"kind": "base", "runs": 3, "tasks_done": 2, "tasks": 5}


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('[bootstrap]\ndata_dir = "data"\n', 0, "holds no database yet"),
        ("[relay]\n", 2, "no [bootstrap] section"),
    ],
    ids=["a store without databases", "a file without the section"],
)
def test_without_a_stored_database_the_reason_is_named(
    databus: Any, tmp_path: Path, text: str, code: int, said: str
) -> None:
    path = tmp_path / "databus.toml"
    path.write_text(text)
    done = databus("runs", "-c", path)
    assert done.code == code
    assert said in (done.err if code else done.out)


def test_a_damaged_run_is_found_on_request_and_the_applier_is_shown(
    databus: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert databus("runs", "-c", config, "--check").code == 0
    store = Store(config.parent / "data" / "shop")
    progress = ApplyProgress("shop", store.storage)
    what = {"kind": "base", "runs": 3, "rows_in": 10, "bytes_in": 10}
    with progress.merging(what, lambda: (1, 4)):
        shown = databus("runs", "-c", config).out
        assert "shop: merging 3 runs into a base, 0 of 0 tasks" in shown
    with pytest.raises(RuntimeError), progress.merging(what, lambda: (1, 4)):
        raise RuntimeError("a torn file")
    assert "shop: the last merge failed: a torn file" in databus("runs", "-c", config).out

    run = store.read().chain[0]
    path = store.run_folder(run) / run.files[0].name
    path.write_bytes(path.read_bytes()[:-9])
    done = databus("runs", "-c", config, "--check")
    assert done.code != 0
    assert run.id in done.err


def test_a_manifest_that_is_gone_is_named_for_its_database(databus: Any, config: Path) -> None:
    (config.parent / "data" / "shop" / "manifest.json").unlink()
    done = databus("runs", "-c", config)
    assert done.code == 1
    assert done.err.count("shop/manifest.json is not there") == 1
    assert databus("runs", "-c", config, "--check").err == done.err
