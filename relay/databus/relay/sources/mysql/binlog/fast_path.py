"""Moves state between the decoder's objects and the kernel's arrays."""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import COMPILED, I64Array
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.binlog.open_group import Group
from databus.relay.sources.mysql.gtid.mysql_lineage import LineageMark
from databus.relay.sources.mysql.kernels import kernel_cells as c
from databus.relay.sources.mysql.kernels.binlog_kernels import walk
from databus.relay.sources.mysql.kernels.mysql_kernel_tables import MySqlKernelTables
from databus.relay.sources.mysql.protocol.packet_buffer import PacketBuffer

_FIRST_IMAGE_BYTES = 1 << 18


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache: the first run takes half a minute."""
    if not COMPILED:
        return
    tables = MySqlKernelTables()
    out = np.frombuffer(bytearray(64), dtype=np.uint8)
    walk(
        np.frombuffer(bytearray(64), dtype=np.uint8),
        0,
        0,
        out,
        np.empty(64, dtype=np.uint8),
        tables.blob,
        tables.plan,
    )


class FastPath:
    """Runs the kernel over received blocks, for a decoder.

    Invariants:
        I1. Between two calls the decoder's fields hold the whole state; the cells are only
            their copy while the kernel runs.
        I2. The packets that the kernel did not read are unchanged at the start of the buffer.

    Owner: the task that reads the stream.
    """

    def __init__(self, decoder: BinlogDecoder) -> None:
        self._decoder = decoder
        self._tables = MySqlKernelTables()
        decoder.known.on_map = self._tables.add
        decoder.known.on_new_file = self._tables.clear
        self._images = np.empty(_FIRST_IMAGE_BYTES, dtype=np.uint8)

    def run(self, packets: PacketBuffer) -> int:
        """Read the packets that the kernel can read.

        Returns the space in bytes that it needs to continue, or 0: then the decoder must read the
        next packet, or it is not whole yet.
        """
        if packets.stop - packets.start < 5:
            return 0
        tables = self._tables
        cells = tables.plan
        self._load(cells)
        out = np.frombuffer(self._decoder.out.data, dtype=np.uint8)
        reason = walk(
            np.frombuffer(packets.data, dtype=np.uint8),
            packets.start,
            packets.stop,
            out,
            self._images,
            tables.blob,
            cells,
        )
        self._store(cells[: c.HEAD].tolist())
        packets.start = int(cells[c.STOPPED_AT])
        self._decoder.out.rows_done = int(cells[c.ROWS_DONE]) if reason == c.NEED_DECODER else 0
        if reason == c.NEED_ROOM:
            return int(cells[c.NEED_BYTES])
        cells[c.RESUME_AT] = cells[c.ROWS_DONE] = 0
        return 0

    def make_room(self, need_bytes: int) -> None:
        """Enlarge the buffers that are too small for the next row."""
        self._decoder.out.make_room(need_bytes)
        if len(self._images) < need_bytes:
            self._images = np.empty(2 * need_bytes, dtype=np.uint8)

    def _load(self, cells: I64Array) -> None:
        decoder, cursor = self._decoder, self._decoder.cursor
        progress, out = decoder.progress, decoder.out
        group = decoder.group
        cells[c.IN_GROUP] = group is not None
        cells[c.WANTED] = c.NOT_READ
        if group is not None:
            cells[c.WANTED] = c.EXAMINED if group.is_examined else int(group.wanted)
            cells[c.SCN] = group.scn
            cells[c.SEQ] = group.seq
            cells[c.EVENT_COUNT] = group.event_count
            cells[c.COMMIT_US] = group.commit_us
            cells[c.GROUP_FLAGS] = group.flags
            cells[c.GROUP_DOMAIN] = group.domain_id
            cells[c.GROUP_SERVER] = group.server_id
        cells[c.RESOLVED] = progress.resolved
        cells[c.LAST_SEQ_NO] = progress.last_seq_no
        cells[c.DOMAIN] = decoder.domain_id
        cells[c.CHECKSUMS] = cursor.has_checksum
        cells[c.GROUPS] = decoder.groups_in_kernel
        cells[c.EXPECT] = c.NO_EXPECT if progress.expected is None else progress.expected.scn
        cells[[c.UUID_LOW, c.UUID_HIGH, c.SCN_BASE]] = decoder.kernel_server
        cells[c.END_OFFSET] = cursor.offset
        cells[c.SERVER_OFFSET] = cursor.server_offset
        cells[c.GROUP_BEGIN] = progress.group_begin
        cells[c.FOREIGN_GROUPS] = progress.foreign_groups
        foreign = progress.foreign
        cells[[c.FOREIGN_DOMAIN, c.FOREIGN_SERVER]] = foreign.latest
        cells[c.FOREIGN_SEQ_NO] = foreign.last(foreign.latest)
        cells[c.OTHER_GROUPS] = progress.other_groups
        cells[c.FILL] = out.fill
        cells[c.GROUP_START] = out.window_start
        cells[c.SENT_PART] = out.is_partly_sent

    def _store(self, cells: list[int]) -> None:
        decoder, cursor = self._decoder, self._decoder.cursor
        progress, out = decoder.progress, decoder.out
        decoder.group = None
        if cells[c.IN_GROUP]:
            decoder.group = Group(
                cells[c.SCN],
                cells[c.GROUP_DOMAIN],
                cells[c.GROUP_SERVER],
                cells[c.COMMIT_US],
                cells[c.GROUP_FLAGS],
                cells[c.WANTED] == c.READ,
                cells[c.SEQ],
                cells[c.EVENT_COUNT],
                cells[c.WANTED] == c.EXAMINED,
            )
        progress.group_begin = cells[c.GROUP_BEGIN]
        last = (cells[c.SCN], cells[c.GROUP_DOMAIN])
        if last == (cells[c.RESOLVED], cells[c.DOMAIN]) and last[0] != progress.resolved:
            mark = LineageMark(cells[c.SCN], cells[c.GROUP_SERVER], cells[c.COMMIT_US])
            decoder.came_behind(mark)
        came_to = cells[c.RESOLVED], cells[c.LAST_SEQ_NO]
        if came_to != (progress.resolved, progress.last_seq_no):
            decoder.came_to(*came_to, cells[c.SEQ_NO_BEFORE])
        if cursor.payload is None:
            cursor.offset, cursor.server_offset = cells[c.END_OFFSET], cells[c.SERVER_OFFSET]
        progress.foreign_groups = cells[c.FOREIGN_GROUPS]
        progress.foreign.note(progress.foreign.latest, cells[c.FOREIGN_SEQ_NO])
        progress.other_groups = cells[c.OTHER_GROUPS]
        out.fill = cells[c.FILL]
        out.window_start = cells[c.GROUP_START]
        out.is_partly_sent = bool(cells[c.SENT_PART])
