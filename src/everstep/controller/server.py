"""The controller's one server: HTTP for people's commands and pages, a WebSocket for each agent.

Everything needs a token (gate.py). It answers from views.py and the journal's index, and turns what
people ask for into events; it decides nothing. Every error is {"error": one sentence}.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from everstep.code.store import CodeStore
from everstep.controller import findings
from everstep.controller.agents import PING_EVERY_S, PONG_WITHIN_S, Agents
from everstep.controller.bodies import decoded, limited_body, number
from everstep.controller.code import CodeApi, CodeDesk
from everstep.controller.gate import (
    ALERTMANAGER,
    FINDINGS,
    TokenGate,
    error_response,
    json_response,
)
from everstep.controller.incoming import Incoming
from everstep.controller.look_views import StacksView
from everstep.controller.looks import LooksApi, LooksDesk
from everstep.controller.output import OutputRing
from everstep.controller.version_views import VersionsView
from everstep.controller.views import IncidentsView, StatusView
from everstep.core.faults import objection
from everstep.core.state import State
from everstep.events import ControllerEvent, FaultRequested, StopRequested
from everstep.journal import StoryLine
from everstep.model import EverstepError, Value
from everstep.wire import FRAME_BYTES_MAX

ACCEPT_WITHIN_S = 10.0
"""Time for a request of a person to get into the journal."""
OUTPUT_WAIT_MAX_S = 30.0
"""Longest time that a viewer may wait for a line of output in one request."""
Translate = Callable[[bytes, State, float], findings.Translated]


class Story(Value, frozen=True, kw_only=True):
    """Answer to /v1/why/ID."""

    id: str
    story: list[StoryLine]
    """Cause before effect."""


class Stop(Value, frozen=True, kw_only=True):
    """Body of POST /v1/stop."""

    by: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Desk(NamedTuple):
    """What the server asks the rest of the controller for."""

    state: State
    status: Callable[[], StatusView]
    incidents: Callable[[], IncidentsView]
    why: Callable[[str], Awaitable[list[StoryLine]]]
    """EverstepError if there is no such id."""
    post: Callable[[Incoming], None]
    output: OutputRing
    agents: Agents
    versions: Callable[[], VersionsView]
    store: CodeStore
    stacks: Callable[[int], StacksView]
    """Looks later than this number."""


class Api:
    """The endpoints."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def status(self, _: Request) -> Response:
        return json_response(self._desk.status())

    async def incidents(self, _: Request) -> Response:
        return json_response(self._desk.incidents())

    async def why(self, request: Request) -> Response:
        subject = request.path_params["id"]
        try:
            return json_response(Story(id=subject, story=await self._desk.why(subject)))
        except EverstepError as error:
            raise HTTPException(404, str(error)) from error

    async def output(self, request: Request) -> Response:
        after = number(request, "after")
        wait_s = min(number(request, "wait_s"), OUTPUT_WAIT_MAX_S)
        return json_response(await self._desk.output.wait_after(int(after), wait_s))

    async def stop(self, request: Request) -> Response:
        body = decoded(await request.body(), Stop)
        return await self._accept(StopRequested(by=body.by))

    async def inject(self, request: Request) -> Response:
        event = decoded(await request.body(), FaultRequested)
        problem = objection(self._desk.state, event)
        if problem is not None:
            raise HTTPException(409, problem)
        return await self._accept(event)

    async def findings(self, request: Request) -> Response:
        return await self._monitors_say(request, findings.from_plain)

    async def webhook(self, request: Request) -> Response:
        return await self._monitors_say(request, findings.from_webhook)

    async def _monitors_say(self, request: Request, translate: Translate) -> Response:
        """Take what can be taken; 207 if that is not all, which senders take for success."""
        body = await limited_body(request, findings.BODY_BYTES_MAX)
        try:
            answers, events = translate(body, self._desk.state, time.time())
        except EverstepError as error:
            raise HTTPException(400, str(error)) from error
        await self.journalled(events)
        return json_response(answers, 207 if answers.refused else 200)

    async def _accept(self, event: ControllerEvent) -> Response:
        await self.journalled([event])
        return json_response({"accepted": True})

    async def journalled(self, events: Sequence[ControllerEvent]) -> None:
        """Post them and wait for the journal: what was accepted is not forgotten."""
        finish = self._desk.state.finish
        if finish is not None:
            raise HTTPException(409, f"the job is over ({finish.outcome}): {finish.why}")
        if not events:
            return
        *before, last = events
        for event in before:
            self._desk.post(Incoming(event))
        journalled = asyncio.Event()  # they are taken in order, so the last one stands for all
        self._desk.post(Incoming(last, then=journalled.set))
        try:
            await asyncio.wait_for(journalled.wait(), ACCEPT_WITHIN_S)
        except TimeoutError:
            raise HTTPException(
                503, "the controller is ending or its disk is slow: ask again in a moment"
            ) from None


def make_app(desk: Desk, token: str) -> ASGIApp:
    """The whole application, with its gate."""
    api = Api(desk)
    code = CodeApi(
        CodeDesk(
            state=desk.state,
            store=desk.store,
            versions=desk.versions,
            journalled=api.journalled,
        )
    )
    looks = LooksApi(LooksDesk(state=desk.state, view=desk.stacks, journalled=api.journalled))
    routes = [
        *code.routes(),
        *looks.routes(),
        Route("/v1/status", api.status),
        Route("/v1/incidents", api.incidents),
        Route("/v1/why/{id}", api.why),
        Route("/v1/output", api.output),
        Route("/v1/stop", api.stop, methods=["POST"]),
        Route("/v1/inject", api.inject, methods=["POST"]),
        Route(FINDINGS, api.findings, methods=["POST"]),
        Route(ALERTMANAGER, api.webhook, methods=["POST"]),
        WebSocketRoute("/v1/agent", desk.agents.serve),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _on_http_exception})
    return TokenGate(app, token)


class Server(uvicorn.Server):
    """uvicorn on sockets of ours, without its signal handlers: the controller has its own."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        ping_every_s: float = PING_EVERY_S,
        pong_within_s: float = PONG_WITHIN_S,
    ) -> None:
        """An agent that does not answer a ping in time counts as disconnected."""
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="websockets-sansio",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws_max_size=FRAME_BYTES_MAX,
                ws_per_message_deflate=False,
                ws_ping_interval=ping_every_s,
                ws_ping_timeout=pong_within_s,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_on(self, listener: socket.socket) -> None:
        """Serve until `leave`."""
        await self.serve(sockets=[listener])

    def leave(self) -> None:
        """End: open requests get a second, agents' connections are closed."""
        self.should_exit = True


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this class alone"
    return error_response(error.status_code, error.detail)
