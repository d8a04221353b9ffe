"""Where to read next: the pure state machine between relays and bootstrap servers.

The puller takes each step from ``next`` and reports its outcome; the machine itself does no I/O.
The rule is the paper's figure 3: a position that a relay still holds is read there, an older one
is read from a bootstrap server up to its target, and the relay takes over at the target.
"""

from __future__ import annotations

import datetime as dt
import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from databus.client.application.options import OnGap, Options
from databus.common.checkpoint import (
    ORIGIN,
    After,
    AtTime,
    BootstrapCheckpoint,
    Checkpoint,
    Latest,
    Oldest,
    OnlineCheckpoint,
    Position,
    StartPoint,
)
from databus.common.errors import (
    ClockMismatch,
    ConfigError,
    DatabusError,
    FormatError,
    InternalError,
    LogTooYoung,
    NotSeeded,
    ReaderOvertaken,
    ScnTooOld,
    ServerUnavailable,
    requested_pause_s,
)

Resume = StartPoint | AtTime | OnlineCheckpoint | BootstrapCheckpoint
UnresolvedStart = Oldest | Latest | AtTime
"""Starts that a server resolves to a position."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class State(enum.StrEnum):
    """The machine's present step."""

    REGISTER = "register"
    STREAM = "stream"
    REGISTER_BOOTSTRAP = "register_bootstrap"
    BOOTSTRAP = "bootstrap"
    STOPPED = "stopped"


class PullOutcome(enum.StrEnum):
    """How a step ended."""

    OK = "ok"
    """The registration was answered."""
    ENDED = "ended"
    """The answer ended in order; there may be more."""
    QUIET = "quiet"
    """A long poll ended in order without an event."""
    TARGET = "target"
    """The bootstrap is complete: its online checkpoint has arrived."""
    UNREACHABLE = "unreachable"
    """No connection, a broken one, damaged bytes, or a failing server."""
    TOO_OLD = "too_old"
    OVERTAKEN = "overtaken"
    TOO_YOUNG = "too_young"
    NOT_SEEDED = "not_seeded"
    WRONG_CLOCK = "wrong_clock"
    REFUSED = "refused"
    """The server will never answer this request: a bad filter, an unknown source."""


class Verb(enum.StrEnum):
    """The reaction to an outcome."""

    PROCEED = "proceed"
    AGAIN = "again"
    POLL = "poll"
    FAIL_OVER = "fail_over"
    LEAVE_RELAY = "leave_relay"
    RETURN = "return"
    WAIT = "wait"
    GAP = "gap"
    STOP = "stop"


TABLE: dict[tuple[State, PullOutcome], Verb] = {
    (State.REGISTER, PullOutcome.OK): Verb.PROCEED,
    (State.REGISTER, PullOutcome.ENDED): Verb.STOP,
    (State.REGISTER, PullOutcome.QUIET): Verb.STOP,
    (State.REGISTER, PullOutcome.TARGET): Verb.STOP,
    (State.REGISTER, PullOutcome.UNREACHABLE): Verb.FAIL_OVER,
    (State.REGISTER, PullOutcome.TOO_OLD): Verb.LEAVE_RELAY,
    (State.REGISTER, PullOutcome.OVERTAKEN): Verb.AGAIN,
    (State.REGISTER, PullOutcome.TOO_YOUNG): Verb.STOP,
    (State.REGISTER, PullOutcome.NOT_SEEDED): Verb.FAIL_OVER,
    (State.REGISTER, PullOutcome.WRONG_CLOCK): Verb.STOP,
    (State.REGISTER, PullOutcome.REFUSED): Verb.STOP,
    (State.STREAM, PullOutcome.OK): Verb.STOP,
    (State.STREAM, PullOutcome.ENDED): Verb.AGAIN,
    (State.STREAM, PullOutcome.QUIET): Verb.POLL,
    (State.STREAM, PullOutcome.TARGET): Verb.STOP,
    (State.STREAM, PullOutcome.UNREACHABLE): Verb.FAIL_OVER,
    (State.STREAM, PullOutcome.TOO_OLD): Verb.LEAVE_RELAY,
    # The next answer shows whether the relay still has our position, which may be newer.
    (State.STREAM, PullOutcome.OVERTAKEN): Verb.AGAIN,
    (State.STREAM, PullOutcome.TOO_YOUNG): Verb.STOP,
    (State.STREAM, PullOutcome.NOT_SEEDED): Verb.FAIL_OVER,
    (State.STREAM, PullOutcome.WRONG_CLOCK): Verb.STOP,
    (State.STREAM, PullOutcome.REFUSED): Verb.STOP,
    (State.REGISTER_BOOTSTRAP, PullOutcome.OK): Verb.PROCEED,
    (State.REGISTER_BOOTSTRAP, PullOutcome.ENDED): Verb.STOP,
    (State.REGISTER_BOOTSTRAP, PullOutcome.QUIET): Verb.STOP,
    (State.REGISTER_BOOTSTRAP, PullOutcome.TARGET): Verb.STOP,
    (State.REGISTER_BOOTSTRAP, PullOutcome.UNREACHABLE): Verb.FAIL_OVER,
    (State.REGISTER_BOOTSTRAP, PullOutcome.TOO_OLD): Verb.GAP,
    (State.REGISTER_BOOTSTRAP, PullOutcome.OVERTAKEN): Verb.AGAIN,
    (State.REGISTER_BOOTSTRAP, PullOutcome.TOO_YOUNG): Verb.GAP,
    (State.REGISTER_BOOTSTRAP, PullOutcome.NOT_SEEDED): Verb.WAIT,
    (State.REGISTER_BOOTSTRAP, PullOutcome.WRONG_CLOCK): Verb.STOP,
    (State.REGISTER_BOOTSTRAP, PullOutcome.REFUSED): Verb.STOP,
    (State.BOOTSTRAP, PullOutcome.OK): Verb.STOP,
    (State.BOOTSTRAP, PullOutcome.ENDED): Verb.AGAIN,
    (State.BOOTSTRAP, PullOutcome.QUIET): Verb.STOP,
    (State.BOOTSTRAP, PullOutcome.TARGET): Verb.RETURN,
    (State.BOOTSTRAP, PullOutcome.UNREACHABLE): Verb.FAIL_OVER,
    (State.BOOTSTRAP, PullOutcome.TOO_OLD): Verb.GAP,
    (State.BOOTSTRAP, PullOutcome.OVERTAKEN): Verb.AGAIN,
    (State.BOOTSTRAP, PullOutcome.TOO_YOUNG): Verb.GAP,
    (State.BOOTSTRAP, PullOutcome.NOT_SEEDED): Verb.WAIT,
    (State.BOOTSTRAP, PullOutcome.WRONG_CLOCK): Verb.STOP,
    (State.BOOTSTRAP, PullOutcome.REFUSED): Verb.STOP,
}

_OUTCOMES: tuple[tuple[type[DatabusError], PullOutcome], ...] = (
    (ReaderOvertaken, PullOutcome.OVERTAKEN),
    (ScnTooOld, PullOutcome.TOO_OLD),
    (LogTooYoung, PullOutcome.TOO_YOUNG),
    (NotSeeded, PullOutcome.NOT_SEEDED),
    (ClockMismatch, PullOutcome.WRONG_CLOCK),
    (ServerUnavailable, PullOutcome.UNREACHABLE),
    (FormatError, PullOutcome.UNREACHABLE),
    (InternalError, PullOutcome.UNREACHABLE),
)


def outcome_of(error: DatabusError) -> PullOutcome:
    """The outcome that an error means."""
    for cls, outcome in _OUTCOMES:
        if isinstance(error, cls):
            return outcome
    retry = error.retry or type(error) is DatabusError
    return PullOutcome.UNREACHABLE if retry else PullOutcome.REFUSED


@dataclass(frozen=True, slots=True)
class PullStep:
    """What to do next: after ``wait_s``, at ``server``, from ``resume`` on."""

    state: State
    server: str
    wait_s: float
    resume: Resume


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from ``first_s`` to ``most_s``, each shortened by up to a half."""

    first_s: float
    most_s: float

    def delay_s(self, attempt: int, rng: random.Random) -> float:
        """The delay before attempt ``attempt``, counted from 1."""
        full_s = min(self.most_s, self.first_s * float(1 << min(attempt - 1, 30)))
        return full_s * (0.5 + 0.5 * rng.random())


class Machine:
    """Decides at which server to read, and from where.

    Invariants:
        I1. ``resume`` moves backwards only by ``go_back`` and ``restart``, and skips events
            only at a gap that ``on_gap`` allows; ``gap_count`` counts those.
        I2. Once a clock is known no server of another clock is read.
        I3. After a failure, all other servers of the kind come before the failed one again.

    Owner: one puller.
    Raises: ConfigError without a relay.
    """

    def __init__(
        self,
        *,
        database: str,
        relays: Sequence[str],
        bootstraps: Sequence[str],
        resume: Resume,
        clock: str | None = None,
        on_gap: OnGap = "error",
        backoff: Backoff | None = None,
        max_failures: int | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not relays:
            raise ConfigError(f"no relay is given for database {database}")
        self.database = database
        self._relays = self._first_relays = tuple(relays)
        self._epoch = 0
        self._bootstraps = tuple(bootstraps)
        self._on_gap = on_gap
        self._backoff = backoff or Backoff(0.1, 10.0)
        self._max_failures = max_failures
        self._rng = rng or random.Random()
        self.clock = clock
        self.resume: Resume = resume
        self.error: DatabusError | None = None
        self.gap_count = 0
        self._server_index = {State.REGISTER: self._rng.randrange(len(self._relays))}
        self._server_index[State.REGISTER_BOOTSTRAP] = 0
        self._failures = 0
        self._too_old_count = 0
        self._returned_at: Position | None = None
        self._wait_s = 0.0
        self.restart(resume)
        self.bootstrap_count = int(self.reads_bootstrap)

    @classmethod
    def of_options(
        cls,
        options: Options,
        database: str,
        relays: Sequence[str],
        bootstraps: Sequence[str],
        resume: Resume,
    ) -> Machine:
        """A machine with the client's options."""
        return cls(
            database=database,
            relays=relays,
            bootstraps=bootstraps,
            resume=resume,
            on_gap=options.on_gap,
            backoff=Backoff(options.reconnect_s, options.reconnect_most_s),
            max_failures=options.max_pull_failures,
            rng=random.Random(options.seed),
        )

    @property
    def reads_bootstrap(self) -> bool:
        """Whether the next frames come from a bootstrap server."""
        return self.state in (State.REGISTER_BOOTSTRAP, State.BOOTSTRAP)

    def next(self) -> PullStep:
        """What to do now."""
        wait_s, self._wait_s = self._wait_s, 0.0
        return PullStep(self.state, self._server, wait_s, self.resume)

    def restart(self, resume: Resume) -> None:
        """Begin again at ``resume``, wherever that is read."""
        if isinstance(resume, OnlineCheckpoint | BootstrapCheckpoint):
            self.clock = resume.clock
        if isinstance(resume, BootstrapCheckpoint) and not self._bootstraps:
            # No server can finish that bootstrap, but a relay may reach back to where our state
            # was consistent.
            resume = OnlineCheckpoint(resume.database, resume.clock, resume.position)
        self.resume = resume
        starts_at_origin = isinstance(resume, After) and resume.position == ORIGIN
        if isinstance(resume, BootstrapCheckpoint) or (starts_at_origin and self._bootstraps):
            self.state = State.REGISTER_BOOTSTRAP
        else:
            self.state = State.REGISTER
            if starts_at_origin:
                self.resume = Oldest()

    def pin(self, resume: Resume) -> None:
        """Replace oldest, latest or a commit time by its position."""
        self.resume = resume

    def go_back(self, resume: Resume) -> None:
        """Read the present window or sequence again, from ``resume``."""
        self.resume = resume

    def advanced(self, resume: Resume) -> None:
        """Frames have arrived: ``resume`` is where the next request begins."""
        self.resume = resume
        self._failures = 0
        self._too_old_count = 0

    def met_clock(self, clock: str) -> None:
        """A server has reported its clock.

        Raises:
            ClockMismatch: it is not the clock of the stream so far.
        """
        if self.clock is not None and clock != self.clock:
            raise ClockMismatch(
                f"{self._server} reads the clock {clock!r} for database {self.database}, our "
                f"checkpoint is of {self.clock!r}"
            )
        self.clock = clock

    def met_epoch(self, epoch: int) -> None:
        """A relay of a cluster has reported the epoch of its leader.

        Raises:
            ServerUnavailable: it is below one that was seen: the relay, or its leader, has led.
        """
        if 0 < epoch < self._epoch:
            raise ServerUnavailable(
                f"{self._server} has the epoch {epoch} of a leader that leads no longer; "
                f"{self._epoch} was seen"
            )
        self._epoch = max(self._epoch, epoch)

    def know_relays(self, relays: Sequence[str]) -> None:
        """These relays serve the database, the best first; those before come after them."""
        known = tuple(dict.fromkeys((*relays, *self._first_relays)))
        if set(known) != set(self._relays):
            self._relays = known
            self._server_index[State.REGISTER] = 0

    def report(self, outcome: PullOutcome, error: DatabusError | None = None) -> Verb:
        """Report the outcome of the last step; returns the reaction to it."""
        verb = TABLE[self.state, outcome]
        cause = error or InternalError(f"{outcome} was reported in the state {self.state}")
        if verb is Verb.PROCEED:
            self.state = State.BOOTSTRAP if self.reads_bootstrap else State.STREAM
        elif verb is Verb.AGAIN:
            self._again(cause)
        elif verb is Verb.POLL:
            self._poll()
        elif verb is Verb.FAIL_OVER:
            self._fail_over(cause)
        elif verb is Verb.WAIT:
            self._fail_over(cause, counts=False)
        elif verb is Verb.LEAVE_RELAY:
            self._leave_relay(cause)
        elif verb is Verb.RETURN:
            self._return()
        elif verb is Verb.GAP:
            self._gap(cause)
        else:
            self._stop(cause)
        return verb

    @property
    def _kind(self) -> State:
        return State.REGISTER_BOOTSTRAP if self.reads_bootstrap else State.REGISTER

    @property
    def _servers(self) -> tuple[str, ...]:
        return self._bootstraps if self.reads_bootstrap else self._relays

    @property
    def _server(self) -> str:
        servers = self._servers
        return servers[self._server_index[self._kind] % len(servers)] if servers else ""

    def _again(self, cause: DatabusError) -> None:
        """The same server once more; with back-off if it has sent nothing since the last time."""
        self._failures += 1
        if self._failures > 1:
            self._delay(self._failures - 1, cause)

    def _poll(self) -> None:
        """The same server once more; the pause limits the rate if it answers at once."""
        self._failures = 0
        self._wait_s = self._backoff.delay_s(1, self._rng)

    def _fail_over(self, cause: DatabusError, *, counts: bool = True) -> None:
        """The next server of the kind; a pause after each full round."""
        self._failures += 1
        kind = self._kind
        self._server_index[kind] += 1
        self.state = kind
        rounds, rest = divmod(self._failures, len(self._servers))
        if rest == 0:
            self._delay(rounds, cause, counts=counts)

    def _delay(self, attempt: int, cause: DatabusError, *, counts: bool = True) -> None:
        if counts and self._max_failures is not None and self._failures > self._max_failures:
            self._stop(cause)
        else:
            self._wait_s = max(self._backoff.delay_s(attempt, self._rng), requested_pause_s(cause))

    def _leave_relay(self, cause: DatabusError) -> None:
        """Too old here: try the other relays, which may hold more, then a bootstrap server."""
        self._too_old_count += 1
        if self._too_old_count < len(self._relays):
            self._server_index[State.REGISTER] += 1
            self.state = State.REGISTER
        elif self._bootstraps:
            self._too_old_count = 0
            self.state = State.REGISTER_BOOTSTRAP
            self.bootstrap_count += 1
            if self._returned_at is not None and self._returned_at == self._position:
                # The last bootstrap ended at this very position: its log is behind the ring.
                self._failures += 1
                self._delay(self._failures, cause)
        else:
            self._gap(cause)

    @property
    def _position(self) -> Position | None:
        resume = self.resume
        return None if isinstance(resume, UnresolvedStart) else resume.position

    def _return(self) -> None:
        self.state = State.REGISTER
        self._returned_at = self._position

    def _gap(self, cause: DatabusError) -> None:
        if self._on_gap == "error":
            self._stop(cause)
            return
        self.gap_count += 1
        self.resume = Oldest() if self._on_gap == "oldest" else Latest()
        self.state = State.REGISTER
        self._too_old_count = 0

    def _stop(self, cause: DatabusError) -> None:
        self.state = State.STOPPED
        self.error = cause


def first_resume(
    start: str | int | Position | dt.datetime | Checkpoint, has_bootstraps: bool
) -> Resume:
    """Where a client without a stored checkpoint begins.

    Raises:
        ConfigError: ``start`` is not one of bootstrap, oldest, latest, an SCN, a commit time with
            a zone, or a checkpoint.
    """
    if isinstance(start, OnlineCheckpoint | BootstrapCheckpoint):
        return start
    if isinstance(start, Position):
        return After(start)
    if isinstance(start, dt.datetime):
        return AtTime(_commit_us(start))
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return After(Position(start))
    if start == "bootstrap":
        return After(ORIGIN) if has_bootstraps else Oldest()
    if start == "oldest":
        return Oldest()
    if start == "latest":
        return Latest()
    raise ConfigError(
        f"start is {start!r}, not bootstrap, oldest, latest, an SCN, a commit time (a datetime "
        "with a zone) or a checkpoint"
    )


def seek_target(to: int | Position | dt.datetime | Checkpoint, database: str) -> Resume:
    """Where a client continues after a seek.

    Raises:
        ConfigError: ``to`` is none of an SCN, a position, a commit time with a zone, and a
            checkpoint of the database; or it is before the first SCN, where no position is.
    """
    if isinstance(to, OnlineCheckpoint | BootstrapCheckpoint) and to.database != database:
        raise ConfigError(f"the checkpoint is of database {to.database}, not of {database}")
    resume = first_resume(to, has_bootstraps=False)
    is_word = isinstance(resume, Oldest | Latest)
    if is_word or (isinstance(resume, After) and resume.position.scn == 0):
        raise ConfigError(
            f"seek({to!r}): give an SCN from 1 on, a commit time, or a checkpoint; to begin as a "
            "new consumer, remove the stored checkpoint and set start"
        )
    return resume


def _commit_us(time: dt.datetime) -> int:
    if time.utcoffset() is None:
        raise ConfigError(
            f"start is the time {time.isoformat(' ')} without a zone, which is ambiguous by up to "
            "a day; give it its zone, such as tzinfo=datetime.UTC"
        )
    # There is no commit before the epoch, so every earlier time means everything.
    return max(0, (time - _EPOCH) // dt.timedelta(microseconds=1))
