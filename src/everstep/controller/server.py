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
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from everstep.controller import findings
from everstep.controller.agents import PING_EVERY_S, PONG_WITHIN_S, Agents
from everstep.controller.gate import (
    ALERTMANAGER,
    FINDINGS,
    TokenGate,
    error_response,
    json_response,
)
from everstep.controller.incoming import Incoming
from everstep.controller.output import OutputRing
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
_Body = TypeVar("_Body")
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
        after = _number(request, "after")
        wait_s = min(_number(request, "wait_s"), OUTPUT_WAIT_MAX_S)
        return json_response(await self._desk.output.wait_after(int(after), wait_s))

    async def stop(self, request: Request) -> Response:
        body = await _body(request, Stop)
        return await self._accept(StopRequested(by=body.by))

    async def inject(self, request: Request) -> Response:
        event = await _body(request, FaultRequested)
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
        body = await _limited_body(request)
        try:
            answers, events = translate(body, self._desk.state, time.time())
        except EverstepError as error:
            raise HTTPException(400, str(error)) from error
        await self._journalled(events)
        return json_response(answers, 207 if answers.refused else 200)

    async def _accept(self, event: ControllerEvent) -> Response:
        await self._journalled([event])
        return json_response({"accepted": True})

    async def _journalled(self, events: Sequence[ControllerEvent]) -> None:
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
    routes = [
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


async def _limited_body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > findings.BODY_BYTES_MAX:
            raise HTTPException(413, f"a body may have {findings.BODY_BYTES_MAX} bytes: send less")
        parts.append(part)
    return b"".join(parts)


async def _body(request: Request, of: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(await request.body(), type=of)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"the request's body is not what it should be: {error}") from error


def _number(request: Request, name: str) -> float:
    text = request.query_params.get(name, "0")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise HTTPException(400, f"{name}={text} is not a number from 0 on")
    return number


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this class alone"
    return error_response(error.status_code, error.detail)
