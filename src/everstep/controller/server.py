"""The controller's one server: HTTP for people's commands and pages, a WebSocket for each agent.

Everything needs the job's token. It answers from views.py and the journal's index, and turns what
people ask for into events; it decides nothing. Every error is {"error": one sentence}.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from everstep.controller.agents import PING_EVERY_S, PONG_WITHIN_S, Agents
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
        return _json(self._desk.status())

    async def incidents(self, _: Request) -> Response:
        return _json(self._desk.incidents())

    async def why(self, request: Request) -> Response:
        subject = request.path_params["id"]
        try:
            return _json(Story(id=subject, story=await self._desk.why(subject)))
        except EverstepError as error:
            raise HTTPException(404, str(error)) from error

    async def output(self, request: Request) -> Response:
        after = _number(request, "after")
        wait_s = min(_number(request, "wait_s"), OUTPUT_WAIT_MAX_S)
        return _json(await self._desk.output.wait_after(int(after), wait_s))

    async def stop(self, request: Request) -> Response:
        body = await _body(request, Stop)
        return await self._accept(StopRequested(by=body.by))

    async def inject(self, request: Request) -> Response:
        event = await _body(request, FaultRequested)
        problem = objection(self._desk.state, event)
        if problem is not None:
            raise HTTPException(409, problem)
        return await self._accept(event)

    async def _accept(self, event: ControllerEvent) -> Response:
        """Answer once the request is in the journal: what was accepted is not forgotten."""
        finish = self._desk.state.finish
        if finish is not None:
            raise HTTPException(409, f"the job is over ({finish.outcome}): {finish.why}")
        journalled = asyncio.Event()
        self._desk.post(Incoming(event, then=journalled.set))
        try:
            await asyncio.wait_for(journalled.wait(), ACCEPT_WITHIN_S)
        except TimeoutError:
            raise HTTPException(
                503, "the controller is ending or its disk is slow: ask again in a moment"
            ) from None
        return _json({"accepted": True})


class TokenGate:
    """Lets in who knows the token; everything else, whatever its path, is told to get it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        refusal = _error(401, "wrong or missing token: it is in the file `token` of the job")
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(refusal)
        else:
            await refusal(scope, receive, send)


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
    return _error(error.status_code, error.detail)


def _error(code: int, sentence: str) -> Response:
    return _json({"error": sentence}, code)


def _json(content: Any, code: int = 200) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status_code=code, media_type="application/json")
