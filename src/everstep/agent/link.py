"""The agent's connection to the controller: comes back by itself, loses no report, doubles none.

One task that connects, speaks wire.py's protocol and connects again, for as long as the agent
lives. It decides nothing: what the controller orders and whether it is there is posted to the
shell. Reports given to `send` while there is no controller are kept until there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from everstep import __version__, wire
from everstep.agent.log import say
from everstep.agent.this_machine import ThisMachine
from everstep.core.agent_io import ControllerConnected, ControllerDisconnected, OrderReceived
from everstep.events import UNJOURNALLED, Report
from everstep.files import FileUnreadable
from everstep.model import EverstepError, Seconds, Term
from everstep.wire import Bare, Data, Hello, Refused, Welcome, WireError

RETRY_FIRST_S: Seconds = 0.05
RETRY_MAX_S: Seconds = 1.0
"""A controller that comes back is found within this; ten thousand agents are 10,000 tries a second
to an address where nobody listens, which costs nobody anything."""
RETRY_GROWTH = 1.6
OPEN_WITHIN_S: Seconds = 3.0
PING_EVERY_S: Seconds = 5.0
"""With as much patience for the answer: a stopped controller counts as gone after 10 s."""
_STATUS_FORBIDDEN = (401, 403)


class NotWelcome(EverstepError):
    """The controller does not take this agent, or is not one to listen to."""


class Shell(Protocol):
    """What the link asks of the agent's shell."""

    def connected(self, event: ControllerConnected, welcome: Welcome) -> None:
        """A controller is there; the first report to it must be MachineJoined."""

    def disconnected(self, event: ControllerDisconnected) -> None: ...
    def ordered(self, event: OrderReceived) -> None: ...
    def acknowledged(self) -> None:
        """The controller has journalled every report that must arrive."""


class ControllerLink:
    """The session of one agent process."""

    def __init__(self, here: ThisMachine, agent: str, term: Term, shell: Shell) -> None:
        """`term`: the highest one that this machine has heard of."""
        self._here = here
        self._agent = agent
        self._shell = shell
        self._term = term
        self._protocol = wire.PROTOCOL
        """Of the controller."""
        self._link = wire.Link()
        self._frames: deque[wire.AnyFrame] = deque()
        self._wake = asyncio.Event()
        self._acknowledged = asyncio.Event()
        self._acknowledged.set()
        self._connected = False
        self._written = True
        self._said = ""

    @property
    def connected(self) -> bool:
        """Whether a controller takes what is sent now."""
        return self._connected

    @property
    def all_acknowledged(self) -> bool:
        """Whether the controller has journalled every report that must arrive."""
        return self._link.unacked == 0

    @property
    def all_written(self) -> bool:
        """Whether everything sent so far is in the kernel's hands: it outlives this process."""
        return self._written

    def send(self, report: Report) -> None:
        """Say this now or when there is a controller again; progress and output may be lost."""
        body = wire.encode_report(report)
        frame: wire.AnyFrame
        if isinstance(report, UNJOURNALLED):
            frame = self._link.unreliable(body)
        else:
            frame = self._link.send(body, time.monotonic())
            self._acknowledged.clear()
        if self._connected:
            self._written = False
            self._frames.append(frame)
            self._wake.set()

    async def wait_acknowledged(self, within_s: Seconds) -> bool:
        """Whether everything sent so far is journalled by the controller within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._acknowledged.wait()
        return self.all_acknowledged

    async def run(self) -> None:
        """Connect again and again. Raises SessionLostError, which only a new agent cures."""
        pause_s = RETRY_FIRST_S
        while True:
            began = time.monotonic()
            try:
                await self._one_connection()
            except wire.SessionLostError:
                raise
            except InvalidStatus as refusal:
                self._say_once(self._explain(refusal))
                pause_s = RETRY_MAX_S
            except NotWelcome as refusal:
                self._say_once(str(refusal))
                pause_s = RETRY_MAX_S
            except WireError as garbage:
                self._say_once(f"the controller spoke garbage: {garbage}")
            except (OSError, TimeoutError, WebSocketException, FileUnreadable) as error:
                self._say_once(f"no controller: {error or type(error).__name__}")
            if time.monotonic() - began > RETRY_MAX_S:
                pause_s = RETRY_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * RETRY_GROWTH, RETRY_MAX_S)

    async def _one_connection(self) -> None:
        """Returns or raises when the connection has ended."""
        async with connect(
            f"{self._here.controller_url().replace('http', 'ws', 1)}/v1/agent",
            additional_headers={
                "Authorization": f"Bearer {self._here.job.token.read_text().strip()}"
            },
            compression=None,
            max_size=wire.FRAME_BYTES_MAX,
            open_timeout=OPEN_WITHIN_S,
            ping_interval=PING_EVERY_S,
            ping_timeout=PING_EVERY_S,
            close_timeout=1,
            proxy=None,
        ) as socket:
            welcome = await self._greet(socket)
            self._begin(welcome)
            try:
                async with asyncio.TaskGroup() as tasks:
                    writer = tasks.create_task(self._write(socket))
                    await self._read(socket)
                    writer.cancel()
            except* (WireError, WebSocketException) as problems:
                raise problems.exceptions[0] from None
            finally:
                self._end()

    async def _greet(self, socket: ClientConnection) -> Welcome:
        """Say hello; the controller's welcome if it is one to listen to, else NotWelcome."""
        hello = Hello(
            protocol=wire.PROTOCOL,
            version=__version__,
            machine=self._here.setup.machine,
            agent=self._agent,
            term=self._term,
            received=self._link.received,
        )
        await socket.send(wire.encode(hello))
        async with asyncio.timeout(OPEN_WITHIN_S):
            answer = _decode(await socket.recv())
        if isinstance(answer, Refused):
            raise NotWelcome(f"the controller refuses this agent: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise WireError(f"A {type(answer).__name__} came instead of a Welcome.")
        problem = wire.welcome_problem(answer, self._term)
        if problem is not None:
            raise NotWelcome(problem)
        return answer

    def _begin(self, welcome: Welcome) -> None:
        if welcome.term > self._term:
            self._term = welcome.term
            self._link.new_peer()
        self._protocol = welcome.protocol
        self._frames.clear()
        self._frames.extend(self._link.resume(welcome.received, time.monotonic()))
        self._connected = True
        if self.all_acknowledged:
            self._acknowledged.set()
        self._say_once(f"connected to the controller of term {welcome.term}")
        self._shell.connected(ControllerConnected(term=welcome.term), welcome)
        self._wake.set()

    def _end(self) -> None:
        self._connected = False
        self._link.disconnected()
        self._shell.disconnected(ControllerDisconnected())

    async def _read(self, socket: ClientConnection) -> None:
        async for message in socket:
            frame = _decode(message)
            if not isinstance(frame, Data | Bare):
                raise WireError(f"A {type(frame).__name__} came in the middle of a session.")
            for number, body in self._link.receive(frame):
                directive = wire.decode_directive(body)
                if number != wire.UNRELIABLE:
                    self._link.delivered(number)
                self._shell.ordered(OrderReceived(term=directive.term, order=directive.order))
            if self.all_acknowledged and not self._acknowledged.is_set():
                self._acknowledged.set()
                self._shell.acknowledged()
            self._wake.set()

    async def _write(self, socket: ClientConnection) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._loop_time(self._link.next_deadline())):
                    await self._wake.wait()
            self._wake.clear()
            self._frames.extend(self._link.due(time.monotonic()))
            while self._frames:
                frame = wire.understood(self._frames.popleft(), self._protocol)
                await socket.send(wire.encode(frame))
            self._written = True
            acknowledgement = self._link.ack_due()
            if acknowledgement is not None:
                await socket.send(wire.encode(acknowledgement))

    def _loop_time(self, deadline: Seconds | None) -> float | None:
        """asyncio's clock is the monotonic one on every system we run on, but does not promise."""
        if deadline is None:
            return None
        return asyncio.get_running_loop().time() + deadline - time.monotonic()

    def _explain(self, refusal: InvalidStatus) -> str:
        status = refusal.response.status_code
        if status in _STATUS_FORBIDDEN:
            return (
                f"the controller refuses the token of {self._here.job.token}: this job directory"
                " is not the one that the controller runs from, copy its token"
            )
        return f"what answers for the controller is not one: HTTP status {status}"

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            say(text)


def _decode(message: str | bytes) -> wire.AnyFrame:
    if isinstance(message, str):
        raise WireError("A text message came; frames are binary.")
    return wire.decode(message)
