"""An agent of the version before gets no order that it would take for garbage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient

from everstep.actions import CollectStacks, ReleaseMachine
from everstep.controller.agents import Agents
from everstep.controller.incoming import Incoming
from everstep.controller.output import OutputRing
from everstep.events import Folded
from everstep.model import Generation, MachineId, Term
from everstep.sightings import MachineStacks
from everstep.wire import PROTOCOL, Data, Hello, Welcome, decode, decode_directive, encode
from tests.controller.support import job_spec

M0 = MachineId("m0")
LOOK = CollectStacks(
    id="1.0", cause="1", why="no step", machine=M0, generation=Generation(1), look=1, within_s=3.0
)
RELEASE = ReleaseMachine(id="2.0", cause="1", why="over", machine=M0)


@pytest.mark.parametrize(("protocol", "answered"), [(PROTOCOL, False), (PROTOCOL - 1, True)])
def test_a_look_is_answered_for_an_agent_that_does_not_know_it(
    protocol: int, *, answered: bool
) -> None:
    told: list[Incoming | Folded] = []
    agents = Agents(
        term=Term(1),
        spec=job_spec(Path("/job")),
        post=told.append,
        output=OutputRing(Term(1)),
        journalled={},
    )

    async def give(*orders: CollectStacks | ReleaseMachine) -> None:
        for order in orders:
            agents.order(order)

    client = TestClient(Starlette(routes=[WebSocketRoute("/", agents.serve)]))
    hello = Hello(protocol=protocol, version="t", machine=M0, agent="x", term=Term(0), received=0)
    with client, client.websocket_connect("/") as socket:
        socket.send_bytes(encode(hello))
        assert isinstance(decode(socket.receive_bytes()), Welcome)
        assert client.portal is not None
        client.portal.call(give, LOOK, RELEASE)
        frame = decode(socket.receive_bytes())
        assert isinstance(frame, Data)
        first = decode_directive(frame.body).order
    unknown = MachineStacks(
        machine=M0,
        action="1.0",
        generation=Generation(1),
        look=1,
        remark="its agent is of an older version, which cannot do it",
    )
    assert first == (RELEASE if answered else LOOK)
    assert told[:-1] == ([unknown] if answered else [])


def test_without_a_connection_nothing_is_answered() -> None:
    """The core gives the order again when the agent is back."""
    told: list[Incoming | Folded] = []
    agents = Agents(
        term=Term(1),
        spec=job_spec(Path("/job")),
        post=told.append,
        output=OutputRing(Term(1)),
        journalled={},
    )

    async def give() -> None:
        agents.order(LOOK)

    asyncio.run(give())
    assert told == []
