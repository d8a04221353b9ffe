"""``databus doctor``: what it finds in the status of servers and on the machine."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from databus.cli.doctor import machine_symptoms
from databus.cli.doctor.server_symptoms import ServerStatus, symptoms_of
from databus.cli.doctor.symptoms import Symptom
from databus.common.config import Config

NOW_US = 1_800_000_000_000_000
SECOND = 1_000_000
FETCHER = {"state": "streaming", "error": None, "pid": 7, "age_s": 0.1, "lag_us": 0, "source": {}}
RELAY_DB: dict[str, Any] = {
    "name": "shop",
    "clock": "c",
    "prev": {"scn": 10, "seq": 0},
    "max": {"scn": 90, "seq": 0},
    "min_commit_us": NOW_US - 7200 * SECOND,
    "max_commit_us": NOW_US,
    "ring": {"capacity_bytes": 1000, "used_bytes": 999},
    "clients": [],
    "tables": [],
    "fetcher": FETCHER,
}
BOOTSTRAP_DB: dict[str, Any] = {
    "name": "shop",
    "clock": "c",
    "max": {"scn": 80, "seq": 0},
    "writer": {"state": "running"},
    "applier": {"state": "idle"},
    "gaps": [],
    "suspended": {},
}


def relay(now_us: int = NOW_US, version: str = "1", **changes: Any) -> ServerStatus:
    document = {"version": version, "now_us": now_us, "workers": 1}
    return ServerStatus(
        "http://r", document | {"databases": [RELAY_DB | changes]}, NOW_US - 1000, NOW_US + 1000
    )


def bootstrap(**changes: Any) -> ServerStatus:
    document = {"version": "1", "now_us": NOW_US, "databases": [BOOTSTRAP_DB | changes]}
    return ServerStatus("http://b", document, NOW_US - 1000, NOW_US + 1000)


def found(*answers: ServerStatus) -> list[Symptom]:
    return list(symptoms_of(answers, "1"))


def test_a_sound_system_has_no_symptoms() -> None:
    assert found(relay(), bootstrap()) == []


@pytest.mark.parametrize(
    ("answer", "words", "is_fatal"),
    [
        (relay(NOW_US + 5 * SECOND), "its clock is 5.0 s ahead of that of this machine", False),
        (relay(NOW_US - 300 * SECOND), "its clock is 5.0 min behind that", False),
        (relay(version="0.9"), "it runs version 0.9, and this is 1", False),
        (
            relay(
                fetcher=FETCHER
                | {"state": "failed", "error": {"detail": "no slot", "hint": "Make it."}}
            ),
            "the fetcher is failed: no slot. Make it.",
            True,
        ),
        (relay(fetcher=None), "the fetcher is not running", True),
        (relay(fetcher=FETCHER | {"age_s": 40.0}), "has reported nothing for 40.0 s", True),
        (relay(fetcher=FETCHER | {"lag_us": 600 * SECOND}), "is 10.0 min behind the data", False),
        (
            relay(fetcher=FETCHER | {"source": {"warnings": ["wal_level is minimal"]}}),
            "wal_level is minimal",
            False,
        ),
        (
            relay(min_commit_us=NOW_US - 60 * SECOND),
            "the ring of 1000 bytes reaches back 60.0 s. Set ring_bytes to about 58.6 KiB",
            False,
        ),
        (
            relay(clients=[{"name": "search", "lag_us": 3700 * SECOND}]),
            "the reader 'search' is 61.7 min behind, and the ring reaches back 2.0 h",
            False,
        ),
        (
            relay(
                tables=[
                    {
                        "source": "shop.t",
                        "state": "suspended",
                        "since_scn": 5,
                        "reason": "RENAME",
                        "cure": "Run: databus resync",
                    }
                ]
            ),
            "shop.t is suspended since scn 5: RENAME. Run: databus resync",
            True,
        ),
        (
            bootstrap(writer={"state": "failing", "error": "the disk is full"}),
            "the log writer fails: the disk is full",
            True,
        ),
        (bootstrap(gaps=["scn 4 to 9"]), "changes are missing in the log: scn 4 to 9", True),
    ],
)
def test_each_symptom_has_its_values_and_a_cure(
    answer: ServerStatus, words: str, is_fatal: bool
) -> None:
    (symptom,) = found(answer)
    assert words in str(symptom)
    assert symptom.is_fatal is is_fatal
    assert symptom.cure.strip()


def test_a_bootstrap_server_that_was_overtaken_is_found_if_no_relay_has_the_rest() -> None:
    late = bootstrap(max={"scn": 4, "seq": 0})
    (symptom,) = found(relay(), late)
    assert "the log ends at scn 4, and the relays have only what comes after scn 10" in str(symptom)
    assert symptom.is_fatal
    assert found(relay(), relay(prev={"scn": 0, "seq": 0}), late) == []
    assert found(relay(clock="another"), late) == []


def test_the_machine_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder = tmp_path / "relay"
    open_folder.mkdir(mode=0o755)
    open_folder.chmod(0o755)
    config = Config.model_validate(
        {
            "relay": {"data_dir": str(open_folder), "max_connections": 50_000},
            "bootstrap": {"data_dir": str(tmp_path / "none"), "merge_with": "spark"},
            "database": [{"name": "shop", "url": "generator://", "ring_bytes": 1 << 60}],
        }
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    problems = [str(one) for one in machine_symptoms.symptoms_of(config)]
    assert "are free, of which the rings still take 1073741824.0 GiB" in problems[0]
    assert "other users may open it (mode 0755)" in problems[1]
    assert f"chmod 700 {open_folder}" in problems[1]
    limits = [one for one in problems if "may open 1024 files" in one]
    assert "LimitNOFILE=50256" in limits[0]
    assert "there is no java" in problems[-1]
