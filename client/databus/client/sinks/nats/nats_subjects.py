"""Subjects: what they may contain, and which of them a stream takes.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from databus.common.errors import SinkRefused
from databus.common.schema.source_names import split_source

_ILLEGAL = re.compile(r"[\s\x00-\x20\x7f*>%]")
_ILLEGAL_IN_TOKEN = re.compile(r"[\s\x00-\x20\x7f*>%.]")


def default_subject(prefix: str, source: str) -> str:
    """``PREFIX.SCHEMA.TABLE``; what a token may not have, and ``%``, is ``%XX``."""
    schema, table = split_source(source)
    return ".".join([prefix, *(_ILLEGAL_IN_TOKEN.sub(_escaped, one) for one in (schema, table))])


def subject_of_target(target: str) -> str:
    """The subject of a route's target: its dots separate tokens.

    Raises:
        SinkRefused: a token is empty.
    """
    subject = _ILLEGAL.sub(_escaped, target)
    if not all(subject.split(".")):
        raise SinkRefused(f"the target {target!r} is no subject of NATS: a token is empty")
    return subject


def is_taken(subject: str, patterns: Iterable[str]) -> bool:
    """Whether one of the subjects of a stream, with ``*`` and ``>``, matches."""
    return any(_matches(subject.split("."), pattern.split(".")) for pattern in patterns)


def _matches(tokens: list[str], pattern: list[str]) -> bool:
    for at, wanted in enumerate(pattern):
        if wanted == ">":
            return len(tokens) > at
        if at >= len(tokens) or wanted not in ("*", tokens[at]):
            return False
    return len(tokens) == len(pattern)


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())
