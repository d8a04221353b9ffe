"""One JSON call to a Databus server, for commands that make single requests."""

from __future__ import annotations

from typing import Any

from databus.common.errors import BadRequest

_SILENCE_S = 10.0


def call(url: str, *, method: str = "GET", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object that the server answers; {} for an empty answer.

    Raises:
        ServerUnavailable: the server does not answer.
        DatabusError: the problem that the server answered.
    """
    from databus.common.http.peer_calls import peer_call

    with peer_call(method, url, json_body=body, silence_s=_SILENCE_S) as answer:
        return answer.json_object()


def split_database(url: str) -> tuple[str, str]:
    """``http://host:port/shop`` as the server's URL and the database's name.

    Raises:
        BadRequest: it does not end with a name.
    """
    base, _, database = url.rstrip("/").rpartition("/")
    if not base.startswith(("http://", "https://")) or base.endswith("/") or not database:
        raise BadRequest(f"{url!r} is not RELAY_URL/DATABASE, such as http://127.0.0.1:8700/shop")
    return base, database
