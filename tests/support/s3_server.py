"""A private S3 server (moto's) in a thread of this process, with faults to order."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from databus.common.config import S3Options

BUCKET = "databus-test"
ACCESS_KEY = "test"
"""Whose requests are answered; moto itself looks at no credentials."""
_numbers = itertools.count(1)
_SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>reduce your rate</Message></Error>'
)
_UNKNOWN_KEY = (
    b'<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code>'
    b"<Message>The AWS Access Key Id you provided does not exist in our records.</Message></Error>"
)


@dataclass
class Faults:
    """What goes wrong, each as a share of the requests.

    ``refused`` are answered 503 and not done; of ``lost`` the answer says 503, but they are
    done; ``slow`` ones are answered after ``delay_s``.  ``refused_writes`` and ``lost_writes``
    are parts of keys: of the first every write is refused, of the second the next one's answer
    is lost.
    """

    refused: float = 0.0
    lost: float = 0.0
    slow: float = 0.0
    delay_s: float = 0.3
    refused_writes: tuple[str, ...] = ()
    lost_writes: list[str] = field(default_factory=list)


class S3Server:
    """The server; each ``empty_prefix`` is an empty prefix of one bucket.

    moto keeps one account for all servers of a process, so prefixes are numbered across them.

    Owner: the test that started it; ``faults`` may be changed at any time.
    """

    def __init__(self, seed: int = 1) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log_request(self, *_: object, **__: object) -> None:
                """Not on the terminal."""

        self.faults = Faults()
        self.requests = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._inner: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._make_bucket()

    def _make_bucket(self) -> None:
        import boto3

        options = self.options()
        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=options.region,
            aws_access_key_id=options.access_key,
            aws_secret_access_key=options.secret_key.get_secret_value(),
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()

    def options(self, **changes: Any) -> S3Options:
        """How the server is reached."""
        return S3Options.model_validate(
            {
                "endpoint": self.url,
                "region": "us-east-1",
                "access_key": ACCESS_KEY,
                "secret_key": "not-a-secret",
                **changes,
            }
        )

    def empty_prefix(self) -> str:
        """The URL of an empty prefix."""
        return f"s3://{BUCKET}/place-{next(_numbers)}"

    def _answer(self, environment: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            self.requests += 1
            draw = [self._random.random() for _ in range(3)]
        if draw[0] < self.faults.slow:
            time.sleep(self.faults.delay_s)
        is_write = environment["REQUEST_METHOD"] not in ("GET", "HEAD")
        key = environment["PATH_INFO"] if is_write else ""
        is_stranger = f"Credential={ACCESS_KEY}/" not in environment.get("HTTP_AUTHORIZATION", "")
        is_refused = any(part in key for part in self.faults.refused_writes)
        if is_stranger or is_refused or draw[1] < self.faults.refused:
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            return _forbid(respond) if is_stranger else _refuse(respond)
        if length := int(environment.get("CONTENT_LENGTH") or 0):
            # Whole before the lock: a process may be paused in the middle of its request.
            environment["wsgi.input"] = io.BytesIO(environment["wsgi.input"].read(length))
        # moto looks at a write's condition and writes in two steps; S3 does both in one.
        with self._writing if is_write else contextlib.nullcontext():
            if draw[2] < self.faults.lost or self._is_lost(key):
                list(self._inner(environment, lambda *_, **__: None))
                return _refuse(respond)
            answer: Iterable[bytes] = self._inner(environment, respond)
            return answer

    def _is_lost(self, key: str) -> bool:
        for part in self.faults.lost_writes:
            if part in key:
                self.faults.lost_writes.remove(part)
                return True
        return False

    def close(self) -> None:
        """Stop it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _refuse(respond: Callable[..., Any]) -> Iterable[bytes]:
    return _say(respond, "503 Slow Down", _SLOW_DOWN)


def _forbid(respond: Callable[..., Any]) -> Iterable[bytes]:
    return _say(respond, "403 Forbidden", _UNKNOWN_KEY)


def _say(respond: Callable[..., Any], status: str, content: bytes) -> Iterable[bytes]:
    respond(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))])
    return [content]
