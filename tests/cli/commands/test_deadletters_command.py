"""``databus deadletters list|replay``."""

from __future__ import annotations

import json
import sqlite3
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from databus.client import DatabaseDeadLetters, DeadLetter, FileDeadLetters
from databus.client.application.events import Decoding, Event, Window
from databus.client.application.frame_blocks import Block
from databus.common.schema.source_schema import SchemaSet
from tests.client.shop import SCHEMAS, orders

MODULE = """
from databus.client import Consumer, DatabusClient, FileDeadLetters, NoCheckpoints

class Orders(Consumer):
    def onDataEvent(self, event):
        if event.key["id"] == {fails}:
            raise ValueError("still not")
        print("took", event.position, event.value["state"], event.txid)

def client():
    return DatabusClient(
        database="shop", relays=["http://127.0.0.1:9"], consumer=Orders(),
        checkpoints=NoCheckpoints(), dead_letters=FileDeadLetters("letters"),
    )

number = 7
"""


def letters() -> list[DeadLetter]:
    found = []
    for scn in (4, 5):
        block = Block(orders(scn, 1, 2), bootstrap=False)
        window = Window(Decoding("shop", SchemaSet(SCHEMAS)), "online", block, 0)
        window.ended_by(block, 2)
        for index in (0, 1):
            why, count = ("ValueError('no')", 3) if scn == 4 else ("behind", 0)
            found.append(DeadLetter.of(Event(block, index, window), why, count))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store = FileDeadLetters(tmp_path / "letters")
    store.put(letters())
    store.close()
    return tmp_path


def test_letters_of_a_file_and_of_a_table_are_listed(databus: Any, folder: Path) -> None:
    listed = databus("deadletters", "list", "letters").out.splitlines()
    assert listed[0] == "4:0 c shop.orders {\"id\": 1} failed 3 times: ValueError('no')"
    assert listed[2] == '5:0 c shop.orders {"id": 1} behind'
    assert len(listed) == 4
    table = DatabaseDeadLetters("search", partial(sqlite3.connect, folder / "shop.db"))
    table.create_table()
    table.put(letters()[:1])
    url = f"sqlite:///{folder / 'shop.db'}"
    (line,) = databus("deadletters", "list", url, "--consumer", "search", "--json").out.splitlines()
    shown = json.loads(line)
    assert shown["value"] == {"id": 1, "state": "s4", "amount": None}
    assert (shown["scn"], shown["seq"], shown["attempts"]) == (4, 0, 3)
    assert databus("deadletters", "list", url).code == 2
    assert "no file of dead letters" in databus("deadletters", "list", "none").err


def test_a_replay_calls_the_applications_consumer(
    databus: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, fails in (("first_app", 1), ("second_app", 0)):
        (folder / f"{name}.py").write_text(MODULE.replace("{fails}", str(fails)))
    first = databus("deadletters", "replay", "first_app:client")
    assert first.code == 1
    assert first.out.splitlines() == [
        "took 4:1 s4 tx4", "took 5:1 s5 tx5", "2 delivered, 1 failed again, 1 left behind those",
    ]  # fmt: skip
    second = databus("deadletters", "replay", "second_app:client")
    assert second.code == 0
    assert second.out.splitlines()[0] == "took 4:0 s4 tx4"
    assert databus("deadletters", "list", "letters").out == ""
    for wrong in ("second_app", "second_app:none", "no_such_app:client", "second_app:number"):
        assert databus("deadletters", "replay", wrong).code == 2
