"""A claim on a suspended table: while it holds, no other process resynchronises the table.

The relay grants it.  Without a claim the relay empties the table in the stream and dumps it whole.
"""

from __future__ import annotations

import contextlib
from typing import Any

from databus.bootstrap.verify.table_copy import HttpPeer
from databus.common.errors import DatabusError, NotFound, ServerUnavailable

OPERATOR = "verify"
"""The claimant on the order of an operator, who needs no other confirmation."""


class TableClaim:
    """One table, claimed at the relay that it is compared with.

    ``returned``: the columns that the stream dropped from the table and has again.  A reader that
    dropped them lacks their values, also where the copy has the value of the source.

    Owner: one task.  A claim that is neither ended nor followed by reads expires at the relay.
    """

    def __init__(self, relay: HttpPeer, source: str, by: str) -> None:
        self._relay = relay
        self._source = source
        self._by = by
        self.returned: list[str] = []

    async def take(self) -> None:
        """Claim the table; a table that is followed needs no claim.

        Raises:
            ServerUnavailable: another process resynchronises it, or it must be confirmed first.
        """
        answer = await self._request("claim", is_operator=self._by == OPERATOR)
        if answer.get("granted") is False:
            tables: list[dict[str, Any]] = answer["tables"]
            state = next((one for one in tables if one["source"] == self._source), {})
            raise ServerUnavailable(
                f"{self._source} is {state.get('state', 'not free')}"
                + (f" by {state['by']}" if state.get("by") else "")
                + f": {state.get('cure', 'try again')}"
            )
        self.returned = answer.get("returned", [])

    async def done(self) -> bool:
        """Report that the table was compared and repaired; whether the relay follows it now."""
        return (await self._request("done")).get("granted") is not False

    async def give_up(self, reason: str, *, for_good: bool = False) -> None:
        """Report that it could not be repaired; ``for_good`` lets the relay dump it."""
        with contextlib.suppress(DatabusError):
            await self._request("give_up", reason=reason, for_good=for_good)

    async def _request(self, action: str, **more: Any) -> dict[str, Any]:
        body = {"action": action, "source": self._source, "by": self._by, **more}
        try:
            return await self._relay.document("POST", "tables", body)
        except NotFound:
            return {}  # A relay of an earlier version: its tables are not claimed.
