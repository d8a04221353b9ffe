"""The error tree: stable codes, and the way over the wire and back."""

from __future__ import annotations

from pathlib import Path

from databus.common import errors

CODES = Path(__file__).parents[1] / "golden" / "v1" / "error_codes.txt"


def test_codes_are_unique_and_none_has_gone() -> None:
    found = errors.registry()
    assert len(found) >= len(set(CODES.read_text().split()))
    assert set(CODES.read_text().split()) <= set(found)
    classes = errors._subclasses(errors.DatabusError)
    doubled = {cls.code for cls in classes if found[cls.code] is not cls}
    assert doubled == {"internal_error"}


def test_every_class_says_what_the_operator_does() -> None:
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
