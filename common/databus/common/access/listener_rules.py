"""Which listeners may be reached from a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from databus.common.errors import ConfigError
from databus.common.extras import require_extra
from databus.common.loopback import is_loopback

if TYPE_CHECKING:
    from databus.common.access_config import AuthConfig, HttpConfig


def require_protection(listen: str, http: HttpConfig, auth: AuthConfig) -> None:
    """Refuse a listener that a network can reach, without TLS or without authentication.

    A server with mutual TLS authenticates its callers only if ``[auth]`` names them.

    Raises:
        ConfigError: the message has the keys that are missing.
        MissingDependency: ``[auth.oidc]`` needs an extra that is not installed.
    """
    if auth.oidc is not None:
        require_extra("oidc")
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
