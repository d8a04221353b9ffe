"""Messages to one stream, which the server takes in order and without a gap, or not at all."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from databus.client.sinks.nats.nats_library import (
    WRONG_SEQUENCE,
    as_ours,
    refusal_or_failure,
)
from databus.common.errors import SinkUnavailable

_MOST_PENDING = 4000
_MOST_PENDING_BYTES = 16 << 20


@dataclass(slots=True)
class Message:
    """A message and its headers; ``Nats-Msg-Id`` is among them."""

    subject: str
    payload: bytes
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What the server answers to a message."""

    sequence: int = 0
    is_duplicate: bool = False
    code: int = 0
    """JetStream's code of an error; 0 if the message is in the stream."""
    error: str = ""

    @classmethod
    def of(cls, answer: Any) -> Acknowledgement:
        """The acknowledgement in a message; one without a text means that no stream answered."""
        if not answer.data:
            return cls(code=-1, error="JetStream does not answer, or no stream has the subject")
        document = json.loads(answer.data)
        if error := document.get("error"):
            return cls(code=int(error.get("err_code", -1)), error=str(error.get("description")))
        return cls(int(document["seq"]), bool(document.get("duplicate")))


class StreamWriter:
    """Publishes to a stream without waiting for each acknowledgement.

    Invariants:
        I1. Each message has the sequence of the one before it in ``Nats-Expected-Last-Sequence``.
            If the server does not take one, it takes none after it; and it takes none if another
            publisher has written to the stream.
        I2. A message whose id the server remembers is there already: it is not there twice.
        I3. At most ``_MOST_PENDING`` messages are not acknowledged.

    Owner: one event loop.
    Raises: SinkUnavailable, SinkRefused.
    """

    def __init__(self, connection: Any, stream: str, last: int, timeout_s: float) -> None:
        self.last = last
        """Sequence of the last message that was acknowledged."""
        self._connection, self._stream, self._timeout_s = connection, stream, timeout_s
        self._inbox = connection.new_inbox()
        self._is_subscribed = False
        self._number = 0
        self._pending: dict[int, Message] = {}
        self._answers: dict[int, Acknowledgement] = {}
        self._answered = asyncio.Event()
        self._bytes = 0

    async def publish(self, message: Message) -> None:
        """Send a message; waits for acknowledgements if many are missing."""
        if not self._is_subscribed:
            with as_ours("subscribing to acknowledgements"):
                await self._connection.subscribe(f"{self._inbox}.*", cb=self._on_answer)
            self._is_subscribed = True
        await self._send(message)
        self._bytes += len(message.payload)
        if len(self._pending) >= _MOST_PENDING or self._bytes >= _MOST_PENDING_BYTES:
            await self.settle()

    async def settle(self) -> None:
        """Wait until every message is in the stream."""
        while self._pending:
            await self._wait()
            pending, answers = self._pending, self._answers
            self._pending, self._answers, self._bytes = {}, {}, 0
            has_duplicate = False
            for number, message in pending.items():
                answer = answers[number]
                if answer.code in WRONG_SEQUENCE and has_duplicate:
                    await self._send(message)
                elif answer.code:
                    raise refusal_or_failure(
                        f"writing to the stream {self._stream}", answer.code, answer.error
                    )
                elif answer.is_duplicate:
                    has_duplicate = True
                else:
                    self.last = answer.sequence

    def fail(self) -> None:
        """The connection has ended: no acknowledgement comes any more."""
        self._answered.set()

    async def _send(self, message: Message) -> None:
        expected = str(self.last + len(self._pending))
        message.headers["Nats-Expected-Last-Sequence"] = expected
        self._number += 1
        self._pending[self._number] = message
        self._answered.clear()
        with as_ours(f"writing to the stream {self._stream}"):
            await self._connection.publish(
                message.subject,
                message.payload,
                reply=f"{self._inbox}.{self._number}",
                headers=message.headers,
            )

    async def _on_answer(self, answer: Any) -> None:
        self._answers[int(answer.subject.rpartition(".")[2])] = Acknowledgement.of(answer)
        if len(self._answers) == len(self._pending):
            self._answered.set()

    async def _wait(self) -> None:
        """Until every message of ``_pending`` has its answer."""
        doing = f"waiting for the stream {self._stream}"
        with as_ours(doing):
            async with asyncio.timeout(self._timeout_s):
                while len(self._answers) < len(self._pending):
                    if self._connection.is_closed:
                        raise SinkUnavailable(f"{doing}: the connection was lost")
                    await self._answered.wait()
                    self._answered.clear()
