"""Fetches a code version from the controller: GET /v1/code/VERSION with the job's token.

Used by code.py in a thread, when no other machine's agent could give the version.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from everstep.agent.this_machine import ThisMachine
from everstep.agent.transfer.channel import STALL_S
from everstep.agent.transfer.client import Way
from everstep.agent.transfer.messages import TransferFailed
from everstep.code.archive import Source
from everstep.code.manifest import short
from everstep.files import FileUnreadable
from everstep.model import Seconds, VersionId

AGAIN_AFTER_S: Seconds = 0.5
"""A controller that is started again is back in about a second."""
_ANSWER_CHARS_MAX = 300


class _Gone(TransferFailed):
    """There is no controller at the moment, or the connection to it broke."""

    again = True


class _Body:
    """What comes, with errors of the network told from those of the disk it goes to."""

    def __init__(self, response: http.client.HTTPResponse, deadline: Seconds) -> None:
        self._response = response
        self._deadline = deadline

    def read(self, count: int, /) -> bytes:
        if time.monotonic() > self._deadline:
            raise TransferFailed("the controller sends it too slowly")
        try:
            return self._response.read(count)
        except (OSError, http.client.HTTPException) as error:
            raise _Gone(f"the connection to the controller broke: {error}") from error


def download(
    here: ThisMachine,
    version: VersionId,
    take: Callable[[Source], None],
    way: Way,
    deadline: Seconds,
) -> None:
    """Have `take` read the archive, as often as it takes until `deadline` (of time.monotonic).

    Raises TransferFailed, and whatever `take` does.
    """
    while True:
        try:
            return _attempt(here, version, take, way, deadline)
        except _Gone:
            if time.monotonic() + AGAIN_AFTER_S > deadline:
                raise
        way.cancel.wait(AGAIN_AFTER_S)


def _attempt(
    here: ThisMachine,
    version: VersionId,
    take: Callable[[Source], None],
    way: Way,
    deadline: Seconds,
) -> None:
    try:
        where = urlsplit(here.controller_url())
        token = here.job.token.read_text().strip()
    except (OSError, FileUnreadable) as error:
        raise _Gone(f"nothing says where the controller is: {error}") from error
    timeout_s = max(0.1, min(STALL_S, deadline - time.monotonic()))
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)
    with contextlib.closing(connection):
        try:
            connection.connect()
        except OSError as error:
            raise _Gone(f"no controller at {where.netloc}: {error}") from error
        with way.cancel.watching(connection.sock):
            take(_Body(_ask(connection, version, token), deadline))


def _ask(
    connection: http.client.HTTPConnection, version: VersionId, token: str
) -> http.client.HTTPResponse:
    """The response, if it is one with the archive."""
    try:
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("GET", f"/v1/code/{version}", headers=headers)
        response = connection.getresponse()
        said = "" if response.status == http.HTTPStatus.OK else _text(response)
    except (OSError, http.client.HTTPException) as error:
        raise _Gone(f"the connection to the controller broke: {error}") from error
    if response.status == http.HTTPStatus.OK:
        return response
    reason = f"the controller does not give code version {short(version)}: HTTP status"
    again = response.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
    raise (_Gone if again else TransferFailed)(f"{reason} {response.status} {said}")


def _text(response: http.client.HTTPResponse) -> str:
    return response.read(_ANSWER_CHARS_MAX).decode(errors="replace").strip()
