"""Encrypts keys of the database where they must not be readable: a dump's record, an answer.

A dump must resume after the last key that it has read, also after a restart.  If that key has a
hashed column, it is stored sealed.  The construction is SIV out of HMAC-SHA256: the tag over the
text is the nonce of a key stream.  So equal keys have equal seals, and a changed seal is
refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

from databus.common.errors import BadRequest

_MARK = "sealed"
_TAG_BYTES = 16


class KeyEncryption:
    """Seals and opens keys with a secret.

    Invariants:
        I1. ``open(seal(key)) == key``; a key that was never sealed opens as it is.
    """

    def __init__(self, secret: str) -> None:
        self._tag_key = hmac.digest(secret.encode(), b"databus seal: tag", "sha256")
        self._stream_key = hmac.digest(secret.encode(), b"databus seal: stream", "sha256")

    def seal(self, key: list[Any]) -> list[Any]:
        """A key's values as one opaque value."""
        text = json.dumps(key, separators=(",", ":")).encode()
        tag = hmac.digest(self._tag_key, text, "sha256")[:_TAG_BYTES]
        return [{_MARK: base64.b64encode(tag + self._mixed(tag, text)).decode()}]

    def open(self, key: list[Any] | None) -> list[Any] | None:
        """The key that ``seal`` got.

        Raises:
            BadRequest: it was sealed with another secret, or changed.
        """
        if key is None or len(key) != 1 or not isinstance(key[0], dict) or _MARK not in key[0]:
            return key
        try:
            sealed = base64.b64decode(key[0][_MARK], validate=True)
        except (ValueError, TypeError):
            sealed = b""
        tag, text = sealed[:_TAG_BYTES], self._mixed(sealed[:_TAG_BYTES], sealed[_TAG_BYTES:])
        wanted = hmac.digest(self._tag_key, text, "sha256")[:_TAG_BYTES]
        if not hmac.compare_digest(tag, wanted):
            raise BadRequest("a sealed key cannot be opened: hash_salt has changed; start again")
        opened: list[Any] = json.loads(text)
        return opened

    def _mixed(self, tag: bytes, text: bytes) -> bytes:
        """``text`` XORed with the key stream of ``tag``; applied twice it returns ``text``."""
        stream = b"".join(
            hmac.digest(self._stream_key, tag + number.to_bytes(4, "little"), hashlib.sha256)
            for number in range(len(text) // 32 + 1)
        )
        return bytes(a ^ b for a, b in zip(text, stream, strict=False))
