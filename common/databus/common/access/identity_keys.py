"""The public keys of an identity provider, loaded when a token needs them, and again later."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from databus.common.access.authority import ProviderIdentity
from databus.common.access.identity_tokens import IdentityTokens, UnknownKey
from databus.common.errors import DatabusError, ServerUnavailable, Unauthenticated

if TYPE_CHECKING:
    from databus.common.access_config import OidcConfig

LEAST_S = 10.0
"""Between two loads because of a key that is not known: tokens of strangers name any."""

_log = logging.getLogger("databus.http")


class IdentityKeys:
    """Verifies tokens with the keys of one issuer.

    Invariants:
        I1. The keys are loaded at most every ``LEAST_S``, whatever tokens come.
        I2. While the provider does not answer, the keys of the last load are used.

    Owner: one event loop.
    """

    def __init__(
        self,
        config: OidcConfig,
        fetch: Callable[[OidcConfig], Awaitable[Any]],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``fetch`` gives the provider's key set."""
        self._config = config
        self._fetch = fetch
        self._tokens = IdentityTokens(config)
        self._clock_s = clock_s
        self._turn = asyncio.Lock()
        self._tried_s = float("-inf")
        self._has_keys = False

    async def identity(self, token: str) -> ProviderIdentity:
        """The caller that a token names.

        Raises:
            Unauthenticated: the token is refused.
            ServerUnavailable: no keys could be loaded yet.
        """
        await self._load(self._config.refresh if self._has_keys else LEAST_S)
        if not self._has_keys:
            raise ServerUnavailable(
                f"the keys of {self._config.issuer} could not be loaded yet: no token can be "
                "verified"
            )
        try:
            return self._tokens.verify(token)
        except UnknownKey:
            await self._load(LEAST_S)
        try:
            return self._tokens.verify(token)
        except UnknownKey as error:
            raise Unauthenticated(str(error)) from None

    async def _load(self, age_s: float) -> None:
        """Load the keys if the last attempt is older than ``age_s``."""
        async with self._turn:
            if self._clock_s() - self._tried_s < age_s:
                return
            self._tried_s = self._clock_s()
            try:
                self._tokens.load(await self._fetch(self._config))
            except DatabusError as error:
                _log.warning("the keys of %s: %s", self._config.issuer, error.message)
            else:
                self._has_keys = True
