"""A store on S3: one manifest that is never lost or torn, leases, and what a bad network does."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.parquet_runs import PARQUET, Run, RunKind, describe, in_order
from databus.bootstrap.runs.s3_storage import S3Lease, S3Storage
from databus.client.splits.frame_tables import as_table
from databus.common.config import BootstrapConfig
from databus.common.errors import BucketError, ConfigError, FormatError, StoreBusy, StoreError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import iter_frames
from databus.common.storage.bucket import Bucket, open_bucket, split_url
from tests.bootstrap.model import CLOCK, START, History, State, compact, state_of, whole_stream
from tests.support.s3_server import ACCESS_KEY, Faults, S3Server
from tests.support.waiting import eventually_sync

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def open_store(location: str, config: BootstrapConfig | None = None) -> Store:
    """The store at ``s3://bucket/prefix/database``, with the options of a configuration."""
    return Store(S3Storage(*open_bucket(location, (config or BootstrapConfig()).s3)))


class OnS3:
    """A database whose runs lie on S3, with its log here."""

    def __init__(self, folder: Path, server: S3Server, **options: object) -> None:
        self.store_url = server.empty_prefix()
        self.options = server.options(**options)
        self.store = self.another()
        self.log = HotLog(folder / "log")
        self.log.bind("shop", CLOCK, START)
        self.blocks: list[bytes] = []
        self.history = History(5)

    def another(self) -> Store:
        """The same store, opened again."""
        bucket, prefix = open_bucket(self.store_url, self.options)
        return Store(S3Storage(bucket, prefix))

    def write(self, windows: int = 6) -> None:
        """The relay sends some windows, the writer stores them."""
        self.blocks.append(self.history.block(windows))
        self.log.append(self.blocks[-1], 1)

    def state(self) -> State:
        """What a new reader ends with."""
        return state_of(self.store, self.log)

    def assert_whole(self) -> None:
        """Nothing lost, nothing double, the store clean."""
        found = self.state()
        assert found.rows == State().apply_all(self.blocks).rows
        assert found.regressions == []
        assert self.store.check() == []
        self.log.check()

    def merge(self) -> None:
        """What the applier does around Spark: a delta that replaces the chain."""
        self.store.sweep("c")
        chain = self.store.read().chain
        if len(chain) > 1:
            run = merged(self.store, Merge(chain, RunKind.DELTA))
            self.store.switch(lambda m: m.with_changes(add=run, drop=chain, now_us=1))
        self.store.collect(0, "cs", now_us=2)


def merged(store: Store, merge: Merge) -> Run:
    """The run that the model makes of a merge, written to the store."""
    from databus.bootstrap.log.segments import pq
    from databus.bootstrap.runs.run_ids import new_run_id

    frames = []
    for run in merge.inputs:
        opened = store.open_run(run)
        for group in opened.row_groups():
            for block in opened.frames(group):
                frames += list(iter_frames(bytes(block.data)))
        opened.close()
    rows = b"".join(bytes(one.bytes) for one in compact(frames, base=False))
    run_id = new_run_id(merge.kind, merge.inputs[-1].stop)
    files = store.files(run_id)
    table = as_table(rows, frame_format.scan(rows))
    with files.create("part.parquet") as file, pq.ParquetWriter(file, table.schema, **PARQUET) as w:
        w.write_table(table)
    return Run(
        id=run_id,
        kind=merge.kind,
        start=merge.inputs[0].start,
        stop=merge.inputs[-1].stop,
        files=in_order([describe(files, "part.parquet")]),
        created_us=1,
        partial_rows=sum(run.partial_rows for run in merge.inputs),
    )


@pytest.fixture
def shop(tmp_path: Path, s3: S3Server) -> Iterator[OnS3]:
    """A database on S3; checked afterwards."""
    shop = OnS3(tmp_path, s3)
    yield shop
    s3.faults = Faults()
    shop.assert_whole()
    shop.log.close()


def test_folders_of_two_servers_of_a_process_are_separate(s3: S3Server) -> None:
    another = S3Server()
    try:
        assert s3.empty_prefix() != another.empty_prefix()
    finally:
        another.close()


def test_a_request_that_is_never_ended_delays_no_other(s3: S3Server) -> None:
    bucket, prefix = open_bucket(s3.empty_prefix(), s3.options(request_timeout="2s", attempts=1))
    address, before = urlsplit(s3.url), s3.requests
    with socket.create_connection((address.hostname, address.port)) as half:
        half.sendall(
            f"PUT /{bucket.name}/{prefix}half HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Authorization: AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/x\r\n"
            "Content-Length: 100\r\n\r\nthe process is paused he".encode()
        )
        eventually_sync(lambda: s3.requests > before, 10, "the request has begun")
        assert bucket.put(f"{prefix}whole", b"whole", None) is not None


def test_segments_merged_runs_and_the_manifest_lie_on_s3(shop: OnS3) -> None:
    assert not shop.store.exists()
    assert shop.store.read() == Manifest()
    for _ in range(3):
        shop.write()
        segments.seal(shop.log, shop.store, 1)
    shop.assert_whole()
    assert shop.store.exists()
    shop.merge()
    manifest = shop.another().read()
    assert [run.kind for run in manifest.runs] == [RunKind.DELTA]
    assert shop.store.storage.run_ids() == [manifest.runs[0].id]
    with pytest.raises(StoreError, match="is not a local folder"):
        _ = shop.store.folder


def test_switches_from_everywhere_are_all_recorded(shop: OnS3) -> None:
    def switch() -> None:
        store = shop.another()
        for _ in range(5):
            store.switch(lambda manifest: manifest)

    threads = [threading.Thread(target=switch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shop.store.read().version == 15


def test_a_switch_whose_answer_is_lost_is_made_once(shop: OnS3, s3: S3Server) -> None:
    s3.faults = Faults(lost=0.25)
    for number in range(6):
        switched = shop.store.switch(partial(Manifest.with_apply, record={"number": number}))
        assert switched.version == number + 1
    s3.faults = Faults()
    manifest = shop.store.read()
    assert [record["number"] for record in manifest.applies] == list(range(6))
    assert manifest.version == 6


def test_a_bad_network_loses_nothing_and_doubles_nothing(shop: OnS3, s3: S3Server) -> None:
    failed = 0
    for number in range(6):
        shop.write()
        s3.faults = Faults(refused=0.05, lost=0.04, slow=0.1, delay_s=0.05)
        # What fails even so is tried again by writer and applier, as they do.
        for step in (lambda: segments.seal(shop.log, shop.store, 1), shop.merge):
            try:
                step()
            except StoreError:
                failed += 1
        s3.faults = Faults()
        segments.finish(shop.log, shop.store, 1)
        if number % 2:
            shop.assert_whole()
    assert failed < 12, "retries help at least sometimes"


def test_an_error_of_s3_is_reported_with_what_to_do_about_s3_and_not_about_a_disk(
    tmp_path: Path, s3: S3Server
) -> None:
    shop = OnS3(tmp_path / "refused", s3, attempts=1)
    shop.write()
    segments.seal(shop.log, shop.store, 1)
    opened = shop.store.open_run(shop.store.read().chain[0])
    group = next(opened.row_groups())
    shop.write()
    s3.faults = Faults(refused=1.0)
    attempts: list[Callable[[], Any]] = [
        shop.store.read,
        lambda: shop.store.storage.write_note("note", b"x"),
        lambda: segments.seal(shop.log, shop.store, 1),
        lambda: next(shop.store.open_run(opened.run).row_groups()),
        lambda: list(opened.frames(group)),
        lambda: describe(shop.store.files(opened.run), opened.run.files[0].name),
    ]
    for attempt in attempts:
        with pytest.raises(BucketError) as refused:
            attempt()
        assert "credentials" in refused.value.hint
        assert "disk" not in refused.value.hint
    opened.close()
    s3.faults = Faults()
    shop.assert_whole()
    shop.log.close()


def test_an_answer_slower_than_the_time_out_is_an_error_and_not_the_end(
    tmp_path: Path, s3: S3Server
) -> None:
    shop = OnS3(tmp_path / "slow", s3, request_timeout=2.0, attempts=1)
    shop.write()
    s3.faults = Faults(slow=1.0, delay_s=3.0)
    with pytest.raises(StoreError):
        segments.seal(shop.log, shop.store, 1)
    s3.faults = Faults()
    shop.assert_whole()
    # The request may have been carried out meanwhile: finishing shows it.
    segments.finish(shop.log, shop.store, 1)
    segments.seal(shop.log, shop.store, 1)
    shop.assert_whole()
    assert len(shop.store.read().runs) == 1
    shop.log.close()


def test_a_file_that_is_torn_or_gone_is_named_and_a_reader_resumes_from_what_replaced_it(
    shop: OnS3,
) -> None:
    for _ in range(3):
        shop.write()
        segments.seal(shop.log, shop.store, 1)
    first = shop.store.read().chain[0]
    name = first.files[0].name
    files = shop.store.files(first)
    with files.open(name) as file:
        whole = file.read()
    for content in (whole[: len(whole) // 2], whole[:-4] + b"torn"):
        with files.create(name) as file:
            file.write(content)
        with pytest.raises(StoreError, match=first.id):
            next(shop.store.open_run(first).row_groups())
        assert len(shop.store.check()) == 1
    with files.create(name) as file:
        file.write(whole)

    opened = shop.store.open_run(first)
    files.delete(name)
    with pytest.raises(StoreError, match=rf"{first.id}.*cannot be read"):
        for group in opened.row_groups():
            list(opened.frames(group))
    opened.close()
    with pytest.raises(StoreError, match=first.id):
        next(shop.store.open_run(first).row_groups())
    with files.create(name) as file:
        file.write(whole)
    reader = whole_stream(shop.store, shop.log)
    pieces = reader.pieces()
    got = [next(pieces), next(pieces), next(pieces)]
    shop.merge()
    state = State().apply_all(piece.frames for piece in [*got, *pieces])
    assert state.rows == State().apply_all(shop.blocks).rows
    assert state.regressions == []


def test_one_lease_at_a_time_and_its_owner_takes_it_up_again(shop: OnS3) -> None:
    other = shop.another()
    with shop.store.lease("applier") as lease:
        assert lease.number == 1
        with pytest.raises(StoreBusy, match=r"is the applier of s3://.*only one"):
            with other.lease("applier"):
                pass
        with other.lease("writer"):
            pass
    with other.lease("applier") as lease:
        assert lease.number == 2, "one that was given up is free at once"
    bucket, prefix = open_bucket(shop.store_url, shop.options)
    killed = S3Lease(bucket, f"{prefix}writer.lease", "writer", "log-1")
    with other.lease("writer", owner="log-1") as lease:
        assert lease.number == killed.number + 1
    killed.release()  # which is another's now, and stays so


def test_a_renewal_whose_answer_is_lost_does_not_lose_the_lease(
    tmp_path: Path, s3: S3Server
) -> None:
    shop = OnS3(tmp_path / "renewed", s3, lease_ttl=3600, attempts=1)

    def lose_a_renewal(lease: S3Lease) -> None:
        s3.faults.lost_writes.append("writer.lease")
        with pytest.raises(BucketError):
            lease.renew()

    with shop.store.lease("writer") as lease:
        assert isinstance(lease, S3Lease)
        lose_a_renewal(lease)
        lose_a_renewal(lease)
        lease.renew()
        shop.write()
        segments.seal(shop.log, shop.store, 1)
        lose_a_renewal(lease)
        with (
            pytest.raises(StoreBusy, match="there can be only one"),
            shop.another().lease("writer"),
        ):
            pass
    with shop.another().lease("writer") as next_one:
        assert next_one.number == 2, "it was given up at the end"
    with pytest.raises(StoreBusy, match="just taken"):
        lease.renew()
    shop.assert_whole()
    shop.log.close()


def test_a_renewal_that_fails_in_an_unexpected_way_is_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written: list[str] = []

    def put(key: str, content: bytes, tag: str | None) -> str:
        written.append(json.loads(content)["state"])
        if len(written) == 2:
            raise RuntimeError("can't start new thread")
        return str(len(written))

    bucket: Any = SimpleNamespace(
        name="lake", options=SimpleNamespace(lease_ttl=0.03), get=lambda key: None, put=put
    )
    lease = S3Lease(bucket, "shop/writer.lease", "writer", "log-1")
    try:
        eventually_sync(lambda: len(written) > 3, 2.0)
    finally:
        lease.release()
    assert set(written[:-1]) == {"held"}
    assert written[-1] == "free"
    assert "can't start new thread" in caplog.text


class NoRenewals(Bucket):
    """The bucket as a process sees it that hangs: no lease is renewed, or given up."""

    hangs = False

    def put(self, key: str, content: bytes, tag: str | None, note: str = "") -> str | None:
        if self.hangs and key.endswith(".lease"):
            raise StoreError("it hangs")
        return super().put(key, content, tag, note)


def test_a_holder_that_stopped_renewing_is_replaced_and_can_write_nothing_more(
    tmp_path: Path, s3: S3Server
) -> None:
    shop = OnS3(tmp_path / "lease", s3, lease_ttl=1)
    for _ in range(2):
        shop.write()
        segments.seal(shop.log, shop.store, 1)
    chain = shop.store.read().chain
    name, prefix = split_url(shop.store_url)
    bucket = NoRenewals(name, shop.options)
    slept_s = 0.0
    stuck = Store(S3Storage(bucket, prefix, lambda: time.monotonic() - slept_s))
    other = shop.another()
    with stuck.lease("applier"):
        bucket.hangs = True
        run = merged(stuck, Merge(chain, RunKind.DELTA))

        def taken() -> bool:
            try:
                with other.lease("applier"):
                    return other.sweep("c") == [run.id]
            except StoreBusy:
                return False

        eventually_sync(taken, 60.0, "the lease runs out")
        with pytest.raises(StoreBusy):
            stuck.switch(lambda m: m.with_changes(add=run, drop=chain, now_us=1))
        # Even if its clock stopped: the manifest has a later holder's number.
        slept_s = 1e9
        with pytest.raises(StoreBusy, match=r"its number is \d+, ours 1"):
            stuck.switch(lambda m: m.with_changes(add=run, drop=chain, now_us=1))
    shop.assert_whole()
    assert stuck.read().chain == chain
    shop.log.close()


def test_the_configuration_names_where_the_stores_are(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_url = s3.empty_prefix()
    options = s3.options()
    section = {
        "data_dir": str(tmp_path),
        "store": store_url,
        "s3": options.model_dump(mode="python"),
    }
    stores = Stores(BootstrapConfig.model_validate(section))
    assert stores.begun() == {}
    stores.store("shop").switch(lambda manifest: manifest)
    begun = stores.begun()
    assert {name: store.url for name, store in begun.items()} == {"shop": f"{store_url}/shop"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert open_store(f"{store_url}/shop").read().version == 1, "all of it from the environment"
    for bad in ("ftp://bucket/x", "s3://", "s3:///x"):
        with pytest.raises(ConfigError, match="is not of the form s3://bucket/prefix"):
            split_url(bad)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere")
    with pytest.raises(ConfigError, match="endpoint 'nowhere'"):
        open_store(store_url)


def test_a_manifest_on_s3_that_is_damaged_is_refused(shop: OnS3) -> None:
    shop.store.switch(lambda manifest: manifest)
    storage = shop.store.storage
    assert isinstance(storage, S3Storage)
    found = storage.read_manifest()
    assert found is not None
    damaged = found.content.replace(b'"version":1', b'"version":2')
    assert storage.replace_manifest(damaged, found.tag)
    with pytest.raises(FormatError, match=r"manifest\.json"):
        shop.store.read()
    assert not storage.replace_manifest(found.content, found.tag), "what it names is gone"
    now = storage.read_manifest()
    assert now is not None
    assert storage.replace_manifest(found.content, now.tag)
