"""Which listeners may be reached from a network."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from databus.common.errors import ConfigError

if TYPE_CHECKING:
    from databus.common.access_config import AuthConfig, HttpConfig


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_protection(listen: str, http: HttpConfig, auth: AuthConfig) -> None:
    """Refuse a listener that a network can reach, without TLS or without authentication.

    A server with mutual TLS authenticates its callers only if ``[auth]`` names them.

    Raises:
        ConfigError: the message has the keys that are missing.
    """
    if http.insecure or is_loopback(listen.rpartition(":")[0]):
        return
    missing = [] if http.tls is not None else ["TLS ([http.tls])"]
    missing += [] if auth.is_on else ["callers ([[auth.tokens]] or [[auth.certificates]])"]
    if missing:
        raise ConfigError(
            f"the listener {listen} can be reached from a network, and has no "
            f"{' and no '.join(missing)}; configure that, listen at 127.0.0.1, or set insecure = "
            f"true in [http] if the network is protected otherwise"
        )
