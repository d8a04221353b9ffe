"""Between the decoder's objects and the kernel's arrays."""

from __future__ import annotations

import numpy as np

from databus.common.kernels import COMPILED, I64Array
from databus.relay.sources.mysql import kernels as k
from databus.relay.sources.mysql.decoder import BinlogDecoder, Group
from databus.relay.sources.mysql.packets import PacketBuffer
from databus.relay.sources.mysql.plan import KernelTables

_FIRST_IMAGE_BYTES = 1 << 18


def compile_kernel() -> None:
    """Compile the kernel, or load it from numba's cache: half a minute once, then no time."""
    if not COMPILED:
        return
    tables = KernelTables()
    out = np.frombuffer(bytearray(64), dtype=np.uint8)
    k.walk(
        np.frombuffer(bytearray(64), dtype=np.uint8),
        0,
        0,
        out,
        out.view(np.int64),
        np.empty(64, dtype=np.uint8),
        tables.blob,
        tables.plan,
    )


class FastPath:
    """Runs the kernel over received blocks, on behalf of a decoder.

    Invariants:
        I1. Between two calls the decoder's fields hold the whole state; the cells are only
            their copy while the kernel runs.
        I2. What the kernel did not do lies untouched at the start of the packets.

    Owner: the task that reads the stream.
    """

    def __init__(self, decoder: BinlogDecoder) -> None:
        self._decoder = decoder
        self._tables = KernelTables()
        decoder.on_table = self._tables.add
        decoder.on_new_file = self._tables.clear
        self._images = np.empty(_FIRST_IMAGE_BYTES, dtype=np.uint8)

    def run(self, packets: PacketBuffer) -> int:
        """Use up the packets that the kernel can take.

        Returns the room in bytes that must be made before it can go on, or 0: then the next
        packet is the decoder's, or is not whole yet.
        """
        if packets.stop - packets.start < 5:
            return 0
        tables = self._tables
        cells = tables.plan
        self._load(cells)
        out = np.frombuffer(self._decoder.out.data, dtype=np.uint8)
        reason = k.walk(
            np.frombuffer(packets.data, dtype=np.uint8),
            packets.start,
            packets.stop,
            out,
            out.view(np.int64),
            self._images,
            tables.blob,
            cells,
        )
        self._store(cells[: k.HEAD].tolist())
        packets.start = int(cells[k.PLACE])
        self._decoder.rows_done = int(cells[k.ROWS_DONE]) if reason == k.NEED_DECODER else 0
        if reason == k.NEED_ROOM:
            return int(cells[k.NEED_BYTES])
        cells[k.RESUME_AT] = cells[k.ROWS_DONE] = 0
        return 0

    def make_room(self, need_bytes: int) -> None:
        """Enlarge what is too small for the row that comes next."""
        self._decoder.out.make_room(need_bytes)
        if len(self._images) < need_bytes:
            self._images = np.empty(2 * need_bytes, dtype=np.uint8)

    def _load(self, cells: I64Array) -> None:
        decoder = self._decoder
        group = decoder.group
        cells[k.IN_GROUP] = group is not None
        cells[k.WANTED] = group is not None and group.wanted
        if group is not None:
            cells[k.SCN] = group.scn
            cells[k.SEQ] = group.seq
            cells[k.EVENT_COUNT] = group.event_count
            cells[k.COMMIT_US] = group.commit_us
            cells[k.GROUP_FLAGS] = group.flags
            cells[k.GROUP_DOMAIN] = group.domain_id
            cells[k.GROUP_SERVER] = group.server_id
        cells[k.RESOLVED] = decoder.resolved
        cells[k.LAST_SEQ_NO] = decoder.last_seq_no
        cells[k.DOMAIN] = decoder.domain_id
        cells[k.CHECKSUMS] = decoder.checksums
        cells[k.END_OFFSET] = decoder.offset
        cells[k.FOREIGN_GROUPS] = decoder.foreign_groups
        cells[k.OTHER_GROUPS] = decoder.other_groups
        cells[k.FILL] = decoder.out.fill
        cells[k.GROUP_START] = decoder.out.window_start
        cells[k.SENT_PART] = decoder.sent_part

    def _store(self, cells: list[int]) -> None:
        decoder = self._decoder
        decoder.group = None
        if cells[k.IN_GROUP]:
            decoder.group = Group(
                cells[k.SCN],
                cells[k.GROUP_DOMAIN],
                cells[k.GROUP_SERVER],
                cells[k.COMMIT_US],
                cells[k.GROUP_FLAGS],
                bool(cells[k.WANTED]),
                cells[k.SEQ],
                cells[k.EVENT_COUNT],
            )
        decoder.resolved = cells[k.RESOLVED]
        decoder.last_seq_no = cells[k.LAST_SEQ_NO]
        decoder.offset = cells[k.END_OFFSET]
        decoder.foreign_groups = cells[k.FOREIGN_GROUPS]
        decoder.other_groups = cells[k.OTHER_GROUPS]
        decoder.out.fill = cells[k.FILL]
        decoder.out.window_start = cells[k.GROUP_START]
        decoder.sent_part = bool(cells[k.SENT_PART])
