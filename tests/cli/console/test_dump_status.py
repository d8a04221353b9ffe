"""Waiting for a dump, while its relay does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from databus.cli.console import dump_status
from databus.common.errors import DatabusError, NotFound, ServerUnavailable

RUNNING = {"id": "d1", "state": "running", "sources": ["main.parts"], "rows": 1, "chunks": 1}
COMPLETED = {**RUNNING, "state": "completed"}
GONE = ServerUnavailable("the worker is starting")

Answer = dict[str, Any] | DatabusError
Answers = Callable[[Iterator[Answer]], None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """``answers(iterator)``: what the relay answers, one for each call."""

    def use(given: Iterator[Answer]) -> None:
        def call(url: str, **_: Any) -> dict[str, Any]:
            answer = next(given)
            if isinstance(answer, DatabusError):
                raise answer
            return answer

        monkeypatch.setattr(dump_status, "call", call)
        monkeypatch.setattr(dump_status, "_POLL_S", 0)

    return use


@pytest.mark.parametrize("watches", [False, True])
def test_a_relay_that_does_not_answer_for_a_while_does_not_end_the_waiting(
    answers: Answers, capsys: pytest.CaptureFixture[str], watches: bool
) -> None:
    answers(iter([RUNNING, GONE, RUNNING, GONE, GONE, COMPLETED]))
    if watches:
        dump_status.watch_dump("http://relay/shop", "d1")
    else:
        dump_status.start_dump("http://relay/shop", "*", {}, wait=True)
    assert "d1 completed" in capsys.readouterr().out


def test_a_command_that_gives_up_prints_that_the_dump_continues_and_how_to_look_at_it(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_status, "_GIVE_UP_S", 0)
    answers(iter([RUNNING, GONE]))
    with pytest.raises(ServerUnavailable) as raised:
        dump_status.watch_dump("http://relay/shop", "d1")
    assert "the worker is starting" in raised.value.message
    assert "dump continues" in raised.value.message
    assert "databus dump http://relay/shop --watch d1" in raised.value.message


@pytest.mark.parametrize("given", [[GONE], [RUNNING, NotFound("no dump d1")]])
def test_the_first_question_and_what_repeating_does_not_mend_end_it_at_once(
    answers: Answers, given: list[Answer]
) -> None:
    answers(iter(given))
    with pytest.raises(type(given[-1])):
        dump_status.watch_dump("http://relay/shop", "d1")
