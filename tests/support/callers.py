"""Callers with tokens, for tests of what they may do."""

from __future__ import annotations

from typing import Any

from databus.common.access.authority import hash_of, new_token
from databus.common.access_config import AuthConfig


class Callers:
    """Callers that a test names; ``auth`` is the configuration with all of them."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}
        self._sections: list[dict[str, Any]] = []

    def add(self, name: str, *grants: dict[str, Any], **limits: Any) -> dict[str, str]:
        """A caller with these grants; its headers."""
        self.tokens[name] = new_token()
        section = {"name": name, "hashes": [hash_of(self.tokens[name])], "grants": list(grants)}
        self._sections.append({**section, **limits})
        return self.headers(name)

    def headers(self, name: str) -> dict[str, str]:
        """The headers of a caller's requests."""
        return {"Authorization": f"Bearer {self.tokens[name]}"}

    @property
    def auth(self) -> AuthConfig:
        """The section of the configuration."""
        return AuthConfig.model_validate({"tokens": self._sections})

    def without(self, name: str) -> AuthConfig:
        """The section without one caller."""
        left = [section for section in self._sections if section["name"] != name]
        return AuthConfig.model_validate({"tokens": left})
