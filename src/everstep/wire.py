"""What agents and controllers say to each other: frames, versions, and one end of a session.

Sans-I/O: the shells in agent/ and controller/ and the simulator carry the bytes, and nothing here
reads a clock or a socket. One connection runs like this (A agent, C controller):

    A -> C  Hello      who I am, the highest term I know, what I received from that term
    C -> A  Welcome    my term, what is journalled of your session     (or Refused, and the end)
    A -> C  Data...    what C has not acknowledged, then a fresh MachineJoined
    C -> A  Data...    what A has not acknowledged, then all outstanding orders
            Data and Bare in both directions until the connection ends

A message of Data arrives exactly once and in order however often connections break: its sender
keeps it until it is acknowledged. Bare carries what may be lost (progress, output) or only an
acknowledgement. Numbers count from 1 in each session. The agent's session is one agent process; the
controller's is one term towards one agent process. So an end whose peer is new starts counting it
anew: the agent calls `new_peer`, the controller makes a new Link.

Versions of the protocol one apart work together; fields that a peer does not know are ignored.
"""

from __future__ import annotations

from collections import deque

import msgspec

from everstep.actions import (
    CollectStacks,
    Order,
    SendStacks,
)
from everstep.events import (
    EvidenceFound,
    Report,
)
from everstep.model import (
    NO_GENERATION,
    NO_VERSION,
    EverstepError,
    MachineId,
    PolicySpec,
    Seconds,
    Term,
    Value,
    VersionId,
)
from everstep.sightings import MachineActivity, MachineStacks, StacksSent

PROTOCOL = 4
"""Raised by one when a frame, a report or an order changes so that a peer must know."""
SINCE_4 = (MachineActivity, MachineStacks, StacksSent)
"""Reports that protocol 3 would take for garbage."""
ORDERS_SINCE_4 = (CollectStacks, SendStacks)
"""Orders that an agent of protocol 3 would take for garbage, and hang up."""
RESEND_AFTER_S: Seconds = 2.0
"""Connections are TCP, so what is lost was lost with a connection or a stuck peer: no hurry."""
RESEND_MAX = 256
"""Messages sent again at once: a slow peer is not buried; acknowledgements free the rest."""
HELD_BYTES_MAX = 1 << 20
"""Unreliable bodies kept while there is no connection: about 10,000 lines of output."""
FRAME_BYTES_MAX = 4 << 20
"""A larger frame is garbage: the largest honest one is a MachineJoined of some hundred KiB."""
UNRELIABLE = 0
"""Stands in for the number of a message that has none."""


class WireError(EverstepError):
    """A peer said what it must not say; the connection is closed, nothing else happens."""


class SessionLostError(WireError):
    """The peer lost acknowledged messages (its disk lost what was not fsynced).

    This session cannot go on; the agent must end, so that its keeper starts it with a fresh one.
    """


# --- frames --------------------------------------------------------------------------------------


class Frame(Value, frozen=True, kw_only=True, tag=True):
    """Base of everything that crosses a connection."""


class Hello(Frame, frozen=True, kw_only=True):
    """First frame of an agent."""

    protocol: int
    version: str
    machine: MachineId
    agent: str
    """Random id of this agent process: the name of its session."""
    term: Term
    """Highest term it knows, 0 for none."""
    received: int
    """Newest number it received in that term."""


class Welcome(Frame, frozen=True, kw_only=True):
    """The controller takes the agent in."""

    protocol: int
    version: str
    term: Term
    received: int
    """Newest number of the agent's session that is journalled."""
    policy: PolicySpec
    code: VersionId = NO_VERSION
    """The code version that the job was submitted with: only the host that leads has read it."""


class Refused(Frame, frozen=True, kw_only=True):
    """The controller does not; the connection is closed next."""

    reason: str
    """One sentence for the agent's log that says what to do."""


class Data(Frame, frozen=True, kw_only=True):
    """A message that arrives exactly once."""

    seq: int
    ack: int
    body: bytes


class Bare(Frame, frozen=True, kw_only=True):
    """A message that may be lost, or only an acknowledgement."""

    ack: int
    body: bytes | None = None


class Directive(Value, frozen=True, kw_only=True):
    """Body of what a controller sends: an order and the term that gives it."""

    term: Term
    order: Order


AnyFrame = Hello | Welcome | Refused | Data | Bare

_NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises on garbage."""
_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(AnyFrame)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_directives = msgspec.msgpack.Decoder(Directive)


def encode(frame: AnyFrame) -> bytes:
    return _encoder.encode(frame)


def decode(data: bytes) -> AnyFrame:
    """Raises WireError on anything that is not a frame."""
    if len(data) > FRAME_BYTES_MAX:
        raise WireError(
            f"A frame of {len(data)} bytes came; at most {FRAME_BYTES_MAX} are allowed."
        )
    try:
        return _frames.decode(data)
    except _NOT_OURS as problem:
        raise WireError(_garbage(data, "a frame", problem)) from None


def encode_report(report: Report) -> bytes:
    return _encoder.encode(report)


def decode_report(body: bytes) -> Report:
    """Raises WireError on anything that is not a report."""
    try:
        return _reports.decode(body)
    except _NOT_OURS as problem:
        raise WireError(_garbage(body, "a report", problem)) from None


def understood(frame: AnyFrame, protocol: int) -> AnyFrame:
    """The frame as a controller of this protocol understands it.

    What it does not know is dropped. Its number must not be: the place is taken by a finding of
    nothing, which means nothing to any version.
    """
    if protocol >= 4 or not isinstance(frame, Data | Bare) or frame.body is None:
        return frame
    report = decode_report(frame.body)
    if not isinstance(report, SINCE_4):
        return frame
    if isinstance(frame, Bare):
        return msgspec.structs.replace(frame, body=None)
    nothing = EvidenceFound(machine=report.machine, generation=NO_GENERATION, findings=())
    return msgspec.structs.replace(frame, body=encode_report(nothing))


def may_be_ordered(order: Order, protocol: int) -> bool:
    """Whether an agent of this protocol understands the order."""
    return protocol >= 4 or not isinstance(order, ORDERS_SINCE_4)


def encode_directive(directive: Directive) -> bytes:
    return _encoder.encode(directive)


def decode_directive(body: bytes) -> Directive:
    """Raises WireError on anything that is not a directive."""
    try:
        return _directives.decode(body)
    except _NOT_OURS as problem:
        raise WireError(_garbage(body, "an order", problem)) from None


def _garbage(data: bytes, wanted: str, problem: Exception) -> str:
    return f"{len(data)} bytes came that are not {wanted} of protocol {PROTOCOL}: {problem}."


# --- the first two frames ------------------------------------------------------------------------


def hello_problem(hello: Hello) -> str | None:
    """Why a controller must refuse this agent for its version, or None."""
    if abs(hello.protocol - PROTOCOL) <= 1:
        return None
    return (
        f"The agent of machine {hello.machine} (everstep {hello.version}) speaks protocol "
        f"{hello.protocol} and this controller speaks {PROTOCOL}: install versions of everstep "
        "on both sides whose protocols are at most one apart."
    )


def welcome_problem(welcome: Welcome, known: Term) -> str | None:
    """Why an agent that knows term `known` must not listen to this controller, or None."""
    if abs(welcome.protocol - PROTOCOL) > 1:
        return (
            f"The controller (everstep {welcome.version}) speaks protocol {welcome.protocol} and "
            f"this agent speaks {PROTOCOL}: install versions of everstep on both sides whose "
            "protocols are at most one apart."
        )
    if welcome.term < known:
        return (
            f"The controller is of term {welcome.term}, but term {known} has begun: it is fenced "
            "off and this agent waits for the newer one."
        )
    return None


# --- one end of a session ------------------------------------------------------------------------


class _Unacked(msgspec.Struct):
    seq: int
    body: bytes
    sent_at: Seconds


class Link:
    """One end of a session: numbers what it sends, repeats what is not acknowledged, drops doubles.

    It starts without a connection. `resume` opens one and `disconnected` ends it. In between
    nothing is lost: `send` and `unreliable` still return a frame, which the shell need not send,
    since `resume` returns it again. Acknowledgements cover a message once `delivered` was called:
    at once by an agent, after the append to the journal by a controller.
    """

    def __init__(self, *, received: int = 0) -> None:
        """`received`: newest number already taken from this peer (from a replayed journal)."""
        self.received = received
        """Newest number taken from the peer."""
        self.dropped = 0
        """Unreliable bodies thrown away because there was no room to hold them."""
        self._delivered = received
        self._ack_sent = received
        self._sent = 0
        self._acked = 0
        self._unacked: deque[_Unacked] = deque()
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._connected = False

    @property
    def unacked(self) -> int:
        """Messages that the peer may not have: unbounded, so somebody should look."""
        return len(self._unacked)

    def send(self, body: bytes, now: Seconds) -> Data:
        """The frame of a message that must arrive."""
        self._sent += 1
        self._unacked.append(_Unacked(self._sent, body, now))
        return self._data(self._sent, body)

    def unreliable(self, body: bytes) -> Bare:
        """The frame of a message that may be lost. Held, within bounds, while not connected."""
        if not self._connected:
            self._hold(body)
        return Bare(ack=self._acknowledge(), body=body)

    def receive(self, frame: Data | Bare) -> list[tuple[int, bytes]]:
        """What is new in it, in order: (number, body), the number UNRELIABLE for a Bare's body.

        A double yields nothing and is acknowledged again. So does a message that comes before an
        earlier one: its sender repeats both.
        """
        self._take_ack(frame.ack)
        if isinstance(frame, Bare):
            return [] if frame.body is None else [(UNRELIABLE, frame.body)]
        if frame.seq != self.received + 1:
            self._ack_sent = -1
            return []
        self.received = frame.seq
        return [(frame.seq, frame.body)]

    def delivered(self, seq: int) -> None:
        """Message `seq` and all before it are safe here: acknowledgements now cover them."""
        assert seq <= self.received, f"{seq} delivered, {self.received} received"
        self._delivered = max(self._delivered, seq)

    def ack_due(self) -> Bare | None:
        """An acknowledgement that no other frame has carried yet."""
        if self._ack_sent == self._delivered:
            return None
        return Bare(ack=self._acknowledge())

    def new_peer(self) -> None:
        """The peer is a new one, which counts from 1 (an agent calls this for a higher term)."""
        self.received = self._delivered = self._ack_sent = 0

    def resume(self, peer_received: int, now: Seconds) -> list[Data | Bare]:
        """A connection stands and the peer has this much: what to send first.

        Raises WireError if the peer has more than was sent, SessionLostError if it lost something.
        """
        if peer_received < self._acked:
            raise SessionLostError(
                f"The peer has messages up to {peer_received} but had acknowledged {self._acked}: "
                "it lost what its disk had not kept, and this session must start anew."
            )
        self._take_ack(peer_received)
        self._connected = True
        frames: list[Data | Bare] = list(self._repeat(now, len(self._unacked)))
        frames += [Bare(ack=self._acknowledge(), body=body) for body in self._held]
        self._held.clear()
        self._held_bytes = 0
        return frames

    def disconnected(self) -> None:
        """The connection is gone: nothing is due until `resume`."""
        self._connected = False

    def next_deadline(self) -> Seconds | None:
        """When `due` has something to send, if nothing is acknowledged before."""
        if not self._connected or not self._unacked:
            return None
        return self._unacked[0].sent_at + RESEND_AFTER_S

    def due(self, now: Seconds) -> list[Data]:
        """What was not acknowledged in time and must be sent again."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return []
        return self._repeat(now, RESEND_MAX)

    def _repeat(self, now: Seconds, count: int) -> list[Data]:
        frames = []
        for _, entry in zip(range(count), self._unacked, strict=False):
            entry.sent_at = now
            frames.append(self._data(entry.seq, entry.body))
        return frames

    def _data(self, seq: int, body: bytes) -> Data:
        return Data(seq=seq, ack=self._acknowledge(), body=body)

    def _acknowledge(self) -> int:
        self._ack_sent = self._delivered
        return self._delivered

    def _take_ack(self, ack: int) -> None:
        if not 0 <= ack <= self._sent:
            raise WireError(
                f"The peer acknowledged message {ack}, but only {self._sent} were sent to it."
            )
        self._acked = max(self._acked, ack)
        while self._unacked and self._unacked[0].seq <= ack:
            self._unacked.popleft()

    def _hold(self, body: bytes) -> None:
        self._held.append(body)
        self._held_bytes += len(body)
        while self._held_bytes > HELD_BYTES_MAX:
            self._held_bytes -= len(self._held.popleft())
            self.dropped += 1
