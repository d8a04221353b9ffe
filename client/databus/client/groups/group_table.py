"""The tables of groups in an application's database: their statements, and what answers mean.

Pure, as ``checkpoint_table``, whose table has the checkpoints of the partitions.  Four more
tables hold the groups, the members with their leases, the owners of the partitions, and dead
letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from databus.client.checkpoints.checkpoint_table import (
    TABLE,
    Answer,
    CheckpointTable,
    Steps,
    StoredCheckpoint,
)
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.deadletters.dead_letter_table import DeadLetterTable, letters_of
from databus.client.groups.assignment import UNOWNED, Assignment, assign
from databus.client.groups.resizing import covering, resized
from databus.common.checkpoint import Checkpoint
from databus.common.errors import ConfigError, StoreBusy, UsageError

MOST_PARTITIONS = 1024
"""Most partitions of a group: the assignment must fit into MySQL's TEXT."""
_LONGEST_NAME = 120
_HOLD_US = 600_000_000
"""How long the place of a member that has left is held."""

# The database's clock at the start of the statement, in microseconds since 1970.
_NOW_US = {
    "postgres": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000000 AS BIGINT)",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}
DIALECTS = tuple(_NOW_US)

_DDL = """\
CREATE TABLE IF NOT EXISTS {prefix}groups (
    group_name VARCHAR(120) NOT NULL PRIMARY KEY,
    partitions BIGINT NOT NULL,
    wanted_partitions BIGINT NOT NULL,
    revision BIGINT NOT NULL,
    assignment TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS {prefix}group_members (
    group_name VARCHAR(120) NOT NULL,
    member VARCHAR(190) NOT NULL,
    incarnation VARCHAR(190) NOT NULL,
    lease_until_us BIGINT NOT NULL,
    PRIMARY KEY (group_name, member)
);
CREATE TABLE IF NOT EXISTS {prefix}group_partitions (
    group_name VARCHAR(120) NOT NULL,
    number BIGINT NOT NULL,
    owner VARCHAR(190) NOT NULL,
    fence BIGINT NOT NULL,
    PRIMARY KEY (group_name, number)
)"""


@dataclass(frozen=True, slots=True)
class Holding:
    """Who owns a partition."""

    incarnation: str
    fence: int


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group as one transaction has read it."""

    wanted_count: int
    """The number of partitions that ``resize`` asked for; the present one if it is done."""
    revision: int
    assignment: Assignment
    incarnations: dict[str, str]
    """The incarnations of the members whose leases have not ended, by member."""
    departed: tuple[str, ...]
    """The members whose leases have ended, the latest first."""
    owners: tuple[Holding, ...]
    """By partition: the incarnation that has claimed it, live or not, or ``UNOWNED``."""
    next_end_us: int | None
    """Microseconds until the first lease of a member ends, unless it is renewed."""

    @property
    def count(self) -> int:
        """The number of partitions."""
        return len(self.owners)

    def is_free(self, number: int) -> bool:
        """Whether no member that is there owns the partition."""
        return self.owners[number].incarnation not in self.incarnations.values()


@dataclass(frozen=True, slots=True)
class Claim:
    """The ownership of one partition."""

    number: int
    count: int
    fence: int
    """Grows with each ownership of a partition, over all numbers of partitions of the group."""
    row: StoredCheckpoint
    """The row of its checkpoint, which belongs to this ownership alone."""


class GroupTable:
    """The groups of one database.

    Invariants:
        I1. A partition has at most one owner whose lease has not ended.  A lease that has ended
            is never renewed: the member joins again, as another incarnation.
        I2. Each ownership of a partition has a fence above that of every one before.
        I3. The row of a checkpoint belongs to the newest ownership: its owner's text has the
            incarnation and the fence, and the statement that stores the checkpoint compares it.
        I4. No transaction here waits for the application's transactions, whose ``put`` locks the
            row of a checkpoint: a claim that finds such a lock is made later.

    Raises: ConfigError for an unknown dialect.
    """

    def __init__(self, dialect: str, *, prefix: str = "databus_", checkpoints: str = TABLE) -> None:
        if dialect not in DIALECTS:
            raise ConfigError(f"dialect={dialect!r} is none of {', '.join(DIALECTS)}")
        self.checkpoints = CheckpointTable(checkpoints)
        self._now_us = _NOW_US[dialect]
        self._skip_locked = "" if dialect == "sqlite" else " FOR UPDATE SKIP LOCKED"
        self._groups = f"{prefix}groups"
        self._members = f"{prefix}group_members"
        self._partitions = f"{prefix}group_partitions"
        self.letters = DeadLetterTable(f"{prefix}group_dead_letters")
        self.ddl = f"{_DDL.format(prefix=prefix)};\n{self.letters.ddl};\n{self.checkpoints.ddl}"

    def create(self) -> Steps[None]:
        """Create the tables if they are not there."""
        for statement in self.ddl.split(";\n"):
            yield statement, ()

    def join(
        self, group: str, member: str, incarnation: str, count: int, lease_us: int
    ) -> Steps[GroupState]:
        """Become a member; makes the group, with ``count`` partitions, if there is none.

        A member of the same name loses its lease and its partitions.
        """
        answer = yield (
            f"UPDATE {self._members} SET incarnation = ?, lease_until_us = {self._now_us} + ? "
            "WHERE group_name = ? AND member = ?",
            (incarnation, lease_us, group, member),
        )
        if not answer.row_count:
            yield (
                f"INSERT INTO {self._members} (group_name, member, incarnation, lease_until_us) "
                f"VALUES (?, ?, ?, {self._now_us} + ?)",
                (group, member, incarnation, lease_us),
            )
        rows = yield f"SELECT revision FROM {self._groups} WHERE group_name = ?", (group,)
        if not rows.rows:
            yield (
                f"INSERT INTO {self._groups} (group_name, partitions, wanted_partitions, revision, "
                "assignment) VALUES (?, ?, ?, 0, ?)",
                (group, count, count, Assignment.of(count).encode()),
            )
            yield from self._insert_partitions(group, count, 0)
        return (yield from self._assigned(group))

    def renew(
        self, group: str, member: str, incarnation: str, lease_us: int
    ) -> Steps[GroupState | None]:
        """Extend the lease, and assign the partitions if members have come or gone.

        Returns None if the lease has ended.

        Raises:
            StoreBusy: another process has joined under the name of this member.
        """
        answer = yield (
            f"UPDATE {self._members} SET lease_until_us = {self._now_us} + ? WHERE group_name = ? "
            f"AND member = ? AND incarnation = ? AND lease_until_us > {self._now_us}",
            (lease_us, group, member, incarnation),
        )
        if not answer.row_count:
            found = yield (
                f"SELECT incarnation FROM {self._members} WHERE group_name = ? AND member = ?",
                (group, member),
            )
            if found.rows and found.rows[0][0] != incarnation:
                raise StoreBusy(
                    f"the process {found.rows[0][0]} (host:pid) has joined the group {group} as "
                    f"the member {member}: give each process a member name of its own"
                )
            return None
        return (yield from self._assigned(group))

    def leave(self, group: str, member: str, incarnation: str) -> Steps[None]:
        """End the lease at once; the other members get the partitions."""
        yield (
            f"UPDATE {self._members} SET lease_until_us = {self._now_us} "
            "WHERE group_name = ? AND member = ? AND incarnation = ?",
            (group, member, incarnation),
        )
        yield from self._assigned(group)

    def claim_all(
        self, group: str, numbers: Sequence[int], state: GroupState, incarnation: str
    ) -> Steps[list[Claim]]:
        """Own those of the partitions that are still as in ``state`` and that nothing locks."""
        claims = []
        for number in numbers:
            claim = yield from self.claim(group, number, state, incarnation)
            if claim is not None:
                claims.append(claim)
        return claims

    def claim(
        self, group: str, number: int, state: GroupState, incarnation: str
    ) -> Steps[Claim | None]:
        """Own a partition that was free in ``state``; None if it is not free or is locked."""
        consumer, before = checkpoint_name(group, number, state.count), state.owners[number]
        if self._skip_locked:
            there = yield from self.checkpoints.row(consumer)
            unlocked = yield (
                f"SELECT consumer FROM {self.checkpoints.name} WHERE consumer = ?"
                f"{self._skip_locked}",
                (consumer,),
            )
            if there is not None and not unlocked.rows:
                return None
        fence = before.fence + 1
        answer = yield (
            f"UPDATE {self._partitions} SET owner = ?, fence = ? "
            "WHERE group_name = ? AND number = ? AND owner = ? AND fence = ?",
            (incarnation, fence, group, number, before.incarnation, before.fence),
        )
        if not answer.row_count:
            return None
        row = yield from self.checkpoints.claim(consumer, f"{incarnation}:{fence}")
        return Claim(number, state.count, fence, row)

    def is_newest(self, group: str, claim: Claim) -> Steps[bool]:
        """Whether an ownership is still the newest one; it stays so until the transaction ends."""
        lock = self._skip_locked.removesuffix(" SKIP LOCKED")
        found = yield (
            f"SELECT fence FROM {self._partitions} WHERE group_name = ? AND number = ?{lock}",
            (group, claim.number),
        )
        return [int(row[0]) for row in found.rows] == [claim.fence]

    def letters_of(self, consumer: str) -> Steps[list[DeadLetter]]:
        """The dead letters under the name of a partition's checkpoint."""
        found = yield self.letters.reading(consumer)
        return letters_of(found.rows)

    def release(self, group: str, claim: Claim, incarnation: str) -> Steps[None]:
        """Own a partition no more; nothing if another has claimed it meanwhile."""
        yield (
            f"UPDATE {self._partitions} SET owner = ? "
            "WHERE group_name = ? AND number = ? AND owner = ? AND fence = ?",
            (UNOWNED, group, claim.number, incarnation, claim.fence),
        )

    def resize(self, group: str, count: int) -> Steps[None]:
        """Ask for another number of partitions; the members then give up all of them.

        Raises:
            UsageError: there is no such group, or its checkpoints do not permit it yet.
        """
        answer = yield (
            f"UPDATE {self._groups} SET wanted_partitions = ?, revision = revision + 1 "
            "WHERE group_name = ?",
            (checked_count(count), group),
        )
        if not answer.row_count:
            raise UsageError(f"there is no group {group!r}; a member makes it when it joins")
        state = yield from self.state(group)
        before = yield from self._checkpoints_of(group, state.count)
        resized(_checkpoints(before), count)

    def state(self, group: str) -> Steps[GroupState]:
        """The group as it is; changes nothing.

        Raises:
            UsageError: there is no such group.
        """
        found = yield (
            f"SELECT partitions, wanted_partitions, revision, assignment FROM {self._groups} "
            "WHERE group_name = ?",
            (group,),
        )
        if not found.rows:
            raise UsageError(f"there is no group {group!r}; a member makes it when it joins")
        count, wanted, revision, assignment = found.rows[0]
        members = yield (
            f"SELECT member, incarnation, lease_until_us - {self._now_us} FROM {self._members} "
            "WHERE group_name = ? ORDER BY lease_until_us DESC, member",
            (group,),
        )
        left_us = {member: int(left) for member, _, left in members.rows}
        owners = yield (
            f"SELECT owner, fence FROM {self._partitions} WHERE group_name = ? ORDER BY number",
            (group,),
        )
        if len(owners.rows) != int(count):
            raise UsageError(
                f"the group {group!r} has {count} partitions, and {self._partitions} has "
                f"{len(owners.rows)} rows of it: restore the tables from a backup"
            )
        return GroupState(
            int(wanted),
            int(revision),
            Assignment.decode(assignment),
            {member: name for member, name, _ in members.rows if left_us[member] > 0},
            tuple(member for member, left in left_us.items() if -_HOLD_US < left <= 0),
            tuple(Holding(owner, int(fence)) for owner, fence in owners.rows),
            min((left for left in left_us.values() if left > 0), default=None),
        )

    def _assigned(self, group: str) -> Steps[GroupState]:
        """The group, after the partitions have been assigned to the members that are there."""
        state = yield from self.state(group)
        if state.wanted_count != state.count:
            return (yield from self._resized(group, state))
        assignment = assign(state.assignment, state.incarnations, state.departed)
        if assignment == state.assignment:
            return state
        yield self._assign(group, state, assignment)
        yield (
            f"DELETE FROM {self._members} WHERE group_name = ? "
            f"AND lease_until_us < {self._now_us} - {_HOLD_US}",
            (group,),
        )
        return (yield from self.state(group))

    def _resized(self, group: str, state: GroupState) -> Steps[GroupState]:
        """Replace the partitions, as soon as no member owns one and no checkpoint is locked."""
        unowned = Assignment((UNOWNED,) * state.count, state.assignment.homes)
        if state.assignment != unowned:
            yield self._assign(group, state, unowned)
            return (yield from self.state(group))
        if not all(map(state.is_free, range(state.count))):
            return state
        before = yield from self._checkpoints_of(group, state.count)
        names = [row.consumer for row in before if row is not None]
        marks = ", ".join("?" * len(names))
        if names and self._skip_locked:
            unlocked = yield (
                f"SELECT consumer FROM {self.checkpoints.name} WHERE consumer IN ({marks})"
                f"{self._skip_locked}",
                tuple(names),
            )
            if len(unlocked.rows) < len(names):
                return state
        before = yield from self._checkpoints_of(group, state.count)
        count = state.wanted_count
        try:
            checkpoints = resized(_checkpoints(before), count)
        except UsageError:  # it was possible when it was asked for, and is not now
            yield from self._cancel_resize(group, state)
            return (yield from self.state(group))
        answer: Answer = yield (
            f"UPDATE {self._groups} SET partitions = ?, revision = ?, assignment = ? "
            "WHERE group_name = ? AND revision = ?",
            (count, state.revision + 1, Assignment.of(count).encode(), group, state.revision),
        )
        if not answer.row_count:
            return state
        if names:
            yield (
                f"DELETE FROM {self.checkpoints.name} WHERE consumer IN ({marks})",
                tuple(names),
            )
        yield f"DELETE FROM {self._partitions} WHERE group_name = ?", (group,)
        # Above every fence before, so that a claim of an old partition does not fit a new one.
        highest = max(one.fence for one in state.owners)
        yield from self._insert_partitions(group, count, highest + 1)
        for number, checkpoint in enumerate(checkpoints):
            if checkpoint is not None:
                name = checkpoint_name(group, number, count)
                yield from self.checkpoints.set(name, checkpoint)
        yield from self._move_letters(group, state.count, count)
        return (yield from self._assigned(group))

    def _move_letters(self, group: str, before: int, count: int) -> Steps[None]:
        """Give the dead letters to the partitions that have their keys now; a truncate to all that
        have keys of its partition."""
        moved: dict[int, list[DeadLetter]] = {}
        for number in range(before):
            consumer = checkpoint_name(group, number, before)
            letters = yield from self.letters_of(consumer)
            for statement in self.letters.removing(consumer, letters):
                yield statement
            for letter in letters:
                for new in range(count):
                    if letter.op == "t":
                        has_keys = number in covering(new, count, before)
                    else:
                        has_keys = letter.key_hash % count == new
                    if has_keys:
                        moved.setdefault(new, []).append(letter)
        for number, letters in moved.items():
            for statement in self.letters.putting(checkpoint_name(group, number, count), letters):
                yield statement

    def _cancel_resize(self, group: str, state: GroupState) -> Steps[None]:
        yield (
            f"UPDATE {self._groups} SET wanted_partitions = partitions, revision = ? "
            "WHERE group_name = ? AND revision = ?",
            (state.revision + 1, group, state.revision),
        )

    def _assign(
        self, group: str, state: GroupState, assignment: Assignment
    ) -> tuple[str, tuple[object, ...]]:
        # Only on top of what was read: another member may have assigned meanwhile.
        return (
            f"UPDATE {self._groups} SET revision = ?, assignment = ? "
            "WHERE group_name = ? AND revision = ?",
            (state.revision + 1, assignment.encode(), group, state.revision),
        )

    def _checkpoints_of(self, group: str, count: int) -> Steps[Sequence[StoredCheckpoint | None]]:
        found = []
        for number in range(count):
            row = yield from self.checkpoints.row(checkpoint_name(group, number, count))
            found.append(row)
        return found

    def _insert_partitions(self, group: str, count: int, fence: int) -> Steps[None]:
        for number in range(count):
            yield (
                f"INSERT INTO {self._partitions} (group_name, number, owner, fence) "
                "VALUES (?, ?, ?, ?)",
                (group, number, UNOWNED, fence),
            )


def _checkpoints(rows: Sequence[StoredCheckpoint | None]) -> list[Checkpoint | None]:
    return [None if row is None else row.checkpoint for row in rows]


def checkpoint_name(group: str, number: int, count: int) -> str:
    """The name under which the table of checkpoints has that of a partition."""
    return f"{group}/{number}/{count}"


def checked_group(name: str) -> str:
    """The name of a group.

    Raises:
        ConfigError: it is empty or longer than its column.
    """
    if not 0 < len(name) <= _LONGEST_NAME:
        raise ConfigError(f"group={name!r} does not have 1 to {_LONGEST_NAME} letters")
    return name


def checked_count(count: int) -> int:
    """The number of partitions.

    Raises:
        ConfigError: it is out of range.
    """
    if not 0 < count <= MOST_PARTITIONS:
        raise ConfigError(f"partitions={count} is not within 1 to {MOST_PARTITIONS}")
    return count
