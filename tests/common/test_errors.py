"""The error tree: stable codes, and the way over the wire and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.common import errors

CODES = Path(__file__).parents[1] / "golden" / "v1" / "error_codes.txt"


def test_codes_are_unique_and_none_has_gone() -> None:
    found = errors.registry()
    assert len(found) >= len(set(CODES.read_text().split()))
    assert set(CODES.read_text().split()) <= set(found)
    classes = errors._subclasses(errors.DatabusError)
    doubled = {cls.code for cls in classes if found[cls.code] is not cls}
    assert doubled == {"internal_error"}


def test_every_class_names_what_the_operator_does() -> None:
    for cls in errors.registry().values():
        assert cls.__doc__ and cls.hint.endswith((".", "databus dump.", "databus dump"))
        assert 400 <= cls.status <= 599


def test_an_error_comes_back_from_its_problem_document() -> None:
    sent = errors.ScnTooOld("scn 812 is older than 1004", database="shop", prev={"scn": 1003})
    problem = errors.to_problem(sent)
    assert problem["status"] == 410 and problem["code"] == "scn_too_old"
    back = errors.from_problem(problem)
    assert type(back) is errors.ScnTooOld
    assert back.message == sent.message and back.details == sent.details


def test_an_unknown_code_gives_the_root_class_with_its_text() -> None:
    back = errors.from_problem({"code": "from_the_future", "detail": "what"})
    assert type(back) is errors.DatabusError and back.message == "what"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b'{"code": "scn_too_old", "detail": "gone"}', errors.ScnTooOld),
        (502, b"<html>Bad Gateway</html>", errors.ServerUnavailable),
        (429, b"[]", errors.TooManyRequests),
        (400, b"\xff", errors.BadRequest),
        (404, b'{"title": "of another server"}', errors.BadRequest),
    ],
)
def test_an_answer_is_its_problem_or_its_status(
    status: int, body: bytes, kind: type[errors.DatabusError]
) -> None:
    error = errors.from_answer("http://relay/v1", status, body)
    assert type(error) is kind
    if kind is not errors.ScnTooOld:
        assert error.message.startswith(f"http://relay/v1 answered {status}: ")
