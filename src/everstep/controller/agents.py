"""The agents' connections: takes their reports in, sends them orders, notices their silence.

One session per machine, which lives as long as the agent's process: connections come and go below
it and no message is lost or doubled (wire.Link). What an agent says goes to the loop as an event;
it is acknowledged once it is journalled. What is not ours closes that one connection, with one
sentence and a count; nothing else suffers. Decides nothing about machines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from everstep import __version__
from everstep.actions import CollectStacks, Order, SendStacks
from everstep.controller.incoming import Incoming
from everstep.controller.output import OutputRing
from everstep.events import (
    Folded,
    MachineSilent,
    OutputLines,
    Report,
)
from everstep.journal import Origin
from everstep.model import JobSpec, MachineId, Term
from everstep.sightings import MachineStacks, StacksSent
from everstep.wire import (
    PROTOCOL,
    UNRELIABLE,
    AnyFrame,
    Bare,
    Data,
    Directive,
    Hello,
    Link,
    Refused,
    Welcome,
    WireError,
    decode,
    decode_report,
    encode,
    encode_directive,
    hello_problem,
    may_be_ordered,
)

HELLO_WITHIN_S = 10.0
"""An agent says Hello at once; what is silent for so long is something else."""
PING_EVERY_S = 5.0
PONG_WITHIN_S = 5.0
"""Together the silence after which a connection counts as closed: 10 s. A stopped process and a
cut cable look like this; a killed agent closes its socket at once."""
_POLICY_VIOLATION = 1008
_REASON_BYTES_MAX = 123
"""Of a WebSocket's close frame (RFC 6455, 5.5)."""


class Counts(msgspec.Struct):
    """What was turned away since this controller started."""

    refused: int = 0
    """Agents of another protocol version."""
    garbage: int = 0
    """Connections closed because they said what they must not say."""


class _Connection:
    """One WebSocket after its Hello. Frames are written by one task, in order."""

    def __init__(self, websocket: WebSocket) -> None:
        self.websocket = websocket
        self.wake = asyncio.Event()
        self._frames: deque[AnyFrame] = deque()
        self._closing = False

    def send(self, frame: AnyFrame) -> None:
        self._frames.append(frame)
        self.wake.set()

    async def write_all(self, link: Link) -> None:
        """Write what is sent, due or to be acknowledged, until the connection ends."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(link.next_deadline()):
                    await self.wake.wait()
            self.wake.clear()
            self._frames.extend(link.due(loop.time()))
            if not self._frames and (acknowledgement := link.ack_due()):
                self._frames.append(acknowledgement)
            while self._frames and not self._closing:
                await self.websocket.send_bytes(encode(self._frames.popleft()))

    async def close(self, reason: str) -> None:
        """Another connection took its place: nothing is written any more."""
        self._closing = True
        await _close(self.websocket, reason)


class _Session:
    """One agent process towards this controller."""

    def __init__(self, machine: MachineId, agent: str, journalled: int) -> None:
        self.machine = machine
        self.agent = agent
        self.journalled = journalled
        self.protocol = PROTOCOL
        self.link = Link(received=journalled)
        self.connection: _Connection | None = None


class Agents:
    """All sessions of one term."""

    def __init__(
        self,
        *,
        term: Term,
        spec: JobSpec,
        post: Callable[[Incoming | Folded], None],
        output: OutputRing,
        journalled: dict[tuple[MachineId, str], int],
    ) -> None:
        """`journalled`: of every (machine, agent) session, the newest message in the journal."""
        self.counts = Counts()
        self._term = term
        self._spec = spec
        self._post = post
        self._output = output
        self._sessions: dict[MachineId, _Session] = {}
        self._journalled = dict(journalled)

    def notes(self) -> list[str]:
        """What was turned away, in sentences for people; empty if nothing was."""
        counts, said = self.counts, []
        if counts.refused:
            said.append(f"{counts.refused} agents of another protocol version were refused")
        if counts.garbage:
            said.append(f"{counts.garbage} connections were closed because they spoke garbage")
        return said

    def order(self, order: Order) -> None:
        """Send it if its machine is connected; if not, the core has it sent when it is again."""
        session = self._sessions.get(order.machine) if order.machine is not None else None
        if session is None or session.connection is None:
            return
        if not may_be_ordered(order, session.protocol):
            self._answer_for(session.machine, order)
            return
        body = encode_directive(Directive(term=self._term, order=order))
        session.connection.send(session.link.send(body, asyncio.get_running_loop().time()))

    def _answer_for(self, machine: MachineId, order: Order) -> None:
        """In the place of an agent that does not know the order: the core must not wait for it."""
        why = "its agent is of an older version, which cannot do it"
        if isinstance(order, CollectStacks):
            self._post(
                MachineStacks(
                    machine=machine,
                    action=order.id,
                    generation=order.generation,
                    look=order.look,
                    remark=why,
                )
            )
        elif isinstance(order, SendStacks):
            self._post(
                Incoming(StacksSent(machine=machine, action=order.id, look=order.look, stacks=()))
            )

    async def serve(self, websocket: WebSocket) -> None:
        """One connection, from its handshake to its end."""
        await websocket.accept()
        try:
            hello = await self._hello(websocket)
            if hello is not None:
                await self._serve_agent(websocket, hello)
        except WireError as garbage:
            self.counts.garbage += 1
            await _refuse(websocket, str(garbage))
        except WebSocketDisconnect:
            pass  # before its Hello, or while it was being refused

    async def _hello(self, websocket: WebSocket) -> Hello | None:
        """The agent's first frame; None if it was refused."""
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                frame = await _receive(websocket)
        except TimeoutError:
            raise WireError(f"No Hello came within {HELLO_WITHIN_S:.0f} s.") from None
        if not isinstance(frame, Hello):
            raise WireError(f"The first frame is a {type(frame).__name__}, not a Hello.")
        problem = hello_problem(frame)
        if problem is not None:
            self.counts.refused += 1
            await _refuse(websocket, problem)
            return None
        return frame

    async def _serve_agent(self, websocket: WebSocket, hello: Hello) -> None:
        former = self._sessions.get(hello.machine)
        former_connection = former.connection if former is not None else None
        session, connection = self._session(hello), _Connection(websocket)
        try:
            self._greet(session, connection, hello)
            if former_connection is not None:
                await former_connection.close("The agent has a newer connection.")
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(connection.write_all(session.link))
                await self._read(session, connection)
                writer.cancel()
        except* WebSocketDisconnect:
            pass
        except* WireError as garbage:
            raise garbage.exceptions[0] from None
        finally:
            self._disconnected(session, connection)

    def _session(self, hello: Hello) -> _Session:
        session = self._sessions.get(hello.machine)
        if session is None or session.agent != hello.agent:
            journalled = self._journalled.get((hello.machine, hello.agent), 0)
            session = _Session(hello.machine, hello.agent, journalled)
            self._sessions[hello.machine] = session
        session.protocol = hello.protocol
        return session

    def _greet(self, session: _Session, connection: _Connection, hello: Hello) -> None:
        """Welcome, then what the agent has not acknowledged of this term, then new orders."""
        welcome = Welcome(
            protocol=PROTOCOL,
            version=__version__,
            term=self._term,
            received=session.journalled,
            policy=self._spec.policy,
            code=self._spec.code.version,
        )
        received = hello.received if hello.term == self._term else 0
        now = asyncio.get_running_loop().time()
        for frame in (welcome, *session.link.resume(received, now)):
            connection.send(frame)
        session.connection = connection

    async def _read(self, session: _Session, connection: _Connection) -> None:
        while True:
            frame = await _receive(connection.websocket)
            if not isinstance(frame, Data | Bare):
                raise WireError(f"A {type(frame).__name__} came in the middle of a session.")
            for number, body in session.link.receive(frame):
                self._take(session, number, decode_report(body))
            connection.wake.set()

    def _take(self, session: _Session, number: int, report: Report) -> None:
        if report.machine != session.machine:
            raise WireError(f"Machine {session.machine} spoke for machine {report.machine}.")
        delivered = partial(self._delivered, session, number)
        if isinstance(report, OutputLines | Folded):
            self._take_unjournalled(report)
            delivered()
        elif number == UNRELIABLE:
            raise WireError(f"A {type(report).__name__} came without a number.")
        else:
            origin = Origin(machine=session.machine, agent=session.agent, seq=number)
            self._post(Incoming(report, then=delivered, origin=origin))

    def _take_unjournalled(self, report: OutputLines | Folded) -> None:
        if isinstance(report, OutputLines):
            self._output.add(report)
        else:
            self._post(report)

    def _delivered(self, session: _Session, number: int) -> None:
        if number == UNRELIABLE:
            return
        session.journalled = number
        session.link.delivered(number)
        if session.connection is not None:
            session.connection.wake.set()

    def _disconnected(self, session: _Session, connection: _Connection) -> None:
        if session.connection is not connection:
            return  # a newer one took its place
        session.connection = None
        session.link.disconnected()
        if self._sessions.get(session.machine) is session:
            silent = MachineSilent(machine=session.machine, agent=session.agent)
            self._post(Incoming(silent))


async def _receive(websocket: WebSocket) -> AnyFrame:
    """The next frame. WireError on garbage, WebSocketDisconnect at the end."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    data = message.get("bytes")
    if data is None:
        raise WireError("A text message came; frames are binary.")
    return decode(data)


async def _refuse(websocket: WebSocket, reason: str) -> None:
    """Say why in a frame (whole) and in the closing (short), then close."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await websocket.send_bytes(encode(Refused(reason=reason)))
    await _close(websocket, reason)


async def _close(websocket: WebSocket, reason: str) -> None:
    short = reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore")
    if websocket.application_state is not WebSocketState.DISCONNECTED:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await websocket.close(_POLICY_VIOLATION, short)
