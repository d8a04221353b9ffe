"""The requests of the search sink."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import aiohttp

from databus.client.sinks.search.bulk_requests import SearchDocument, bodies, check_answer
from databus.common.errors import ConfigError, RowRefused, SinkRefused, SinkUnavailable
from databus.common.sink_config import SearchSinkConfig

_RETRIED = frozenset({408, 425, 429})
_PAGE = 1000


class SearchClient:
    """Speaks the part of the REST interface that OpenSearch and Elasticsearch share.

    Owner: one event loop.
    Raises: SinkUnavailable if a retry may help, SinkRefused otherwise.
    """

    def __init__(self, config: SearchSinkConfig) -> None:
        parts = urlsplit(config.url.reveal)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("[sink.search] url is no http:// or https:// URL")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = f":{parts.port}" if parts.port else ""
        self.url = f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"
        self._headers = {}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        if config.api_key:
            self._headers["Authorization"] = f"ApiKey {config.api_key.reveal}"
        self._timeout = aiohttp.ClientTimeout(total=config.timeout)
        self._bulk_bytes = config.bulk_bytes
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session, and see whether the server answers."""
        await self.close()
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        await self.ask("GET", "/")

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def write(self, documents: Iterable[SearchDocument]) -> None:
        """Write documents, and wait until they are durable.

        Raises:
            RowRefused: the server does not take a document.
        """
        for body, count in bodies(documents, self._bulk_bytes):
            check_answer(await self.ask("POST", "/_bulk", body, "application/x-ndjson"), count)

    async def documents(self, index: str, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The documents of these ids that are there, as they are now."""
        body = json.dumps({"ids": list(ids)}).encode()
        answer = await self.ask("POST", f"/{quote(index)}/_mget", body, missing={"docs": []})
        return {one["_id"]: one["_source"] for one in answer["docs"] if one.get("found")}

    async def ids_up_to(self, index: str, version: int) -> AsyncIterator[list[str]]:
        """The ids of the documents whose versions are not above ``version``, in pages."""
        await self.ask("POST", f"/{quote(index)}/_refresh", missing={})
        query = {"version": True, "_source": False, "size": _PAGE, "sort": ["_doc"]}
        path = f"/{quote(index)}/_search?scroll=5m"
        nothing: dict[str, Any] = {"hits": {"hits": []}}
        answer = await self.ask("POST", path, json.dumps(query).encode(), missing=nothing)
        scroll = answer.get("_scroll_id")
        try:
            while hits := answer["hits"]["hits"]:
                yield [one["_id"] for one in hits if int(one["_version"]) <= version]
                body = json.dumps({"scroll": "5m", "scroll_id": scroll}).encode()
                answer = await self.ask("POST", "/_search/scroll", body)
                scroll = answer.get("_scroll_id", scroll)
        finally:
            if scroll:
                body = json.dumps({"scroll_id": [scroll]}).encode()
                await self.ask("DELETE", "/_search/scroll", body, missing={})

    async def refresh(self, indexes: Iterable[str]) -> None:
        """Let searches find what was written."""
        names = quote(",".join(sorted(indexes)), safe=",")
        await self.ask("POST", f"/{names}/_refresh?ignore_unavailable=true", missing={})

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        kind: str = "application/json",
        *,
        missing: Mapping[str, Any] | None = None,
    ) -> Any:
        """The JSON that the server answers; ``missing`` for an answer 404."""
        assert self._session is not None
        headers = {"Content-Type": kind} if body is not None else {}
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, allow_redirects=False
            ) as answer:
                status, text = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SinkUnavailable(f"{self.url} does not answer: {error!r}") from error
        if status == 404 and missing is not None:
            return missing
        words = text[:300].decode(errors="replace")
        shown = f"{self.url} answered {status} to {method} {path}: {words}"
        if status in _RETRIED or status >= 500:
            raise SinkUnavailable(shown)
        if status == 413:
            raise RowRefused(shown)
        if status >= 300:
            raise SinkRefused(shown)
        try:
            return json.loads(text)
        except ValueError as error:
            raise SinkUnavailable(shown) from error
