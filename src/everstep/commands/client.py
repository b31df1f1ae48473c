"""Speaks HTTP to a job's controller, for every command that asks or orders something.

It reads endpoint.json again before every call, so a controller that came back under the next term
is found. Every failure is an EverstepError with one sentence. It never waits for a controller and
never retries: the viewer does, the other commands fall back to the journal (offline.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from everstep.code.manifest import Manifest
from everstep.code.manifest import decoded as decoded_manifest
from everstep.controller.accepting import Asked
from everstep.controller.code import Accepted, RollBack, RollsBack
from everstep.controller.look_views import StacksView
from everstep.controller.looks import LookAsked
from everstep.controller.output import OutputPage
from everstep.controller.version_views import VersionsView
from everstep.controller.views import IncidentsView, StatusView
from everstep.files import FileUnreadable, read_json
from everstep.journal import StoryLine
from everstep.model import EverstepError, Fault, Value, VersionId
from everstep.paths import Endpoint, JobPaths

_Content = TypeVar("_Content")
TIMEOUT_S = 10.0
"""A controller answers in milliseconds; one that is busy replaying a long journal in seconds."""
LOOKS_S = 60.0
"""Time to send a look: thousands of distinct stacks in the worst case."""
MERGE_S = 120.0
"""Time for what the controller does with files: 20,000 of them, on a slow disk."""


class Away(EverstepError):
    """No controller answers: it died, is starting, or the job is over."""


class TokenRefused(EverstepError):
    """The controller does not take our token."""


class Declined(EverstepError):
    """The controller understood and said no; the message is its sentence."""


class NotThere(Declined):
    """What was asked for is not there."""


class _Problem(Value, frozen=True, kw_only=True):
    error: str


class _Story(Value, frozen=True, kw_only=True):
    story: list[StoryLine]


class Client:
    """Calls of one job's controller."""

    def __init__(self, job: JobPaths, *, url: str | None = None, token: str | None = None) -> None:
        """`url` and `token` for a job whose directory on this host does not have them."""
        self.job = job
        self._url = url
        self._token = token
        # No proxies and no .netrc: a controller is a neighbour, not a web site.
        self._http = httpx2.Client(trust_env=False, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def status(self) -> StatusView:
        return _decoded(self._call("GET", "/v1/status"), StatusView)

    def incidents(self) -> IncidentsView:
        return _decoded(self._call("GET", "/v1/incidents"), IncidentsView)

    def why(self, subject: str) -> list[StoryLine]:
        """The story of an incident, a decision, an event or a machine."""
        return _decoded(self._call("GET", f"/v1/why/{quote(subject, safe='')}"), _Story).story

    def output(self, after: int, wait_s: float) -> OutputPage:
        """The lines of output from number `after` on; waits for some, at most `wait_s`."""
        content = self._call("GET", "/v1/output", params={"after": after, "wait_s": wait_s})
        return _decoded(content, OutputPage)

    def stop(self, by: str) -> None:
        self._call("POST", "/v1/stop", json={"by": by})

    def inject(self, fault: Fault, rank: int | None, machine: str | None) -> None:
        wanted = {"fault": str(fault), "rank": rank, "machine": machine}
        self._call("POST", "/v1/inject", json=wanted)

    # --- stacks ---

    def ask_look(self, by: str) -> int:
        """Ask for a look at all stacks; it will have a higher number than the answer."""
        asked = _decoded(self._call("POST", "/v1/stacks", json={"by": by}), LookAsked)
        return asked.after

    def stacks(self, after: int = 0) -> StacksView:
        """The newest look that is judged and later than number `after`."""
        content = self._call("GET", "/v1/stacks", params={"after": after}, timeout=LOOKS_S)
        return _decoded(content, StacksView)

    # --- code ---

    def versions(self) -> VersionsView:
        return _decoded(self._call("GET", "/v1/versions"), VersionsView)

    def manifest(self, version: VersionId) -> Manifest | None:
        """What is in a code version; None if the controller does not have it."""
        try:
            content = self._call("GET", f"/v1/code/{version}/manifest", timeout=MERGE_S)
        except NotThere:
            return None
        return decoded_manifest(content, version)

    def send_code(self, version: VersionId, size: int, parts: Iterable[bytes]) -> None:
        """Send the archive of a code version, of so many bytes."""
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        path = f"/v1/code/{version}"
        self._call("PUT", path, content=parts, more=headers, timeout=MERGE_S)

    def update(self, asked: Asked) -> Accepted:
        body = msgspec.json.encode(asked)
        return _decoded(self._call("POST", "/v1/update", content=body, timeout=MERGE_S), Accepted)

    def rollback(self, asked: RollBack) -> RollsBack:
        body = msgspec.json.encode(asked)
        return _decoded(self._call("POST", "/v1/rollback", content=body), RollsBack)

    def _call(self, method: str, path: str, **parts: Any) -> bytes:
        url = self._endpoint()
        headers = {"Authorization": f"Bearer {self._bearer()}", **parts.pop("more", {})}
        try:
            answer = self._http.request(method, url + path, headers=headers, **parts)
        except httpx2.TransportError as error:
            raise Away(
                f"No controller answers at {url} ({error}): if the job should still run, see "
                f"{self.job.controller_log}."
            ) from error
        return self._read(answer, url)

    def _read(self, answer: httpx2.Response, url: str) -> bytes:
        if answer.status_code in (401, 403):
            raise TokenRefused(
                f"The controller at {url} refuses the token of {self.job.token}: it belongs to "
                "another job, or EVERSTEP_TOKEN differs between the machines."
            )
        if answer.status_code == 404:
            raise NotThere(_decoded(answer.content, _Problem).error)
        if answer.status_code >= 400:
            raise Declined(_decoded(answer.content, _Problem).error)
        return answer.content

    def _endpoint(self) -> str:
        if self._url is not None:
            return self._url
        try:
            return read_json(self.job.endpoint, Endpoint).url
        except FileUnreadable as error:
            raise Away(
                f"The controller of job {self.job.root.name} has not said where it listens "
                f"({self.job.endpoint} is missing): see {self.job.controller_log}."
            ) from error

    def _bearer(self) -> str:
        return token_of(self.job) if self._token is None else self._token


def token_of(job: JobPaths) -> str:
    """Of the job's controller; TokenRefused if this user may not read it."""
    try:
        return job.token.read_text().strip()
    except OSError as error:
        raise TokenRefused(
            f"The token of the job cannot be read from {job.token}: "
            f"{error.strerror}; run the command as the user who started the job."
        ) from error


def _decoded(content: bytes, of: type[_Content]) -> _Content:
    try:
        return msgspec.json.decode(content, type=of)
    except msgspec.MsgspecError as error:
        raise Away(
            f"What answers is not a controller of this version of everstep ({error})."
        ) from error
