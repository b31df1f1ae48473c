"""Real controllers in processes of their own, and agents that are only a socket and a link."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx2
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from everstep.actions import Order, ReleaseMachine, StartRanks, StopRanks
from everstep.controller.views import IncidentsView, StatusView
from everstep.events import (
    MachineJoined,
    MachineReleased,
    RanksStarted,
    RanksStopped,
    Report,
)
from everstep.files import FileUnreadable, read_json, write_atomically
from everstep.model import (
    NO_GENERATION,
    CheckpointSpec,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    RankStatus,
    Term,
    VersionId,
)
from everstep.paths import Endpoint, JobPaths
from everstep.wire import (
    PROTOCOL,
    UNRELIABLE,
    AnyFrame,
    Bare,
    Data,
    Hello,
    Link,
    Welcome,
    decode,
    decode_directive,
    encode,
    encode_report,
)

TOKEN = "secret"
DEADLINE_S = 90.0
"""Far above any honest wait."""
_Order = TypeVar("_Order", bound=Order)
_Found = TypeVar("_Found")


def job_spec(root: Path, *, nnodes: int = 1) -> JobSpec:
    """Of a job whose machines are played by the test."""
    return JobSpec(
        job=JobId(f"test-{uuid4().hex[:8]}"),
        uid=uuid4().hex[:8],
        command=("train.py",),
        working_dir=str(root),
        nnodes=nnodes,
        nproc_per_node=1,
        checkpoint=CheckpointSpec(directory=str(root / "checkpoints")),
    )


def make_job(root: Path, *, nnodes: int = 1) -> JobPaths:
    """A job of machines that join by themselves: the tests play their agents."""
    spec = job_spec(root, nnodes=nnodes)
    paths = JobPaths(root, spec.job)
    paths.root.mkdir(parents=True)
    write_atomically(paths.spec, spec)
    write_atomically(paths.token, TOKEN.encode())
    return paths


def wait_for(what: str, look: Callable[[], _Found | None]) -> _Found:
    """The first true thing that `look` finds; fails the test if it never finds one."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)
    return found


class Controller:
    """One controller process and how to speak to it as a person would."""

    def __init__(self, paths: JobPaths, *flags: str) -> None:
        self.paths = paths
        self._former = _term(paths)
        self.log = paths.root / "controller.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "everstep.controller", str(paths.root), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def endpoint(self) -> Endpoint:
        """Where it listens, once it does."""

        def look() -> Endpoint | None:
            assert self.process.poll() is None, self.log.read_text()
            found = _endpoint(self.paths)
            return found if found and found.term > self._former else None

        return wait_for("the controller to listen", look)

    def get(self, path: str, *, token: str = TOKEN) -> httpx2.Response:
        url = self.endpoint().url + path
        return httpx2.get(url, headers=_bearer(token), trust_env=False)

    def post(self, path: str, body: bytes | dict[str, Any], token: str = TOKEN) -> httpx2.Response:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        url = self.endpoint().url + path
        return httpx2.post(url, headers=_bearer(token), content=content, trust_env=False)

    def status(self) -> StatusView:
        return msgspec.json.decode(self.get("/v1/status").content, type=StatusView)

    def incidents(self) -> IncidentsView:
        return msgspec.json.decode(self.get("/v1/incidents").content, type=IncidentsView)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def ends_with(self) -> int:
        return self.process.wait(DEADLINE_S)


@contextmanager
def controller(paths: JobPaths, *flags: str) -> Iterator[Controller]:
    """A controller that does not outlive the test."""
    started = Controller(paths, *flags)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()


class FakeAgent:
    """Says Hello, keeps a session, takes orders. It lives through connections and controllers."""

    def __init__(self, machine: str = "a", *, protocol: int = PROTOCOL, token: str = TOKEN) -> None:
        self.machine = MachineId(machine)
        self.agent = uuid4().hex
        self.link = Link()
        self.term = Term(0)
        self.welcome: Welcome | None = None
        self.orders: list[Order] = []
        """Every order received, in order."""
        self._protocol = protocol
        self._token = token
        self._socket: ClientConnection | None = None
        self._open = ExitStack()

    @property
    def socket(self) -> ClientConnection:
        assert self._socket is not None, "not connected"
        return self._socket

    def connect(self, url: str) -> None:
        """Open a connection, be welcomed, repeat what was not acknowledged."""
        self._socket = self._open.enter_context(open_socket(url, self._token))
        hello = Hello(
            protocol=self._protocol,
            version="test",
            machine=self.machine,
            agent=self.agent,
            term=self.term,
            received=self.link.received,
        )
        self.socket.send(encode(hello))
        welcome = self.frame()
        assert isinstance(welcome, Welcome), welcome
        if welcome.term > self.term:
            self.link.new_peer()
        self.welcome, self.term = welcome, welcome.term
        for frame in self.link.resume(welcome.received, time.monotonic()):
            self.socket.send(encode(frame))

    def join(
        self,
        *,
        generation: int = NO_GENERATION,
        ranks: tuple[RankStatus, ...] = (),
        versions: tuple[VersionId, ...] | None = None,
    ) -> None:
        self.report(
            MachineJoined(
                machine=self.machine,
                agent=self.agent,
                address="127.0.0.1",
                host="here",
                version="test",
                generation=Generation(generation),
                ranks=ranks,
                versions=versions,
            )
        )

    def report(self, report: Report) -> None:
        """Say it, or keep it for the next connection."""
        frame = self.link.send(encode_report(report), time.monotonic())
        if self._socket is not None:
            self.socket.send(encode(frame))

    def mention(self, report: Report) -> None:
        """Say it unreliably."""
        self.socket.send(encode(self.link.unreliable(encode_report(report))))

    def frame(self) -> AnyFrame:
        data = self.socket.recv(DEADLINE_S)
        assert isinstance(data, bytes)
        return decode(data)

    def order(self, kind: type[_Order]) -> _Order:
        """The next new order, which must be of this kind. One seen before counts for nothing."""
        while True:
            frame = self.frame()
            assert isinstance(frame, Data | Bare)
            for seq, body in self.link.receive(frame):
                assert seq != UNRELIABLE
                self.link.delivered(seq)
                directive = decode_directive(body)
                assert directive.term == self.term
                if any(seen.id == directive.order.id for seen in self.orders):
                    continue
                self.orders.append(directive.order)
                assert isinstance(directive.order, kind), directive.order
                return directive.order

    def start(self, url: str) -> StartRanks:
        """Connect, join, and bring the ranks up; returns the order that started them."""
        self.connect(url)
        self.join()
        self.stop_ranks()
        return self.start_ranks()

    def stop_ranks(self) -> StopRanks:
        stop = self.order(StopRanks)
        stopped = RanksStopped(
            machine=self.machine, action=stop.id, generation=stop.generation, store_port=1234
        )
        self.report(stopped)
        return stop

    def start_ranks(self) -> StartRanks:
        start = self.order(StartRanks)
        started = RanksStarted(machine=self.machine, action=start.id, generation=start.generation)
        self.report(started)
        return start

    def leave(self) -> None:
        release = self.order(ReleaseMachine)
        self.report(MachineReleased(machine=self.machine, action=release.id))

    def disconnect(self) -> None:
        """Close the connection, if there is one; what is said from now on is kept."""
        self._open.close()
        self.link.disconnected()
        self._socket = None

    def acknowledged(self) -> bool:
        """Read until everything said is acknowledged."""
        while self.link.unacked:
            frame = self.frame()
            assert isinstance(frame, Data | Bare)
            self.link.receive(frame)
        return True


def open_socket(url: str, token: str = TOKEN) -> AbstractContextManager[ClientConnection]:
    return connect(
        url.replace("http", "ws", 1) + "/v1/agent",
        additional_headers=_bearer(token),
        compression=None,
        proxy=None,
    )


def last_words(socket: ClientConnection) -> str:
    """The reason of the closing frame."""
    with pytest.raises(ConnectionClosed) as closed:  # noqa: PT012 -- the frames before it
        while True:
            socket.recv(DEADLINE_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.reason


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _endpoint(paths: JobPaths) -> Endpoint | None:
    try:
        return read_json(paths.endpoint, Endpoint)
    except FileUnreadable:
        return None


def _term(paths: JobPaths) -> int:
    found = _endpoint(paths)
    return found.term if found else 0
