"""A controller of a few lines for tests of the agent: the real wire, real sockets, no decisions."""

from __future__ import annotations

import asyncio
import http
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from everstep import wire
from everstep.actions import HoldVersion, Order, StartRanks, StopRanks, TryVersion
from everstep.code.store import CodeStore
from everstep.events import (
    RanksStarted,
    RanksStopped,
    Report,
    VersionHeld,
    VersionNotHeld,
    VersionTried,
)
from everstep.files import write_atomically
from everstep.model import (
    NO_VERSION,
    Generation,
    MachineId,
    NodeRank,
    PolicySpec,
    Step,
    Term,
    VersionId,
)
from everstep.paths import Endpoint, JobPaths
from everstep.wire import Bare, Data, Directive, Hello, Link, Welcome
from tests.agent.support import wait_for

_Report = TypeVar("_Report", bound=Any)
MACHINE = MachineId("m0")
TOKEN = "secret"


class FakeController:
    """One term of a controller, in a thread of its own."""

    def __init__(
        self,
        job: JobPaths,
        term: int = 1,
        before: FakeController | None = None,
        protocol: int = wire.PROTOCOL,
    ) -> None:
        """`before`: the controller whose journal this one goes on with."""
        self.protocol = protocol
        self.term = Term(term)
        self.policy: PolicySpec = PolicySpec() if before is None else before.policy
        self.journalled: dict[str, int] = {} if before is None else before.journalled
        """Newest message of every agent."""
        self.reports: list[Report] = []
        self.hellos: list[Hello] = []
        self.token = TOKEN
        self.acknowledges = True
        self.submitted = NO_VERSION
        """What the job began with; an older controller does not say it."""
        self.code: CodeStore | None = None
        """Where code versions are given from."""
        self.asked_for: list[VersionId] = []
        self._job = job
        self._links: dict[str, Link] = {}
        self._sockets: dict[str, ServerConnection] = {}
        self._ids = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._start())

    # --- for tests ---

    def order(self, order: Order) -> None:
        """Send to the agent that is connected, waiting for one."""
        body = wire.encode_directive(Directive(term=self.term, order=order))
        wait_for("an agent", lambda: self._sockets)
        self._call(self._send(body))

    def get(
        self, kind: type[_Report], which: Callable[[_Report], bool] = lambda _: True
    ) -> _Report:
        """Waits for the first report of this kind (and condition)."""

        def look() -> _Report | None:
            found = self.all(kind)
            return next((report for report in found if which(report)), None)

        return wait_for(f"a {kind.__name__}", look)

    def all(self, kind: type[_Report]) -> list[_Report]:
        return [report for report in list(self.reports) if isinstance(report, kind)]

    def stop_ranks(self, generation: int, grace_s: float = 0.0) -> RanksStopped:
        """Order and wait."""
        order = self.stop_order(generation, grace_s=grace_s)
        self.order(order)
        return self.get(RanksStopped, lambda report: report.action == order.id)

    def stop_order(self, generation: int, **fields: Any) -> StopRanks:
        return StopRanks(
            id=f"{self.term}.{next(self._ids)}",
            cause="test",
            why="a test",
            machine=MACHINE,
            generation=Generation(generation),
            **fields,
        )

    def hold(self, version: VersionId, **fields: Any) -> VersionHeld | VersionNotHeld:
        """Order and wait."""
        order = HoldVersion(
            id=f"{self.term}.{next(self._ids)}",
            cause="test",
            why="a test",
            machine=MACHINE,
            version=version,
            **{"within_s": 60.0, **fields},
        )
        self.order(order)
        answer: VersionHeld | VersionNotHeld = self.answer_to(order, VersionHeld, VersionNotHeld)
        return answer

    def try_version(self, version: VersionId, **fields: Any) -> VersionTried:
        """Order and wait."""
        order = self.try_order(version, **fields)
        self.order(order)
        return self.get(VersionTried, lambda report: report.action == order.id)

    def try_order(self, version: VersionId, **fields: Any) -> TryVersion:
        return TryVersion(
            id=f"{self.term}.{next(self._ids)}",
            cause="test",
            why="a test",
            machine=MACHINE,
            version=version,
            **{"within_s": 60.0, **fields},
        )

    def answer_to(self, order: Order, *kinds: type[_Report]) -> Any:
        """Waits for a report of one of these kinds that answers this order."""

        def look() -> _Report | None:
            found = [each for kind in kinds for each in self.all(kind)]
            return next((report for report in found if report.action == order.id), None)

        return wait_for(f"an answer to {order.id}", look)

    def start_order(self, generation: int, port: int, **fields: Any) -> StartRanks:
        whole = {"restore": Step(-1), "restore_generation": Generation(0), "restarts": 0, **fields}
        return StartRanks(
            id=f"{self.term}.{next(self._ids)}",
            cause="test",
            why="a test",
            machine=MACHINE,
            generation=Generation(generation),
            node_rank=NodeRank(0),
            master_addr="127.0.0.1",
            master_port=port,
            **whole,
        )

    def start_ranks(self, generation: int, port: int | None = None, **fields: Any) -> RanksStarted:
        """Order stop and start of this generation and wait."""
        port = port or self.stop_ranks(generation).store_port
        order = self.start_order(generation, port, **fields)
        self.order(order)
        return self.get(RanksStarted, lambda report: report.action == order.id)

    def stop(self) -> None:
        """Close the socket and every connection, as a killed controller does."""
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- in the thread ---

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._job.token.write_text(TOKEN)
        self._server = await serve(
            self._serve, "127.0.0.1", 0, process_request=self._check, compression=None
        )
        port = next(iter(self._server.sockets)).getsockname()[1]
        endpoint = Endpoint(url=f"http://127.0.0.1:{port}", term=self.term, pid=0)
        write_atomically(self._job.endpoint, endpoint)

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close(close_connections=True)
        await self._server.wait_closed()

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong token\n")
        if request.path.startswith("/v1/code/"):
            return self._give_code(connection, VersionId(request.path.removeprefix("/v1/code/")))
        assert request.path == "/v1/agent"
        return None

    def _give_code(self, connection: ServerConnection, version: VersionId) -> Response:
        self.asked_for.append(version)
        if self.code is None or not self.code.has(version):
            return connection.respond(http.HTTPStatus.NOT_FOUND, "there is no such version\n")
        response = connection.respond(http.HTTPStatus.OK, "")
        body = b"".join(self.code.chunks(version))
        del response.headers["Content-Length"], response.headers["Content-Type"]
        response.headers["Content-Length"] = str(len(body))
        return replace(response, body=body)

    async def _serve(self, socket: ServerConnection) -> None:
        hello = wire.decode(await socket.recv(decode=False))
        assert isinstance(hello, Hello)
        journalled = self.journalled.get(hello.agent, 0)
        link = self._links.setdefault(hello.agent, Link(received=journalled))
        welcome = Welcome(
            protocol=self.protocol,
            version="test",
            term=self.term,
            received=link.received,
            policy=self.policy,
            code=self.submitted,
        )
        await socket.send(wire.encode(welcome))
        received = hello.received if hello.term == self.term else 0
        for frame in link.resume(received, time.monotonic()):
            await socket.send(wire.encode(frame))
        self._sockets[hello.agent] = socket
        self.hellos.append(hello)
        try:
            async for message in socket:
                assert isinstance(message, bytes)
                said = wire.decode(message)
                assert isinstance(said, Data | Bare)
                for number, body in link.receive(said):
                    self.reports.append(wire.decode_report(body))
                    if number != wire.UNRELIABLE and self.acknowledges:
                        link.delivered(number)
                        self.journalled[hello.agent] = number
                acknowledgement = link.ack_due()
                if acknowledgement is not None:
                    await socket.send(wire.encode(acknowledgement))
        except ConnectionClosed:
            pass
        finally:
            link.disconnected()
            del self._sockets[hello.agent]

    async def _send(self, body: bytes) -> None:
        for agent, socket in self._sockets.items():
            frame = self._links[agent].send(body, time.monotonic())
            await socket.send(wire.encode(frame))
