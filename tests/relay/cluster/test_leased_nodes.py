"""A cluster's leases in one document: sessions, leaders, epochs, in every order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from databus.common.errors import FormatError, ServerUnavailable, StoreError
from databus.relay.cluster.cluster_document import ClusterDocument
from databus.relay.cluster.cluster_member import OWN_SHARE
from databus.relay.cluster.cluster_nodes import Holder
from databus.relay.cluster.duties import Duty
from databus.relay.cluster.leased_nodes import ATTEMPTS, LeasedNodes
from tests.support.memory_document import MemoryDocument

LEASE_S = 4.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def nodes(store: MemoryDocument, relay: str, clock: Clock) -> LeasedNodes:
    return LeasedNodes(store, relay, LEASE_S, now_s=clock, wait=lambda _: None)


@pytest.fixture
def store() -> MemoryDocument:
    return MemoryDocument()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_relay_is_removed_only_after_a_whole_lease_without_a_beat_was_seen(
    store: MemoryDocument, clock: Clock
) -> None:
    a, b = nodes(store, "a", clock), nodes(store, "b", clock)
    session = a.beat({"address": "A"})
    holder = a.lead("shop", "A")
    assert holder == Holder("a", "A", 1, session)
    clock.now_s += 100
    b.beat({})
    assert b.view().holders == {"shop": holder}, "seen for the first time now, however old it is"
    assert b.lead("shop", "B") is None
    clock.now_s += LEASE_S - 0.1
    b.beat({})
    assert a.beat({}) == session, "it is still there"
    clock.now_s += LEASE_S - 0.1
    b.beat({})
    assert set(b.view().members) == {"a", "b"}, "the new beat was seen only now"
    clock.now_s += LEASE_S
    b.beat({})
    assert set(b.view().members) == {"b"}
    taken = b.lead("shop", "B")
    assert taken is not None
    assert taken.epoch == 2
    again = a.beat({})
    assert again not in (0, session), "a session that was removed never comes back"
    assert a.view().holders == {"shop": taken}
    a.release("shop")
    a.beat({})
    assert a.view().holders == {"shop": taken}, "only its holder releases it"
    b.close()
    a.beat({})
    assert set(a.view().members) == {"a"}
    assert a.lead("shop", "A") == Holder("a", "A", 3, again)


def test_a_beat_between_the_look_and_the_removal_keeps_the_relay(
    store: MemoryDocument, clock: Clock
) -> None:
    a, b = nodes(store, "a", clock), nodes(store, "b", clock)
    a.beat({})
    b.beat({})
    clock.now_s += LEASE_S

    def beats() -> None:
        store.between = lambda: None
        a.beat({})

    store.between = beats
    b.beat({})
    assert set(b.view().members) == {"a", "b"}


def test_two_relays_of_one_name_are_never_in_the_cluster_at_once(
    store: MemoryDocument, clock: Clock
) -> None:
    a, again = nodes(store, "a", clock), nodes(store, "a", clock)
    a.beat({})
    with pytest.raises(ServerUnavailable, match="in the cluster already"):
        again.beat({})
    clock.now_s += LEASE_S
    again.beat({})
    with pytest.raises(ServerUnavailable, match="in the cluster already"):
        a.beat({})


def test_epochs_grow_over_a_document_that_was_lost(store: MemoryDocument, clock: Clock) -> None:
    a, b = nodes(store, "a", clock), nodes(store, "b", clock)
    a.beat({"rings": {"shop": {"epoch": 6}}})
    b.beat({"rings": {"shop": {"epoch": 7}, "crm": {"epoch": 9}}})
    found = a.lead("shop", "A")
    assert found is not None
    assert found.epoch == 8
    store.content = None
    with_new_session = a.beat({"rings": {"shop": {"epoch": 8}}})
    found = a.lead("shop", "A")
    assert found == Holder("a", "A", 9, with_new_session)


def test_an_assignment_is_replaced_only_on_top_of_the_version_that_was_read(
    store: MemoryDocument, clock: Clock
) -> None:
    a, b = nodes(store, "a", clock), nodes(store, "b", clock)
    a.beat({})
    b.beat({})
    wanted = {"shop": Duty("a", ("b",))}
    assert a.assign(wanted, a.view().version)
    assert not b.assign({}, b.view().version)
    b.beat({})
    assert b.view().assignment == wanted


def test_a_lost_answer_of_a_join_or_of_a_leadership_is_found_again(
    store: MemoryDocument, clock: Clock
) -> None:
    a = nodes(store, "a", clock)
    store.loses_answer = True
    with pytest.raises(StoreError):
        a.beat({})
    session = a.beat({})
    assert ClusterDocument.from_bytes(store.content or b"").members["a"].session == session
    store.loses_answer = True
    with pytest.raises(StoreError):
        a.lead("shop", "A")
    a.beat({})
    assert a.view().holders["shop"].session == session, "the membership gives it back"
    a.release("shop")
    found = a.lead("shop", "A")
    assert found is not None
    assert found.epoch == 2


def test_a_document_that_always_changes_and_one_that_is_damaged_are_errors(
    store: MemoryDocument, clock: Clock
) -> None:
    a = nodes(store, "a", clock)
    a.beat({})
    calls = 0

    def changes() -> None:
        nonlocal calls
        calls += 1
        store.number += 1

    store.between = changes
    with pytest.raises(ServerUnavailable, match="all the time"):
        a.beat({})
    assert calls == ATTEMPTS
    for content in (b"", b"[]", b'{"v": 2}', b'{"v": 1}', b'{"v": 1, "members": 3}'):
        store.content = content
        with pytest.raises(FormatError, match="document of the cluster"):
            a.beat({})


class LeaseMachine(RuleBasedStateMachine):
    """Three relays that beat, pause in the middle of a beat, lead and give up, with own clocks.

    A relay leads by its own clock as ``ClusterMember`` does: until a share of the lease after the
    beginning of its last stored beat.  Its clock may have any value; only rates are equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryDocument()
        self.time = Clock()
        self.relays = []
        for number in range(3):
            offset_s = 1e6 * number

            def own_clock(offset_s: float = offset_s) -> float:
                return self.time.now_s + offset_s

            self.relays.append(
                LeasedNodes(self.store, f"r{number}", LEASE_S, now_s=own_clock, wait=lambda _: None)
            )
        self.until_s = [0.0, 0.0, 0.0]
        self.renewed_s = [0.0, 0.0, 0.0]
        self.sessions = [0, 0, 0]
        self.leads: list[Holder | None] = [None, None, None]
        self.epochs: list[int] = []

    def _beat(self, number: int) -> None:
        began_s = self.time.now_s
        session = self.relays[number].beat({})
        led = self.leads[number]
        if led is not None and self.until_s[number] <= self.time.now_s:
            led = None
        view = self.relays[number].view()
        if led is not None and (led.session != session or view.holders.get("db") != led):
            led = None
        self.leads[number] = led
        self.renewed_s[number] = began_s
        if led is not None:
            self.until_s[number] = began_s + LEASE_S * OWN_SHARE
        self.sessions[number] = session

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.1, 4.0, 9.0]))
    def passes(self, seconds: float) -> None:
        self.time.now_s += seconds

    @rule(number=st.integers(0, 2))
    def beats(self, number: int) -> None:
        self._beat(number)

    @rule(number=st.integers(0, 2), other=st.integers(0, 2), seconds=st.sampled_from([0.5, 5.0]))
    @precondition(lambda self: self.store.content is not None)
    def is_paused_in_a_beat(self, number: int, other: int, seconds: float) -> None:
        if other == number:
            return

        def between() -> None:
            self.store.between = lambda: None
            self.time.now_s += seconds
            self._beat(other)
            self._lead(other)

        self.store.between = between
        self._beat(number)
        self.store.between = lambda: None

    def _lead(self, number: int) -> None:
        relay = self.relays[number]
        holder = relay.view().holders.get("db")
        if holder is not None and holder.session == relay.session and not self.leads[number]:
            relay.release("db")
        found = relay.lead("db", "")
        if found is not None:
            self.leads[number] = found
            self.until_s[number] = self.renewed_s[number] + LEASE_S * OWN_SHARE
            self.epochs.append(found.epoch)

    @rule(number=st.integers(0, 2))
    def leads_if_it_can(self, number: int) -> None:
        if self.sessions[number]:
            self._lead(number)

    @rule(number=st.integers(0, 2))
    def gives_up(self, number: int) -> None:
        if self.leads[number] is not None:
            self.leads[number] = None
            self.relays[number].release("db")

    @invariant()
    def at_most_one_leads_by_its_own_clock(self) -> None:
        leading = [
            number
            for number, led in enumerate(self.leads)
            if led is not None and self.until_s[number] > self.time.now_s
        ]
        assert len(leading) <= 1

    @invariant()
    def epochs_grow(self) -> None:
        assert self.epochs == sorted(set(self.epochs))


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
