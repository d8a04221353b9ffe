"""Files of LMDB that were cut or damaged: an error that names the file, never a signal."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_check import describe_log
from databus.client import LmdbCheckpoints, OnlineCheckpoint, Position
from databus.common.errors import FormatError
from databus.common.storage.lmdb_file import SizeGuard, check_lmdb
from tests.bootstrap.model import CLOCK, START, History

# Opens one store after another in a process of its own, which a signal would end.
READ = """
import sys
from pathlib import Path
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_check import describe_log
from databus.client import LmdbCheckpoints
from databus.common.errors import DatabusError

for line in sys.stdin:
    kind, folder, *_ = line.split()
    try:
        if kind == "log":
            log = HotLog(Path(folder))
            state = log.state()
            answer = (state.window, len(log.read(state.start, state.window, 1 << 30).data))
            log.close()
            describe_log(Path(folder))
        else:
            store = LmdbCheckpoints(folder, "one")
            try:
                answer = store.load()
            finally:
                store.close()
    except DatabusError as error:
        answer = f"{type(error).__name__} {error}"
    print(str(answer).replace(chr(10), " "), flush=True)
"""


@pytest.fixture
def hot_log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    log = HotLog(folder)
    log.bind("shop", CLOCK, START)
    history = History(1)
    for _ in range(30):
        log.append(history.block(7), 5)
    log.close()
    return folder


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    store = LmdbCheckpoints(tmp_path / "checkpoints", "one")
    for scn in range(40):
        store.save(OnlineCheckpoint("shop", "c", Position(scn, 1)))
    store.close()
    return tmp_path / "checkpoints"


def read_each(kind: str, folder: Path, contents: list[bytes]) -> list[str]:
    """The error of a reader for each content; "" if the process ended."""
    answers: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    with process:
        for content in contents:
            (folder / "data.mdb").write_bytes(content)
            process.stdin.write(f"{kind} {folder}\n")
            process.stdin.flush()
            answers.append(process.stdout.readline().strip())
            if not answers[-1]:
                break
        process.stdin.close()
    return answers


@pytest.mark.parametrize("kind", ["log", "checkpoints"])
def test_a_file_cut_at_any_page_is_named(kind: str, hot_log: Path, checkpoints: Path) -> None:
    folder = hot_log if kind == "log" else checkpoints
    content = (folder / "data.mdb").read_bytes()
    lengths = {0, 1, 100, 4095, 4097, 8191, *range(0, len(content), 4096)}
    lengths |= {at + 1 for at in range(0, len(content), 4096)}
    cuts = sorted(length for length in lengths if length < len(content))
    whole, *answers = read_each(kind, folder, [content, *(content[:cut] for cut in cuts)])
    assert len(answers) == len(cuts), f"the reader ended at {cuts[len(answers) - 1]} bytes"
    for cut, answer in zip(cuts, answers, strict=True):
        named = answer.startswith("FormatError") and str(folder / "data.mdb") in answer
        assert named or answer == whole, (cut, answer)
    assert sum(answer != whole for answer in answers) > 3


def flips(content: bytes, seed: int) -> list[bytes]:
    """Both meta pages' fields, and every page's header and last bytes, with one bit flipped."""
    chosen = random.Random(seed)
    offsets = [*range(160), *range(4096, 4096 + 160)]
    for page in range(8192, len(content), 4096):
        offsets += [*range(page, page + 24), *range(page + 3880, page + 4096)]
    found = []
    for offset in offsets:
        one = bytearray(content)
        one[offset] ^= 1 << chosen.randrange(8)
        found.append(bytes(one))
    return found


def test_a_flipped_bit_gives_the_checkpoint_or_an_error_that_names_the_file(
    checkpoints: Path,
) -> None:
    content = (checkpoints / "data.mdb").read_bytes()
    contents = flips(content, seed=54)
    whole, *answers = read_each("checkpoints", checkpoints, [content, *contents])
    assert len(answers) == len(contents), f"flip {len(answers)} ended the reader"
    path = str(checkpoints / "data.mdb")
    wrong = [one for one in answers if one != whole and ("Error" not in one or path not in one)]
    wrong = [one for one in wrong if not (one.startswith("BadCheckpoint") and path in one)]
    assert not wrong, wrong[:3]


def cut_while_open(path: Path) -> None:
    os.truncate(path, 4096)


@pytest.mark.parametrize("cut", [cut_while_open, Path.unlink])
def test_a_file_cut_while_it_is_in_use_is_named(hot_log: Path, cut: Callable[[Path], None]) -> None:
    log = HotLog(hot_log, read_only=True)
    log.state()
    cut(hot_log / "data.mdb")
    with pytest.raises(FormatError, match=r"data\.mdb: another process cut it"):
        log.state()
    log.close()


@pytest.mark.parametrize("writemap", [False, True])
def test_a_file_that_lmdb_wrote_is_whole(tmp_path: Path, writemap: bool) -> None:
    chosen = random.Random(7)
    with lmdb.open(str(tmp_path), map_size=1 << 24, max_dbs=2, writemap=writemap) as store:
        names = [store.open_db(name) for name in (b"one", b"two")]
        for _ in range(40):
            with store.begin(write=True) as transaction:
                for _ in range(30):
                    key = b"%03d" % chosen.randrange(400)
                    if chosen.random() < 0.4:
                        transaction.delete(key, db=chosen.choice(names))
                    else:
                        value = bytes(chosen.choice([5, 1500, 3000, 30000]))
                        transaction.put(key, value, db=chosen.choice(names))
            assert check_lmdb(tmp_path, whole=True) == (tmp_path / "data.mdb").stat().st_size


def test_inspect_names_a_damaged_page(hot_log: Path) -> None:
    content = bytearray((hot_log / "data.mdb").read_bytes())
    describe_log(hot_log)
    content[3 * 4096] ^= 1
    page = next(at for at in range(8192, len(content), 4096) if content[at + 10] & 6)
    content[page + 12] ^= 0x55
    (hot_log / "data.mdb").write_bytes(content)
    with pytest.raises(FormatError, match=r"data\.mdb: page"):
        describe_log(hot_log)


def test_a_store_into_which_nothing_was_committed_yet_is_whole(tmp_path: Path) -> None:
    """A client that ended before its first checkpoint starts again."""
    for _ in range(2):
        store = LmdbCheckpoints(tmp_path, "one")
        assert store.load() is None
        store.close()
    assert check_lmdb(tmp_path, whole=True)


def test_a_file_that_grows_while_two_threads_look_at_its_size_is_not_taken_for_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, guard = tmp_path / "data.mdb", SizeGuard(tmp_path)
    path.write_bytes(bytes(4096))
    guard.check()
    look = Path.stat

    def overtaken(self: Path, **options: bool) -> os.stat_result:
        """The file grows behind our look at it, and another thread is there first."""
        seen = look(self, **options)
        monkeypatch.setattr(Path, "stat", look)
        path.write_bytes(bytes(8192))
        guard.check()
        return seen

    monkeypatch.setattr(Path, "stat", overtaken)
    guard.check()
    assert path.stat().st_size == 8192, "the other look came between"
    path.write_bytes(bytes(2048))
    with pytest.raises(FormatError, match=r"data\.mdb: another process cut it"):
        guard.check()
