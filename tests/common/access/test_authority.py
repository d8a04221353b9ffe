"""Callers by their tokens and certificates."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from pydantic import ValidationError

from databus.common.access.authority import (
    Authority,
    hash_of,
    new_token,
    presented,
    subject_of,
)
from databus.common.access_config import AuthConfig
from databus.common.errors import Unauthenticated


def auth(**sections: Any) -> AuthConfig:
    return AuthConfig.model_validate(sections)


def token_of(name: str, *tokens: str) -> dict[str, Any]:
    grants = [{"actions": ["read"], "columns": ["id", "name"]}]
    return {"name": name, "hashes": [hash_of(token) for token in tokens], "grants": grants}


def test_several_tokens_of_one_caller_are_valid_at_once() -> None:
    old, new, other = new_token(), new_token(), new_token()
    authority = Authority(auth(tokens=[token_of("app", old, new), token_of("other", other)]))
    names = [
        authority.require(presented([f"Bearer {token}"], None)).name for token in (old, new, other)
    ]
    assert names == ["app", "app", "other"]
    principal = authority.require(presented([f"bearer {old}"], None))
    assert principal.grants[0].columns == {"id", "name"}


def test_every_hash_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [new_token() for _ in range(5)]
    authority = Authority(auth(tokens=[token_of(f"app{i}", t) for i, t in enumerate(tokens)]))
    compared: list[str] = []
    digest = hmac.compare_digest

    def counted(one: str, other: str) -> bool:
        compared.append(one)
        return digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for token in (tokens[0], tokens[-1], new_token()):
        compared.clear()
        authority.find(presented([f"Bearer {token}"], None))
        assert len(compared) == len(tokens)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic YTpi", "Bearer wrong", "x"])
def test_what_is_not_a_known_token_is_refused_and_not_repeated(header: str) -> None:
    authority = Authority(auth(tokens=[token_of("app", new_token())]))
    with pytest.raises(Unauthenticated) as refused:
        authority.require(presented([header], {"subject": ((("commonName", "app"),),)}))
    assert "wrong" not in refused.value.message
    assert "YTpi" not in refused.value.message


def test_two_authorization_headers_are_refused() -> None:
    token = new_token()
    with pytest.raises(Unauthenticated):
        presented([f"Bearer {token}", "Bearer x"], None)


def test_a_subject_is_matched_with_its_marks_escaped() -> None:
    authority = Authority(
        auth(certificates=[{"name": "writer", "subject": "CN=writer,OU=databus"}])
    )
    right = {"subject": ((("commonName", "writer"),), (("organizationalUnitName", "databus"),))}
    assert authority.require(presented([], right)).name == "writer"
    forged = {"subject": ((("commonName", "writer,OU=databus"),),)}
    assert subject_of(forged) == r"CN=writer\,OU\=databus"
    for shown in (forged, {"subject": ((("commonName", "writer"),),)}, {}, None):
        with pytest.raises(Unauthenticated):
            authority.require(presented([], shown))


def test_a_token_is_random_and_its_hash_cannot_be_a_token() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) >= 8 + 43
    token = new_token()
    authority = Authority(auth(tokens=[token_of("app", token)]))
    assert authority.find(presented([f"Bearer {hash_of(token)}"], None)) is None


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"tokens": [{"name": "a", "hashes": ["secret"]}]}, "pattern"),
        ({"tokens": [{"name": "a", "hashes": []}]}, "at least 1"),
        ({"tokens": [token_of("a", "x"), token_of("a", "y")]}, "two callers have the name 'a'"),
        (
            {"tokens": [token_of("a", "x") | {"grants": [{"actions": ["everything"]}]}]},
            "Input should be 'read'",
        ),
    ],
)
def test_a_wrong_section_is_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        auth(**sections)


def test_without_callers_there_is_no_authentication() -> None:
    assert not AuthConfig().is_on
    assert auth(tokens=[token_of("a", "x")]).is_on
