"""A controller that says what a test tells it to, over a real socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from everstep.actions import Outcome
from everstep.controller.output import OutputLine, OutputPage
from everstep.controller.views import (
    IncidentsView,
    IncidentView,
    LayoutView,
    MachineView,
    OutcomeView,
    StatusView,
)
from everstep.core.ettr import Owner
from everstep.core.mechanisms import Mechanism
from everstep.core.state import Phase
from everstep.files import write_atomically
from everstep.model import (
    CheckpointSpec,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    NodeRank,
    Rank,
    Step,
    Term,
)
from everstep.paths import Endpoint, JobPaths, JobResult

TOKEN = "s3cret"
SPENT = dict.fromkeys(Owner, 0.0)


def job_in(directory: Path, name: str = "j") -> JobPaths:
    """The directory of a job that was just submitted."""
    paths = JobPaths(directory, JobId(name))
    paths.root.mkdir(parents=True)
    spec = JobSpec(
        job=JobId(name),
        uid="0123abcd",
        command=("t.py",),
        working_dir="/",
        nnodes=2,
        nproc_per_node=2,
        local=True,
        checkpoint=CheckpointSpec(directory=str(paths.root / "checkpoints")),
    )
    write_atomically(paths.spec, spec)
    write_atomically(paths.token, TOKEN.encode())
    return paths


def status_view(**changed: Any) -> StatusView:
    told: dict[str, Any] = {
        "job": JobId("j"),
        "term": Term(1),
        "phase": Phase.RUNNING,
        "generation": Generation(1),
        "nnodes": 2,
        "nproc_per_node": 2,
        "standbys": 0,
        "standbys_wanted": 0,
        "world_size": 4,
        "finished_by_all": Step(7),
        "furthest": Step(7),
        "restored": Step(-1),
        "step_s": 0.1,
        "loss": 2.5,
        "published": (),
        "machines": (),
        "incident": None,
        "incidents": 0,
        "ettr": 0.9,
        "ettr_hour": 0.9,
        "seconds": SPENT,
        "layout": LayoutView(text="", source="", remarks=("no groups",), disagreement=""),
        "mechanisms": (Mechanism(name="backup placement", on=False, why="no layout"),),
        "outcome": None,
        "notes": (),
    }
    return StatusView(**(told | changed))


def machine_view(name: str, position: int | None, ranks: tuple[int, ...]) -> MachineView:
    return MachineView(
        machine=MachineId(name),
        host="h",
        address="a",
        node_rank=None if position is None else NodeRank(position),
        ranks=tuple(map(Rank, ranks)),
        condition="standby" if position is None else "member",
        why="",
    )


def ended_view(exit_code: int = 0, detail: str = "") -> StatusView:
    outcome = Outcome.FINISHED if exit_code == 0 else Outcome.FAILED
    return status_view(
        phase=Phase.ENDED,
        outcome=OutcomeView(outcome=outcome, exit_code=exit_code, why="so it was", detail=detail),
    )


def incident_view(**changed: Any) -> IncidentView:
    told: dict[str, Any] = {
        "incident": "i1",
        "symptom": "rank 3 died of signal 9",
        "opened_at": 1.0,
        "opened_by": "4.0",
        "closed_at": None,
        "outcome": "",
        "generation": Generation(1),
        "furthest": Step(7),
        "restored": None,
        "recoveries": 1,
        "evicted": (),
        "failures": (),
        "seconds": SPENT | {Owner.DETECTING: 0.25, Owner.RESTARTING: 1.5},
    }
    return IncidentView(**(told | changed))


class Refusal(Exception):
    """What a controller declines, and how."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class FakeController:
    """Answers with its attributes; `on_status` may change them before each status is sent."""

    def __init__(self, paths: JobPaths) -> None:
        self.paths = paths
        self.status = status_view()
        self.incidents: tuple[IncidentView, ...] = ()
        self.lines: list[OutputLine] = []
        self.posted: list[tuple[str, Any]] = []
        self.on_status: Callable[[int], None] = lambda _: None
        self.on_post: Callable[[str], None] = lambda _: None
        self.statuses = 0
        self.token = TOKEN
        self._server: ThreadingHTTPServer | None = None

    def output(self, rank: int, text: str) -> None:
        self.lines.append(OutputLine(rank=Rank(rank), generation=Generation(1), text=text))

    def end(self, exit_code: int = 0, why: str = "so it was", detail: str = "") -> None:
        """Write result.json, as a controller does last."""
        outcome = "finished" if exit_code == 0 else "failed"
        result = JobResult(outcome=outcome, exit_code=exit_code, why=why, detail=detail)
        write_atomically(self.paths.result, result)

    def come(self, term: int = 1) -> None:
        """Listen on a fresh port and say where."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        write_atomically(self.paths.endpoint, Endpoint(url=self.url, term=term, pid=1))

    def later(self, *steps: Callable[[], object]) -> None:
        """Do these in a thread, with time for the viewer to notice each before the next."""

        def act() -> None:
            for step in steps:
                step()
                threading.Event().wait(0.6)

        threading.Thread(target=act, daemon=True).start()

    def go(self) -> None:
        """Stop to listen. From a handler only by `later`."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reply(self, path: str, body: Any) -> Any:
        """To a POST."""
        self.posted.append((path, body))
        self.on_post(path)
        return {"accepted": True}

    def take(self, path: str, body: bytes) -> Any:
        """A PUT."""
        raise Refusal(404, f"{path}: {len(body)} bytes that nobody wants")

    def answer(self, path: str, query: dict[str, str]) -> Any:
        if path == "/v1/status":
            self.statuses += 1
            self.on_status(self.statuses)
            return self.status
        if path == "/v1/incidents":
            return IncidentsView(
                job=JobId("j"), incidents=self.incidents, seconds=SPENT, ettr=self.status.ettr
            )
        assert path == "/v1/output"
        after = int(query["after"])
        return OutputPage(next=len(self.lines), lines=self.lines[after:])


def _handler(controller: FakeController) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # HTTP/1.0: no connection outlives its answer, so `go` is felt at once.
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            words = dict(pair.split("=") for pair in query.split("&") if pair)
            self._reply(lambda: controller.answer(path, words))

        def do_POST(self) -> None:
            body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(lambda: controller.reply(self.path, body))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(lambda: controller.take(self.path, body))

        def _reply(self, answer: Callable[[], Any]) -> None:
            code = 200
            try:
                known = self.headers["Authorization"] == f"Bearer {controller.token}"
                content = answer() if known else {"error": "wrong token"}
                code = 200 if known else 401
            except Refusal as refusal:
                content, code = {"error": str(refusal)}, refusal.code
            raw = msgspec.json.encode(content)
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    return Handler


@contextmanager
def listening(paths: JobPaths) -> Iterator[FakeController]:
    controller = FakeController(paths)
    controller.come()
    try:
        yield controller
    finally:
        controller.go()
