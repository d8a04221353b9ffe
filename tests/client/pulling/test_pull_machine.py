"""The state machine: every (state, outcome), and every class of position of figure 3."""

from __future__ import annotations

import random
from typing import Any

import pytest

from databus.client.pulling.pull_machine import (
    TABLE,
    Backoff,
    Machine,
    PullOutcome,
    Resume,
    State,
    Verb,
    first_resume,
    outcome_of,
)
from databus.common import errors
from databus.common.checkpoint import (
    ORIGIN,
    After,
    AtTime,
    BootstrapCheckpoint,
    Latest,
    Oldest,
    OnlineCheckpoint,
    Position,
)
from databus.common.errors import (
    ClockMismatch,
    ConfigError,
    DatabusError,
    LogTooYoung,
    NotSeeded,
    ScnTooOld,
    ServerUnavailable,
)


def at(scn: int, seq: int = 0) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", "c", Position(scn, seq))


def in_bootstrap(row: int = 5) -> BootstrapCheckpoint:
    return BootstrapCheckpoint(
        "shop", "c", Position(1, 0), Position(9, 0), "run", row, Position(1, 0)
    )


def machine(resume: Resume | None = None, **settings: Any) -> Machine:
    defaults: dict[str, Any] = {
        "database": "shop",
        "relays": ["r1", "r2"],
        "bootstraps": ["b1", "b2"],
        "rng": random.Random(2),
    }
    return Machine(resume=resume or at(5), **defaults | settings)


def drive(one: Machine, *outcomes: PullOutcome) -> list[Verb]:
    return [one.report(outcome) for outcome in outcomes]


def test_the_table_covers_every_state_and_outcome() -> None:
    states = [state for state in State if state is not State.STOPPED]
    assert set(TABLE) == {(state, outcome) for state in states for outcome in PullOutcome}


@pytest.mark.parametrize(("state", "outcome"), list(TABLE))
def test_every_entry_leads_to_a_state_that_can_be_performed(
    state: State, outcome: PullOutcome
) -> None:
    one = machine()
    one.state = state
    verb = one.report(outcome, ScnTooOld("x"))
    step = one.next()
    assert verb is TABLE[state, outcome]
    assert (step.state is State.STOPPED) == (verb in (Verb.STOP, Verb.GAP))
    if step.state is State.STOPPED:
        assert one.error is not None
    elif step.state in (State.REGISTER, State.STREAM):
        assert step.server in ("r1", "r2")
    else:
        assert step.server in ("b1", "b2")


def test_every_error_of_the_tree_has_an_outcome_and_retryable_ones_are_retried() -> None:
    for cls in errors.registry().values():
        outcome = outcome_of(cls("x"))
        if cls.retry and cls is not NotSeeded:
            assert outcome is PullOutcome.UNREACHABLE, cls


def test_a_position_in_the_ring_is_streamed_from_a_relay() -> None:
    one = machine(at(5))
    assert one.next().state is State.REGISTER
    one.report(PullOutcome.OK)
    step = one.next()
    assert (step.state, step.resume, step.wait_s) == (State.STREAM, at(5), 0.0)


def test_a_client_ahead_of_the_ring_stays_with_its_relay_and_waits() -> None:
    one = machine(at(10**9), relays=["r1"])
    drive(one, PullOutcome.OK, PullOutcome.ENDED)
    assert one.next().state is State.STREAM
    drive(one, PullOutcome.ENDED)
    step = one.next()
    assert (step.state, step.resume) == (State.STREAM, at(10**9))
    assert step.wait_s > 0, "empty answers are not requested in a busy loop"


def test_long_polls_that_bring_nothing_are_no_failures_however_many() -> None:
    one = machine(at(5), relays=["r1"], max_failures=1)
    drive(one, PullOutcome.OK)
    for _ in range(50):
        drive(one, PullOutcome.QUIET)
        step = one.next()
        assert (step.state, step.resume) == (State.STREAM, at(5))
        assert 0 < step.wait_s <= 0.1, "a server that answers at once is not polled in a busy loop"


def test_a_position_that_only_the_log_has_goes_to_the_bootstrap_and_returns_at_the_target() -> None:
    one = machine(at(5))
    drive(one, PullOutcome.OK, PullOutcome.TOO_OLD)
    assert one.next().state is State.REGISTER, "another relay may hold more"
    drive(one, PullOutcome.OK, PullOutcome.TOO_OLD)
    assert one.next().state is State.REGISTER_BOOTSTRAP
    drive(one, PullOutcome.OK)
    assert one.next() == one.next()
    assert one.next().resume == at(5)
    one.advanced(at(50))
    drive(one, PullOutcome.TARGET)
    step = one.next()
    assert (step.state, step.resume) == (State.REGISTER, at(50))


def test_a_time_that_no_relay_holds_goes_to_the_bootstrap_as_a_time() -> None:
    one = machine(AtTime(7))
    assert one.next().state is State.REGISTER
    drive(one, PullOutcome.TOO_OLD, PullOutcome.TOO_OLD)
    step = one.next()
    assert (step.state, step.resume) == (State.REGISTER_BOOTSTRAP, AtTime(7))


def test_an_empty_client_takes_the_snapshot_from_the_origin() -> None:
    one = machine(first_resume("bootstrap", True))
    step = one.next()
    assert (step.state, step.resume) == (State.REGISTER_BOOTSTRAP, After(ORIGIN))


def test_a_checkpoint_within_a_bootstrap_resumes_there() -> None:
    step = machine(in_bootstrap()).next()
    assert (step.state, step.resume) == (State.REGISTER_BOOTSTRAP, in_bootstrap())


def test_a_checkpoint_within_a_bootstrap_without_a_server_asks_a_relay_for_its_origin() -> None:
    step = machine(in_bootstrap(), bootstraps=[]).next()
    assert (step.state, step.resume) == (State.REGISTER, at(1))


def test_an_unknown_clock_ends_the_client() -> None:
    one = machine(at(5))
    with pytest.raises(ClockMismatch, match="'other'"):
        one.met_clock("other")
    one.report(PullOutcome.WRONG_CLOCK, ClockMismatch("x"))
    assert one.next().state is State.STOPPED


def test_a_target_already_evicted_is_bootstrapped_again_from_there_and_not_in_a_busy_loop() -> None:
    one = machine(at(5), relays=["r1"])
    drive(one, PullOutcome.TOO_OLD, PullOutcome.OK)
    one.advanced(at(50))
    drive(one, PullOutcome.TARGET, PullOutcome.OK, PullOutcome.TOO_OLD)
    step = one.next()
    assert (step.state, step.resume) == (State.REGISTER_BOOTSTRAP, at(50))
    assert step.wait_s > 0
    assert one.bootstrap_count == 2


def test_failing_relays_are_tried_one_after_the_other_and_a_pause_follows_each_round() -> None:
    one = machine(at(5), relays=["r1", "r2", "r3"])
    waits, servers = [], []
    for _ in range(9):
        step = one.next()
        waits.append(step.wait_s)
        servers.append(step.server)
        one.report(PullOutcome.UNREACHABLE, ServerUnavailable("x"))
    assert servers[:3] == servers[3:6] == servers[6:9]
    assert sorted(servers[:3]) == ["r1", "r2", "r3"]
    assert [wait > 0 for wait in waits] == [False] * 3 + [True, False, False] * 2


def test_back_off_doubles_up_to_its_most_and_never_halves_more_than_that() -> None:
    backoff, rng = Backoff(0.1, 1.0), random.Random(1)
    for attempt, full_s in [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (2000, 1.0)]:
        for _ in range(20):
            assert full_s / 2 <= backoff.delay_s(attempt, rng) <= full_s


def test_failures_are_forgotten_as_soon_as_frames_come() -> None:
    one = machine(at(5), relays=["r1"], max_failures=3)
    for _ in range(20):
        drive(one, PullOutcome.UNREACHABLE, PullOutcome.UNREACHABLE)
        one.advanced(at(6))
    assert one.next().state is not State.STOPPED


def test_used_up_failures_stop_with_the_last_error() -> None:
    one = machine(at(5), relays=["r1"], max_failures=3)
    last = ServerUnavailable("the fourth")
    for error in [ServerUnavailable("x")] * 3 + [last]:
        one.report(PullOutcome.UNREACHABLE, error)
    assert one.next().state is State.STOPPED
    assert one.error is last


def test_requests_to_a_bootstrap_that_is_not_seeded_never_end() -> None:
    one = machine(After(ORIGIN), bootstraps=["b1"], max_failures=3)
    for _ in range(50):
        one.report(PullOutcome.NOT_SEEDED, NotSeeded("x"))
    step = one.next()
    assert step.state is State.REGISTER_BOOTSTRAP
    assert step.wait_s > 0


@pytest.mark.parametrize(("policy", "start"), [("oldest", Oldest()), ("latest", Latest())])
def test_a_gap_is_crossed_where_the_policy_allows_it(policy: Any, start: Resume) -> None:
    one = machine(at(5), bootstraps=[], on_gap=policy)
    drive(one, PullOutcome.TOO_OLD, PullOutcome.TOO_OLD)
    step = one.next()
    assert (step.state, step.resume, one.gap_count) == (State.REGISTER, start, 1)


@pytest.mark.parametrize("error", [ScnTooOld("x"), LogTooYoung("y")])
def test_a_gap_stops_with_its_own_error_otherwise(error: DatabusError) -> None:
    one = machine(After(ORIGIN))
    one.report(outcome_of(error), error)
    assert one.error is error


def test_start_points() -> None:
    assert first_resume("bootstrap", False) == Oldest()
    assert first_resume("latest", True) == Latest()
    assert first_resume(17, True) == After(Position(17))
    assert first_resume(at(3), True) == at(3)
    wrong: Any
    for wrong in ("newest", -1, True, None):
        with pytest.raises(ConfigError):
            first_resume(wrong, True)


def test_a_client_without_a_relay_is_refused() -> None:
    with pytest.raises(ConfigError, match="no relay"):
        machine(relays=[])
