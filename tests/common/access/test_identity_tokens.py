"""The tokens of an identity provider: what is accepted, and each reason to refuse one."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

import jwt
import pydantic
import pytest
from cryptography.hazmat.primitives import serialization

from databus.common.access.authority import Authority, Presented, ProviderIdentity, new_token
from databus.common.access.identity_tokens import IdentityTokens, UnknownKey, is_identity_token
from databus.common.errors import ServerUnavailable, Unauthenticated
from tests.support.identity_provider import (
    AUDIENCE,
    ISSUER,
    READ,
    IdentityProvider,
    claims_of,
    public_entry,
)

ALGORITHMS = ("RS256", "RS512", "PS256", "ES256", "ES384", "EdDSA")


@pytest.fixture(scope="module")
def provider() -> IdentityProvider:
    made = IdentityProvider()
    made.add("one")
    made.add("other")
    for algorithm in ALGORITHMS:
        made.add(algorithm, algorithm)
    return made


def tokens(provider: IdentityProvider, **changes: Any) -> IdentityTokens:
    made = IdentityTokens(provider.config(**changes))
    made.load(json.loads(provider.jwks()))
    return made


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_token_with_a_right_signature_names_its_caller(
    algorithm: str, provider: IdentityProvider
) -> None:
    verified = tokens(provider, algorithms=ALGORITHMS).verify(provider.token(algorithm, "a", "b"))
    assert (verified.issuer, verified.subject) == (ISSUER, "ada")
    assert verified.roles == {"a", "b"}
    assert 600 < verified.until_s - time.time() <= 630


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def with_public_key_as_secret(provider: IdentityProvider) -> str:
    """HS256 with the public key as its secret, which a careless verifier accepts."""
    public = provider.keys["one"][1].public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip
    body = f"{part({'alg': 'HS256', 'kid': 'one'})}.{part(claims_of())}"
    mark = base64.urlsafe_b64encode(hmac.digest(public, body.encode(), "sha256")).rstrip(b"=")
    return f"{body}.{mark.decode()}"


def changed(provider: IdentityProvider) -> str:
    head, _, mark = provider.token().split(".")
    return f"{head}.{part(claims_of('admins'))}.{mark}"


def now() -> int:
    return int(time.time())


REFUSED = {
    "ended": (lambda p: p.token(exp=now() - 60), "expired"),
    "not valid yet": (lambda p: p.token(nbf=now() + 600), "not yet valid"),
    "issued in the future": (lambda p: p.token(iat=now() + 600), "not yet valid"),
    "without an end": (lambda p: p.token(exp=None), "exp"),
    "without a subject": (lambda p: p.token(sub=None), "sub"),
    "without an issuer": (lambda p: p.token(iss=None), "iss"),
    "without an audience": (lambda p: p.token(aud=None), "aud"),
    "for another audience": (lambda p: p.token(aud="mail"), "[Aa]udience"),
    "of another issuer": (lambda p: p.token(iss="https://evil.test"), "[Ii]ssuer"),
    "an end that is no number": (lambda p: p.token(exp="tomorrow"), "refused"),
    "signed by another key": (
        lambda p: jwt.encode(claims_of(), p.keys["other"][1], "RS256", headers={"kid": "one"}),
        "[Ss]ignature",
    ),
    "changed after the signature": (changed, "[Ss]ignature"),
    "without a signature": (
        lambda p: f"{part({'alg': 'none', 'kid': 'one'})}.{part(claims_of())}.",
        "'none'",
    ),
    "with the public key as a secret": (with_public_key_as_secret, "'HS256'"),
    "by an algorithm that is not configured": (lambda p: p.token("ES384"), "'ES384'"),
    "a key of another kind": (
        lambda p: jwt.encode(claims_of(), p.keys["ES256"][1], "ES256", headers={"kid": "one"}),
        "refused|not for signatures",
    ),
    "no base64": (lambda p: "a.b.c", "refused"),
    "a header that is no object": (lambda p: f"{part([1])}.{part({})}.x", "refused"),
    "claims that are no object": (
        lambda p: jwt.api_jws.encode(b"[1]", p.keys["one"][1], "RS256", headers={"kid": "one"}),
        "refused",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_token_is_refused_that_is(case: str, provider: IdentityProvider) -> None:
    make, reason = REFUSED[case]
    token = make(provider)
    with pytest.raises(Unauthenticated, match=reason) as raised:
        tokens(provider).verify(token)
    assert token not in raised.value.message


def test_clocks_may_differ_by_the_leeway_and_no_more(provider: IdentityProvider) -> None:
    strict, lenient = tokens(provider, leeway=0), tokens(provider, leeway=90)
    for token in (provider.token(exp=now() - 60), provider.token(nbf=now() + 60, iat=now() + 60)):
        assert lenient.verify(token).subject == "ada"
        with pytest.raises(Unauthenticated):
            strict.verify(token)


def test_a_key_that_is_not_loaded_is_a_reason_to_load_again(provider: IdentityProvider) -> None:
    made = IdentityTokens(provider.config())
    with pytest.raises(UnknownKey, match="'one'"):
        made.verify(provider.token())
    made.load(json.loads(provider.jwks()))
    made.verify(provider.token())
    without_kid = jwt.encode(claims_of(), provider.keys["one"][1], "RS256")
    with pytest.raises(UnknownKey):
        made.verify(without_kid)
    made.load({"keys": [public_entry("x", "RS256", provider.keys["one"][1])]})
    assert made.verify(without_kid).subject == "ada", "there is only one"


def test_only_public_keys_for_signatures_are_used(provider: IdentityProvider) -> None:
    made, key = IdentityTokens(provider.config()), provider.keys["one"][1]
    entry = public_entry("one", "RS256", key)
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "one"}
    for document in (
        None, [], {}, {"keys": None}, {"keys": []}, {"keys": [secret]}, {"keys": [7]},
        {"keys": [{**entry, "use": "enc"}]}, {"keys": [{**entry, "n": "!"}]},
        {"keys": [{"kty": "RSA", "kid": "one"}]},
    ):  # fmt: skip
        with pytest.raises(ServerUnavailable, match="no key for signatures"):
            made.load(document)
    assert made.load({"keys": [secret, 7, entry]}) == 1
    assert made.verify(provider.token()).subject == "ada"
    made.load({"keys": [{**entry, "alg": "RS512"}]})
    with pytest.raises(Unauthenticated, match="not for signatures by RS256"):
        made.verify(provider.token())


@pytest.mark.parametrize(
    ("claim", "claims", "roles"),
    [
        ("groups", {"groups": ["a", "b", 7]}, {"a", "b"}),
        ("scope", {"scope": "a b"}, {"a", "b"}),
        ("realm_access.roles", {"realm_access": {"roles": ["a"]}}, {"a"}),
        ("https://x.test/roles", {"https://x.test/roles": ["a"]}, {"a"}),
        ("groups", {"groups": {"a": 1}}, set()),
        ("a.b", {"a": "text"}, set()),
        ("missing", {}, set()),
    ],
)
def test_roles_come_from_the_configured_claim(
    claim: str, claims: dict[str, Any], roles: set[str], provider: IdentityProvider
) -> None:
    assert tokens(provider, claim=claim).verify(provider.token(**claims)).roles == roles


def test_a_caller_has_the_grants_of_all_its_roles_and_the_widest_limits(
    provider: IdentityProvider,
) -> None:
    orders = {"actions": ["read"], "sources": ["shop.orders"]}
    authority = Authority(
        provider.auth(
            {
                "name": "a",
                "grants": [READ],
                "max_streams": 3,
                "max_requests_per_s": 5,
                "max_bytes_per_s": "2MiB",
            },
            {"name": "b", "grants": [orders], "max_streams": 7},
            {"name": "A"},
        )
    )

    def found(*roles: str, issuer: str = ISSUER) -> Any:
        return authority.find(
            Presented(identity=ProviderIdentity(issuer, "ada", frozenset(roles), 0.0))
        )

    one = found("a")
    assert (one.max_streams, one.max_requests_per_s, one.max_bytes_per_s) == (3, 5, 2 << 20)
    both = found("a", "b")
    assert (len(both.grants), both.max_streams, both.max_requests_per_s) == (2, 7, 0)
    assert both.name == "ada"
    assert found("c") is None
    assert found("a", issuer="https://old.test") is None
    with pytest.raises(Unauthenticated, match="ada names no role"):
        authority.require(Presented(identity=ProviderIdentity(ISSUER, "ada", frozenset(), 0.0)))


def test_our_own_tokens_are_told_apart() -> None:
    assert not is_identity_token(new_token())
    assert not is_identity_token("databus_a.b.c")
    assert is_identity_token("a.b.c")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jwks": "http://login.test/keys"}, "use https"),
        ({"jwks": "https://u:p@login.test/keys"}, "jwks"),
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"audience": ""}, "audience"),
        ({"roles": []}, "roles"),
        ({"roles": [{"name": "a"}, {"name": "a"}]}, "two roles"),
    ],
)
def test_a_section_that_would_not_protect_is_refused(
    changes: dict[str, Any], reason: str, provider: IdentityProvider
) -> None:
    assert provider.config(jwks="https://login.test/keys").audience == AUDIENCE
    with pytest.raises(pydantic.ValidationError, match=reason):
        provider.config(**changes)
