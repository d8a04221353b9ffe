"""A relay's HTTP worker in the test's own event loop, over a ring that the test fills."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from databus.common.access.listener_tls import server_tls
from databus.common.access_config import AuthConfig, TlsConfig
from databus.common.checkpoint import ORIGIN, Position
from databus.common.config import Config, parse
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.http.http_application import serve
from databus.common.http.listening_socket import listening_socket
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.http.relay_server import SERVER, RelayServer, make_relay_app
from databus.relay.processes.wakeup import WakeupSender, make_wakeup
from databus.relay.ring.data_folder import DatabaseFolder
from databus.relay.ring.ring import Ring
from databus.relay.ring.schema_registry import Registry

ORDERS = SourceSchema(
    "shop.orders",
    (Column("id", Kind.INT, nullable=False), Column("item", Kind.STRING)),
    ("id",),
)
ITEMS = SourceSchema(
    "shop.items",
    (Column("id", Kind.INT, nullable=False), Column("name", Kind.STRING)),
    ("id",),
)
CLOCK = "test:1"


def window(
    scn: int,
    events: Iterable[tuple[Op, SourceSchema, int]],
    *,
    first_seq: int = 0,
    txid: str = "",
    dump: bool = False,
    text: str = "x",
) -> bytes:
    """A whole window; an event is (op, schema, id)."""
    builder = WindowBuilder(scn, scn * 1_000_000, first_seq)
    for op, schema, number in events:
        row = schema.encode_row((number, f"{text}{number}"))
        builder.event(
            op,
            schema.source_id,
            schema.fingerprint,
            schema.encode_key((number,)),
            before=None if op in (Op.INSERT, Op.READ) else row,
            after=None if op == Op.DELETE else row,
        )
    return builder.end(txid or f"tx{scn}", dump=dump)


class LiveRelay:
    """The writer's end of the ring and the address of the worker that serves it.

    Owner: one test.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        database: str = "shop",
        ring_bytes: int = 1 << 20,
        start: Position = ORIGIN,
        heartbeat: str = "50ms",
        schemas: Iterable[SourceSchema] = (ORDERS, ITEMS),
        url: str = "generator://",
        clock: str = CLOCK,
        auth: AuthConfig | None = None,
    ) -> None:
        self.database = database
        self.config: Config = parse(
            f'[relay]\nlisten = "127.0.0.1:0"\ndata_dir = "{data_dir}"\n'
            f'heartbeat = "{heartbeat}"\n'
            f'[[database]]\nname = "{database}"\nurl = "{url}"\n'
            f"ring_bytes = {max(ring_bytes, 64 << 10)}\n"
        )
        if auth is not None:
            self.config = self.config.model_copy(update={"auth": auth})
        self.folder = DatabaseFolder.of(data_dir, database)
        self.writer = Ring.create(self.folder.path, ring_bytes, clock=clock, start=start)
        self.registry = Registry(self.folder.registry)
        self.registry.add(schemas)
        self.url = ""
        self.server: RelayServer | None = None
        self._sender: WakeupSender | None = None

    def append(self, *blocks: bytes) -> None:
        """Put frames into the ring and wake the readers."""
        for block in blocks:
            self.writer.append(block)
        if self._sender is not None:
            self._sender.wake()

    @asynccontextmanager
    async def served(self, tls: TlsConfig | None = None) -> AsyncIterator[LiveRelay]:
        """Serve it at ``url`` meanwhile."""
        stop, started = asyncio.Event(), asyncio.Event()
        wakeup = make_wakeup()
        self._sender = WakeupSender([os.dup(wakeup)])
        app = make_relay_app(self.config, wakeups={self.database: wakeup})
        self.server = app[SERVER]
        listener = listening_socket("127.0.0.1:0")
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(
            serve(app, listener, stop, started=started.set, tls=server_tls(tls))
        )
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        try:
            if serving.done():
                await serving
            yield self
        finally:
            stop.set()
            await serving
            self._sender.close()
            self._sender = None

    def close(self) -> None:
        """Let go of the ring."""
        self.registry.close()
        self.writer.close()
