"""Checks of an LMDB file before LMDB maps it: a page that the file lacks ends the process.

LMDB reads its file through a memory map.  A page behind the end of the file is a SIGBUS there,
and a damaged offset within a page is a read outside of the map.  Neither is an exception.  So
the file is read here, by ordinary reads, before LMDB opens it.  It does not read values.

Source: lmdb 0.9 ``mdb.c``, structures MDB_meta, MDB_db, MDB_page and MDB_node on 64 bits.
"""

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from databus.common.errors import FormatError

MAGIC, VERSION = 0xBEEFC0DE, 1
PAGE_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
BIG_DATA, SUB_DATA = 1, 2
INTEGER_KEYS = 8
NO_PAGE = 2**64 - 1
HEAD_BYTES = 2 * PAGE_SIZES[-1]
WHOLE_BYTES = 64 << 20  # a walk over it takes less than a second
BUSY_ATTEMPTS = 5
CREATION_S = 0.5  # a file that another process is creating is empty for a moment
CURE = "Restore it from a copy, or move its folder away to start from the beginning."

PAGE = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
OVERFLOW_COUNT = struct.Struct("<12xI")
NODE = struct.Struct("<HHHH")  # size or page number (low, high), flags, size of the key
TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branches, leaves, overflows, entries, root
META_HEAD = struct.Struct("<IIQQ")  # magic, version, address, size of the map
META_TAIL = struct.Struct("<QQ")  # last page, transaction
META_BYTES = PAGE.size + META_HEAD.size + 2 * TREE.size + META_TAIL.size


def check_lmdb(folder: Path, *, whole: bool = False) -> int:
    """Check ``data.mdb`` in ``folder`` and return its size; 0 for a file that does not exist.

    A file larger than WHOLE_BYTES that holds every page up to its last one is accepted without
    walking its trees, unless ``whole`` is set.  A shorter one is valid too: LMDB counts pages
    that a transaction took and returned, and does not write them.  Its trees then show whether a
    used page is missing.

    Raises: FormatError naming the file, the page and the cure; OSError.
    """
    path = folder / "data.mdb"
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return _check(path, descriptor, whole=whole)
    finally:
        os.close(descriptor)


def _check(path: Path, descriptor: int, *, whole: bool) -> int:
    """Check until one commit's pages were seen: another process may write meanwhile."""
    empty_since_s = time.monotonic()
    attempts = 0
    while True:
        head = os.pread(descriptor, HEAD_BYTES, 0)
        attempts += 1
        # While a writer commits all the time, a walk never sees one commit's pages.
        whole_bytes = WHOLE_BYTES if attempts <= BUSY_ATTEMPTS else 0
        try:
            return _File(path, descriptor, head).check(2**63 if whole else whole_bytes)
        except FormatError:
            is_new = not head and time.monotonic() < empty_since_s + CREATION_S
            if not is_new and os.pread(descriptor, HEAD_BYTES, 0) == head:
                raise
            time.sleep(0.001)


class SizeGuard:
    """Notices that another process has cut a file that LMDB has mapped.

    LMDB never makes its file shorter.  A cut between ``check`` and the read that follows it
    still ends the process by SIGBUS; the next start then names the file.

    Owner: the owner of the mapping; any of its threads may call.
    Raises: FormatError, at each call from then on.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "data.mdb"
        self._known_bytes = 0

    def check(self) -> None:
        """Call before each transaction."""
        # Read before the size: another thread may store a larger one meanwhile.
        known_bytes = self._known_bytes
        try:
            size_bytes = self._path.stat().st_size
        except FileNotFoundError:
            size_bytes = 0
        if size_bytes < known_bytes:
            raise FormatError(
                f"{self._path}: another process cut it from {known_bytes} to {size_bytes} "
                f"bytes while it was in use. {CURE}"
            )
        self._known_bytes = max(known_bytes, size_bytes)


@dataclass(frozen=True, slots=True)
class _Tree:
    """One MDB_db: a tree of pages and how many it has."""

    pad: int
    flags: int
    depth: int
    branch_count: int
    leaf_count: int
    overflow_count: int
    entry_count: int
    root: int


@dataclass(frozen=True, slots=True)
class _Meta:
    """One of the two meta pages."""

    page_bytes: int
    trees: tuple[_Tree, _Tree]
    last_page: int
    transaction: int


class _File:
    """The pages of one file, read by ``pread``.

    Owner: one call of ``check_lmdb``.
    Raises: FormatError.
    """

    def __init__(self, path: Path, descriptor: int, head: bytes) -> None:
        self._path, self._descriptor, self._head = path, descriptor, head
        self._page_bytes = 0
        self._last_page = 0
        self._size_bytes = 0
        self._seen: set[int] = set()

    def check(self, whole_bytes: int) -> int:
        """Read the meta pages, and the trees of a file up to ``whole_bytes`` or with a hole.

        Returns: the file's size in bytes.
        """
        meta = self._newest()
        self._page_bytes, self._last_page = meta.page_bytes, meta.last_page
        # After the meta pages: a writer beside us only makes the file longer.
        self._size_bytes = os.fstat(self._descriptor).st_size
        is_long = self._size_bytes >= (meta.last_page + 1) * meta.page_bytes
        if is_long and self._size_bytes > whole_bytes:
            return self._size_bytes
        for tree in meta.trees:
            self._walk_tree(tree)
        return self._size_bytes

    def _fail(self, where: str, what: str) -> FormatError:
        return FormatError(f"{self._path}: {where}: {what}. The file is cut off or damaged. {CURE}")

    # -- meta pages ---------------------------------------------------------------------

    def _newest(self) -> _Meta:
        first = self._meta(self._head, 0, 0)
        second = self._meta(self._head, 1, first.page_bytes)
        if first.page_bytes != second.page_bytes:
            raise self._fail(
                "its meta pages", f"page sizes {first.page_bytes} and {second.page_bytes} differ"
            )
        pair = (first.transaction, second.transaction)
        is_new = pair == (0, 0)  # created, and nothing committed yet
        if not is_new and (pair[0] % 2 or not pair[1] % 2 or abs(pair[0] - pair[1]) != 1):
            raise self._fail("its meta pages", f"transactions {pair} do not follow one another")
        return max(first, second, key=lambda meta: meta.transaction)

    def _meta(self, head: bytes, number: int, offset: int) -> _Meta:
        where = f"meta page {number} at byte {offset}"
        if len(head) < offset + META_BYTES:
            raise self._fail(where, f"the file has {len(head)} bytes")
        page, _, flags, _, _ = PAGE.unpack_from(head, offset)
        at = offset + PAGE.size
        magic, version, address, _ = META_HEAD.unpack_from(head, at)
        at += META_HEAD.size
        free = _Tree(*TREE.unpack_from(head, at))
        main = _Tree(*TREE.unpack_from(head, at + TREE.size))
        last_page, transaction = META_TAIL.unpack_from(head, at + 2 * TREE.size)
        facts = (page, flags, magic, version, address, free.flags, main.flags)
        expected = (number, META, MAGIC, VERSION, 0, INTEGER_KEYS, 0)
        if facts != expected:
            raise self._fail(where, f"expected {expected}, got {facts}")
        if free.pad not in PAGE_SIZES:
            raise self._fail(where, f"a page size of {free.pad} bytes")
        return _Meta(free.pad, (free, main), last_page, transaction)

    # -- trees --------------------------------------------------------------------------

    def _page(self, number: int) -> bytes:
        if not 2 <= number <= self._last_page:
            raise self._fail(f"page {number}", f"the last page is {self._last_page}")
        if number in self._seen:
            raise self._fail(f"page {number}", "two pages point to it")
        self._seen.add(number)
        offset = number * self._page_bytes
        data = os.pread(self._descriptor, self._page_bytes, offset)
        if len(data) < self._page_bytes:
            raise self._fail(
                f"page {number} at byte {offset}", f"the file has {self._size_bytes} bytes"
            )
        if PAGE.unpack_from(data)[0] != number:
            raise self._fail(
                f"page {number} at byte {offset}",
                f"it calls itself page {PAGE.unpack_from(data)[0]}",
            )
        return data

    def _walk_tree(self, tree: _Tree) -> None:
        """Check every page of a tree, and the pages that its leaves refer to."""
        pages = [] if tree.root == NO_PAGE else [(tree.root, 1)]
        counts = {BRANCH: 0, LEAF: 0, OVERFLOW: 0}
        entry_count = 0
        while pages:
            number, depth = pages.pop()
            data = self._page(number)
            kind = BRANCH if depth < tree.depth else LEAF
            if PAGE.unpack_from(data)[2] != kind:
                raise self._fail(f"page {number}", f"its flags are {PAGE.unpack_from(data)[2]}")
            counts[kind] += 1
            nodes = self._nodes(number, data)
            if kind == BRANCH:
                pages.extend((self._child(data, node), depth + 1) for node in nodes)
                continue
            entry_count += len(nodes)
            for node in nodes:
                counts[OVERFLOW] += self._check_value(number, data, node)
        found = (counts[BRANCH], counts[LEAF], counts[OVERFLOW], entry_count)
        stated = (tree.branch_count, tree.leaf_count, tree.overflow_count, tree.entry_count)
        if found != stated:
            raise self._fail(f"the tree of page {tree.root}", f"counts {found}, not {stated}")

    def _nodes(self, number: int, data: bytes) -> list[int]:
        """Offsets of a page's nodes, each with its key inside the page."""
        _, _, _, lower, upper = PAGE.unpack_from(data)
        if not PAGE.size <= lower <= upper <= len(data) or lower % 2:
            raise self._fail(f"page {number}", f"its free space is {lower} to {upper}")
        nodes = list(struct.unpack_from(f"<{(lower - PAGE.size) // 2}H", data, PAGE.size))
        for node in nodes:
            if not upper <= node <= len(data) - NODE.size:
                raise self._fail(f"page {number}", f"a node at offset {node}")
            if node + NODE.size + NODE.unpack_from(data, node)[3] > len(data):
                raise self._fail(f"page {number}", f"the key at offset {node} leaves the page")
        return nodes

    def _child(self, data: bytes, node: int) -> int:
        low, high, top, _ = NODE.unpack_from(data, node)
        return int(low | high << 16 | top << 32)

    def _check_value(self, number: int, data: bytes, node: int) -> int:
        """Check one value of a leaf; return how many overflow pages it takes."""
        low, high, flags, key_bytes = NODE.unpack_from(data, node)
        value_bytes = low | high << 16
        at = node + NODE.size + key_bytes
        inline_bytes = 8 if flags == BIG_DATA else value_bytes
        if flags not in (0, BIG_DATA, SUB_DATA) or at + inline_bytes > len(data):
            raise self._fail(
                f"page {number}", f"a value of {value_bytes} bytes at {at}, flags {flags}"
            )
        if flags == SUB_DATA:
            if value_bytes != TREE.size:
                raise self._fail(f"page {number}", f"a tree of {value_bytes} bytes at {at}")
            self._walk_tree(_Tree(*TREE.unpack_from(data, at)))
        return self._check_overflow(data, at, value_bytes) if flags == BIG_DATA else 0

    def _check_overflow(self, data: bytes, at: int, value_bytes: int) -> int:
        (first,) = struct.unpack_from("<Q", data, at)
        page = self._page(first)
        (count,) = OVERFLOW_COUNT.unpack_from(page)
        needed = -(-(PAGE.size + value_bytes) // self._page_bytes)
        end = (first + count) * self._page_bytes
        if PAGE.unpack_from(page)[2] != OVERFLOW or count < needed:
            raise self._fail(f"page {first}", f"{count} pages for {value_bytes} bytes")
        if end > self._size_bytes:
            raise self._fail(
                f"page {first}", f"it reaches to byte {end}, the file has {self._size_bytes}"
            )
        return int(count)
