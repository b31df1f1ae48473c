"""An agent that is stopped, or cut off without a word, is noticed by its silence."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from everstep.controller.agents import Agents
from everstep.controller.incoming import Incoming
from everstep.controller.output import OutputRing
from everstep.controller.server import Server
from everstep.events import Folded, MachineSilent
from everstep.model import MachineId, Term
from everstep.wire import PROTOCOL, Hello, Welcome, decode, encode
from tests.controller.support import job_spec

HELLO = Hello(
    protocol=PROTOCOL,
    version="test",
    machine=MachineId("a"),
    agent="x",
    term=Term(0),
    received=0,
)


class Mute:
    """A client on a plain socket: it answers no ping, as a stopped process would not."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}/v1/agent"))

    def hello(self) -> None:
        self._protocol.send_request(self._protocol.connect())
        self._flush()
        self._receive(1)
        self._protocol.send_binary(encode(HELLO))
        self._flush()
        (welcome,) = self._receive(1)
        assert isinstance(welcome, Frame)
        assert isinstance(decode(bytes(welcome.data)), Welcome)

    def pinged(self) -> bool:
        """Take in what comes until the other side hangs up; whether there was a ping."""
        seen = False
        while data := self._socket.recv(4096):
            self._protocol.receive_data(data)
            seen |= any(
                getattr(event, "opcode", None) is Opcode.PING
                for event in self._protocol.events_received()
            )
        self._socket.close()
        return seen

    def _receive(self, count: int) -> list[object]:
        events: list[object] = []
        while len(events) < count:
            self._protocol.receive_data(self._socket.recv(4096))
            events += self._protocol.events_received()
        return events

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            self._socket.sendall(data)


async def silence() -> tuple[list[Incoming | Folded], bool]:
    """A server with short patience, a mute agent; what the loop was told, whether it was pinged."""
    told: list[Incoming | Folded] = []
    heard = asyncio.Event()

    def post(incoming: Incoming | Folded) -> None:
        told.append(incoming)
        heard.set()

    agents = Agents(
        term=Term(1),
        spec=job_spec(Path("/job")),
        post=post,
        output=OutputRing(Term(1)),
        journalled={},
    )
    app = Starlette(routes=[WebSocketRoute("/v1/agent", agents.serve)])
    server = Server(app, ping_every_s=0.05, pong_within_s=0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.run_on(listener))
    mute = Mute(listener.getsockname()[1])
    await asyncio.to_thread(mute.hello)
    hung_up = asyncio.create_task(asyncio.to_thread(mute.pinged))
    async with asyncio.timeout(30.0):
        await heard.wait()
    server.leave()
    await serving
    return told, await hung_up


def test_an_agent_that_does_not_answer_pings_is_told_to_be_silent() -> None:
    told, pinged = asyncio.run(silence())
    assert pinged
    assert told == [Incoming(MachineSilent(machine=MachineId("a"), agent="x"))]
