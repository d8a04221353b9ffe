"""The plan's cells: the index of each number of a stream's state, for the kernels and Python.

The plan is one array of 64-bit numbers.  Its head is the state that both sides share; after it
come the mapped tables, their columns and keys, in the layout of ``mysql_kernel_tables.py``.
"""

from __future__ import annotations

# The head of the plan: the state that both sides share, and the offsets of its sections.
(
    SCN,
    SEQ,
    EVENT_COUNT,
    COMMIT_US,
    IN_GROUP,
    WANTED,
    GROUP_FLAGS,
    GROUP_DOMAIN,
    GROUP_SERVER,
    RESOLVED,
    LAST_SEQ_NO,
    DOMAIN,
    CHECKSUMS,
    END_OFFSET,
    SERVER_OFFSET,
    GROUP_BEGIN,
    FOREIGN_GROUPS,
    OTHER_GROUPS,
    STOPPED_AT,
    FILL,
    GROUP_START,
    SENT_PART,
    NEED_BYTES,
    RESUME_AT,
    ROWS_DONE,
    AT_SLOTS,
    SLOT_MASK,
    AT_SPANS,
    GROUPS,
    EXPECT,
    UUID_LOW,
    UUID_HIGH,
    SCN_BASE,
    SEQ_NO_BEFORE,
    FOREIGN_DOMAIN,
    FOREIGN_SERVER,
    FOREIGN_SEQ_NO,
) = range(37)
LIMB, LIMBS = 37, 16
HEAD = LIMB + LIMBS

# How groups begin and end: only the decoder reads them, as in MariaDB, as in MySQL.
GROUPS_UNKNOWN, GROUPS_MARIADB, GROUPS_MYSQL = 0, 1, 2
NO_EXPECT = (1 << 63) - 1

# WANTED: the open group is skipped, becomes a window, or is examined for captured tables.
NOT_READ, READ, EXAMINED = 0, 1, 2

# Why the walk stopped.
NEED_INPUT, NEED_DECODER, NEED_ROOM = 0, 1, 2

# Fields of a table.
(
    T_ID,
    T_BODY,
    T_BODY_BYTES,
    T_MODE,
    T_COLUMN,
    T_COLUMNS,
    T_KEY,
    T_KEYS,
    T_SOURCE,
    T_SCHEMA,
    T_EXTRA,
    T_NULLABLE_KEY,
) = range(12)
TABLE_FIELDS = 12
MODE_SKIP, MODE_KERNEL, MODE_PYTHON = 0, 1, 2

# Fields of a column.
C_OP, C_A, C_B, C_NULLABLE, C_EXTRA, C_NULL_ZERO = range(6)
COLUMN_FIELDS = 6
(
    OP_SIGNED,
    OP_UNSIGNED,
    OP_UINT64,
    OP_FLOAT,
    OP_DOUBLE,
    OP_DECIMAL,
    OP_BYTES,
    OP_UTF8,
    OP_PADDED,
    OP_SINGLE_BYTE,
    OP_ENUM,
    OP_SET,
    OP_BIT,
    OP_BIT64,
    OP_YEAR,
    OP_DATE,
    OP_DATETIME,
    OP_TIMESTAMP,
    OP_TIME,
    OP_UUID,
    OP_DATE_TEXT,
    OP_DATETIME_TEXT,
    OP_TIMESTAMP_TEXT,
    OP_INET4,
    OP_INET6,
) = range(25)
