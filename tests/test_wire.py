"""Promises of wire.py: exactly once and in order over any network, and no garbage gets through."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep import wire
from everstep.actions import StopRanks
from everstep.events import (
    EvidenceFound,
    MachineProgress,
    RankExited,
    RanksStarted,
    Report,
)
from everstep.model import (
    ExitStatus,
    Generation,
    MachineId,
    PolicySpec,
    Rank,
    Seconds,
    Step,
    Term,
)
from everstep.sightings import MachineActivity, StacksSent
from everstep.wire import Bare, Data, Hello, Link, Welcome

HELLO = Hello(
    protocol=wire.PROTOCOL,
    version="0.1.0",
    machine=MachineId("m1"),
    agent="a1",
    term=Term(0),
    received=0,
)
WELCOME = Welcome(
    protocol=wire.PROTOCOL, version="0.1.0", term=Term(3), received=0, policy=PolicySpec()
)


def connected() -> tuple[Link, Link]:
    """Two ends that know nothing yet of each other."""
    a, b = Link(), Link()
    assert a.resume(0, 0.0) == []
    assert b.resume(0, 0.0) == []
    return a, b


# --- frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        HELLO,
        WELCOME,
        wire.Refused(reason="no"),
        Data(seq=1, ack=0, body=b"\x00\xff"),
        Bare(ack=7),
        Bare(ack=7, body=b""),
    ],
)
def test_every_frame_survives_the_trip(frame: wire.AnyFrame) -> None:
    assert wire.decode(wire.encode(frame)) == frame


def test_reports_and_directives_survive_the_trip() -> None:
    report = RankExited(
        machine=MachineId("m1"),
        generation=Generation(2),
        rank=Rank(3),
        exit=ExitStatus(signal=9),
    )
    order = StopRanks(
        id="4.0", cause="4", why="test", machine=MachineId("m1"), generation=Generation(3)
    )
    directive = wire.Directive(term=Term(2), order=order)
    assert wire.decode_report(wire.encode_report(report)) == report
    assert wire.decode_directive(wire.encode_directive(directive)) == directive


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_with_a_sentence_and_nothing_else(data: bytes) -> None:
    for decode in (wire.decode, wire.decode_report, wire.decode_directive):
        with pytest.raises(wire.WireError, match=r"not (a frame|a report|an order)"):
            decode(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_frame_is_refused_or_is_another_frame(data: st.DataObject) -> None:
    """Whatever a flipped byte makes of a frame, decode never raises anything but WireError."""
    frames: list[wire.AnyFrame] = [HELLO, WELCOME]
    whole = bytearray(wire.encode(data.draw(st.sampled_from(frames))))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(wire.WireError):
        assert isinstance(wire.decode(bytes(whole)), wire.AnyFrame)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(wire.WireError, match="not a frame"):
        wire.decode(b"\x82\xa4type\xa7Refused\xa1x" + b"\x91" * 100_000 + b"\x00")


def test_a_frame_of_absurd_size_is_refused_unread() -> None:
    with pytest.raises(wire.WireError, match="at most 4194304"):
        wire.decode(b"\x00" * (wire.FRAME_BYTES_MAX + 1))


def test_fields_of_a_newer_version_are_ignored() -> None:
    newer = wire.encode(Bare(ack=1)).replace(b"\xa3ack", b"\xa3new", 1)
    with pytest.raises(wire.WireError, match="ack"):
        wire.decode(newer)
    extended = b"\x83" + wire.encode(Bare(ack=1))[1:] + b"\xa3new\x07"
    # The encoded Bare is a map of three (type, ack, body); a fourth entry is from the future.
    extended = b"\x84" + extended[1:]
    assert wire.decode(extended) == Bare(ack=1)


# --- versions and terms --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("apart", "accepted"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)]
)
def test_protocols_one_apart_work_together(apart: int, accepted: bool) -> None:
    hello = Hello(
        protocol=wire.PROTOCOL + apart,
        version="9.9",
        machine=MachineId("m1"),
        agent="a1",
        term=Term(0),
        received=0,
    )
    problem = wire.hello_problem(hello)
    assert (problem is None) == accepted
    if problem is not None:
        assert "m1" in problem
        assert "9.9" in problem


def test_an_older_controller_gets_nothing_that_it_would_take_for_garbage() -> None:
    """And no number is missing, or it would wait for it for ever."""
    machine = MachineId("m1")
    reports: list[Report] = [
        StacksSent(machine=machine, action="1.0", look=1, stacks=()),
        RanksStarted(machine=machine, action="1.1", generation=Generation(1)),
    ]
    frames = [wire.Data(seq=n, ack=0, body=wire.encode_report(r)) for n, r in enumerate(reports)]
    assert [wire.understood(frame, 4) for frame in frames] == frames
    old = [wire.understood(frame, 3) for frame in frames]
    assert old[1] == frames[1]
    assert isinstance(old[0], wire.Data)
    assert (old[0].seq, old[0].ack) == (0, 0)
    nothing = wire.decode_report(old[0].body)
    assert isinstance(nothing, EvidenceFound)
    assert (nothing.machine, nothing.generation, nothing.findings) == (machine, 0, ())


def test_what_may_be_lost_is_left_out_for_an_older_controller() -> None:
    """With its acknowledgement, which is for any version."""
    activity = MachineActivity(machine=MachineId("m1"), generation=Generation(1), quiet_s=70.0)
    frame = wire.Bare(ack=7, body=wire.encode_report(activity))
    assert wire.understood(frame, 4) == frame
    assert wire.understood(frame, 3) == wire.Bare(ack=7, body=None)


def test_an_agent_does_not_listen_to_an_older_term() -> None:
    assert wire.welcome_problem(WELCOME, Term(3)) is None
    assert wire.welcome_problem(WELCOME, Term(2)) is None
    assert "term 4 has begun" in (wire.welcome_problem(WELCOME, Term(4)) or "")


def test_an_agent_does_not_listen_to_a_controller_two_protocols_on() -> None:
    welcome = Welcome(
        protocol=wire.PROTOCOL + 2, version="7.0", term=Term(3), received=0, policy=PolicySpec()
    )
    assert "7.0" in (wire.welcome_problem(welcome, Term(3)) or "")


# --- one end -------------------------------------------------------------------------------------


def test_numbers_start_at_one_and_doubles_are_dropped() -> None:
    a, b = connected()
    frame = a.send(b"x", 0.0)
    assert frame.seq == 1
    assert b.receive(frame) == [(1, b"x")]
    assert b.receive(frame) == []


def test_a_message_after_a_gap_waits_for_the_missing_one() -> None:
    a, b = connected()
    first, second = a.send(b"x", 0.0), a.send(b"y", 0.0)
    assert b.receive(second) == []
    assert b.receive(first) == [(1, b"x")]
    assert b.receive(second) == [(2, b"y")]


def test_nothing_is_acknowledged_before_it_is_delivered() -> None:
    a, b = connected()
    b.receive(a.send(b"x", 0.0))
    assert b.ack_due() is None
    assert b.unreliable(b"").ack == 0
    b.delivered(1)
    assert b.ack_due() == Bare(ack=1)
    assert b.ack_due() is None


def test_a_double_is_acknowledged_again_since_its_sender_did_not_hear() -> None:
    a, b = connected()
    frame = a.send(b"x", 0.0)
    b.receive(frame)
    b.delivered(1)
    b.ack_due()
    b.receive(frame)
    assert b.ack_due() == Bare(ack=1)


def test_the_unacknowledged_is_repeated_after_two_seconds_and_not_before() -> None:
    a, b = connected()
    frame = a.send(b"x", 10.0)
    assert a.next_deadline() == 12.0
    assert a.due(11.9) == []
    assert a.due(12.0) == [frame]
    assert a.next_deadline() == 14.0
    b.receive(frame)
    b.delivered(1)
    a.receive(Bare(ack=1))
    assert a.unacked == 0
    assert a.next_deadline() is None


def test_repeats_come_in_bounded_portions() -> None:
    a, _ = connected()
    for _ in range(wire.RESEND_MAX + 5):
        a.send(b"x", 0.0)
    assert len(a.due(5.0)) == wire.RESEND_MAX
    a.receive(Bare(ack=wire.RESEND_MAX))
    assert [frame.seq for frame in a.due(5.0)] == [wire.RESEND_MAX + n for n in range(1, 6)]


def test_without_a_connection_nothing_is_due_and_nothing_is_forgotten() -> None:
    link = Link()
    link.send(b"x", 0.0)
    link.unreliable(b"line")
    assert link.next_deadline() is None
    assert link.due(100.0) == []
    assert link.resume(0, 100.0) == [Data(seq=1, ack=0, body=b"x"), Bare(ack=0, body=b"line")]
    link.disconnected()
    assert link.resume(1, 101.0) == []


def test_held_output_is_bounded_and_what_is_dropped_is_counted() -> None:
    link = Link()
    for number in range(5):
        link.unreliable(bytes([number]) * (wire.HELD_BYTES_MAX // 3))
    assert link.dropped == 2
    assert [frame.body[:1] for frame in link.resume(0, 0.0) if frame.body] == [b"\2", b"\3", b"\4"]


@pytest.mark.parametrize("ack", [-1, 1])
def test_an_acknowledgement_of_what_was_never_sent_is_an_error(ack: int) -> None:
    a, _ = connected()
    with pytest.raises(wire.WireError, match="only 0 were sent"):
        a.receive(Bare(ack=ack))


def test_a_peer_that_lost_acknowledged_messages_ends_the_session() -> None:
    a, _ = connected()
    for _ in range(3):
        a.send(b"x", 0.0)
    a.receive(Bare(ack=3))
    with pytest.raises(wire.SessionLostError, match="up to 1 but had acknowledged 3"):
        a.resume(1, 1.0)


def test_a_new_peer_is_counted_from_one() -> None:
    a, b = connected()
    b.receive(a.send(b"x", 0.0))
    b.delivered(1)
    b.new_peer()
    fresh = Link()
    assert b.receive(fresh.send(b"y", 0.0)) == [(1, b"y")]


def test_a_restarted_controller_takes_up_where_its_journal_ends() -> None:
    agent, controller = connected()
    frames = [agent.send(body, 0.0) for body in (b"1", b"2", b"3")]
    for frame in frames:
        controller.receive(frame)
    controller.delivered(2)  # the third was received, but its append never happened
    agent.disconnected()
    restarted = Link(received=2)
    new: list[tuple[int, bytes]] = []
    for again in agent.resume(2, 1.0):
        new += restarted.receive(again)
    assert new == [(3, b"3")]


# --- two ends and a bad network ------------------------------------------------------------------


class _End:
    """A Link, what it was given to send and what came out of it."""

    def __init__(self) -> None:
        self.link = Link()
        self.given: list[bytes] = []
        self.got: list[bytes] = []
        self.undelivered: list[int] = []


class BadNetwork(RuleBasedStateMachine):
    """Two Links and frames in flight that are lost, delayed, doubled, and cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Seconds = 0.0
        self.ends = (_End(), _End())
        self.flying: list[tuple[int, bytes]] = []
        self.up = False

    def _launch(self, sender: int, frames: Sequence[Data | Bare]) -> None:
        if self.up:
            self.flying += [(1 - sender, wire.encode(frame)) for frame in frames]

    def _land(self, index: int) -> None:
        to, data = self.flying[index]
        frame = wire.decode(data)
        assert isinstance(frame, Data | Bare)
        end = self.ends[to]
        for seq, body in end.link.receive(frame):
            if seq != wire.UNRELIABLE:
                end.got.append(body)
                end.undelivered.append(seq)

    @rule(side=st.integers(0, 1))
    def send(self, side: int) -> None:
        end = self.ends[side]
        body = f"{side}:{len(end.given)}".encode()
        end.given.append(body)
        self._launch(side, [end.link.send(body, self.now)])

    @rule(side=st.integers(0, 1))
    def output(self, side: int) -> None:
        self._launch(side, [self.ends[side].link.unreliable(b"line")])

    @rule(side=st.integers(0, 1))
    def deliver(self, side: int) -> None:
        """As after an append to a journal, which may well be late."""
        end = self.ends[side]
        for seq in end.undelivered:
            end.link.delivered(seq)
        end.undelivered.clear()
        ack = end.link.ack_due()
        if ack is not None:
            self._launch(side, [ack])

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), keep=st.booleans())
    def land(self, data: st.DataObject, keep: bool) -> None:
        """Any frame in flight arrives, whatever its turn; `keep` makes it arrive once more."""
        index = data.draw(st.integers(0, len(self.flying) - 1))
        self._land(index)
        if not keep:
            del self.flying[index]

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.flying[data.draw(st.integers(0, len(self.flying) - 1))]

    @rule()
    def disconnect(self) -> None:
        self.flying.clear()
        self.up = False
        for end in self.ends:
            end.link.disconnected()

    @precondition(lambda self: not self.up)
    @rule()
    def connect(self) -> None:
        self.up = True
        for side in (0, 1):
            frames = self.ends[side].link.resume(self.ends[1 - side].link.received, self.now)
            self._launch(side, frames)

    @rule(passed=st.floats(0.1, 5.0))
    def wait(self, passed: float) -> None:
        self.now += passed
        for side in (0, 1):
            self._launch(side, self.ends[side].link.due(self.now))

    @invariant()
    def in_order_and_once(self) -> None:
        for side in (0, 1):
            given, got = self.ends[1 - side].given, self.ends[side].got
            assert got == given[: len(got)]

    def teardown(self) -> None:
        """Once the network is good, everything arrives and everything is acknowledged."""
        if not self.up:
            self.connect()
        for _ in range(4):
            self.wait(wire.RESEND_AFTER_S)
            while self.flying:
                self._land(0)
                del self.flying[0]
            for side in (0, 1):
                self.deliver(side)
        while self.flying:
            self._land(0)
            del self.flying[0]
        for side in (0, 1):
            assert self.ends[side].got == self.ends[1 - side].given
            assert self.ends[side].link.unacked == 0


TestBadNetwork = BadNetwork.TestCase
TestBadNetwork.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_progress_is_a_report_too() -> None:
    report = MachineProgress(
        machine=MachineId("m1"), generation=Generation(1), slowest=Step(4), fastest=Step(5)
    )
    assert wire.decode_report(wire.encode_report(report)) == report
