"""The controller's endpoints for looks at stacks: see the newest one, ask for another.

    GET  /v1/stacks             the newest look that is judged, and the one that goes on
    GET  /v1/stacks?after=N     the same, of looks later than number N
    POST /v1/stacks             ask for one: {"by": WHO}; the answer says what to ask `after`

A part of server.py. Nothing is stopped for a look that a person asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everstep.controller.bodies import decoded, limited_body, number
from everstep.controller.gate import json_response
from everstep.controller.look_views import StacksView
from everstep.core import looked
from everstep.core.state import Phase, State
from everstep.events import ControllerEvent
from everstep.looks import Purpose
from everstep.model import Value
from everstep.sightings import StacksRequested

BODY_BYTES_MAX = 1 << 16


class AskLook(Value, frozen=True, kw_only=True):
    """Body of POST /v1/stacks."""

    by: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class LookAsked(Value, frozen=True, kw_only=True):
    """Answer to POST /v1/stacks."""

    after: int
    """The look will have a higher number."""


class LooksDesk(NamedTuple):
    """What these endpoints ask the rest of the controller for."""

    state: State
    view: Callable[[int], StacksView]
    """Of looks later than this number."""
    journalled: Callable[[Sequence[ControllerEvent]], Awaitable[None]]
    """Returns when the core was told and the journal has it."""


class LooksApi:
    """The endpoints."""

    def __init__(self, desk: LooksDesk) -> None:
        self._desk = desk

    def routes(self) -> list[Route]:
        return [
            Route("/v1/stacks", self.show),
            Route("/v1/stacks", self.take, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        return json_response(self._desk.view(int(number(request, "after"))))

    async def take(self, request: Request) -> Response:
        asked = decoded(await limited_body(request, BODY_BYTES_MAX), AskLook)
        state = self._desk.state
        if state.finish is None and state.phase is not Phase.RUNNING:
            raise HTTPException(
                409, f"no ranks run now (the job is {state.phase}): there are no stacks to look at"
            )
        current = looked.under_way(state)
        if current is not None and current.purpose is Purpose.ASKED:
            return json_response(LookAsked(after=current.number - 1))  # it is for all who ask
        answer = LookAsked(after=state.looked)
        if not state.stacks_wanted_by:
            await self._desk.journalled([StacksRequested(by=asked.by)])
        return json_response(answer)
