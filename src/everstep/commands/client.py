"""Speaks HTTP to a job's controller, for every command that asks or orders something.

It reads endpoint.json again before every call, so a controller that came back under the next term
is found. Every failure is an EverstepError with one sentence. It never waits for a controller and
never retries: the viewer does, the other commands fall back to the journal (offline.py).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx2

from everstep.files import FileUnreadable, read_json
from everstep.model import EverstepError
from everstep.paths import Endpoint, JobPaths

Json = dict[str, Any]
TIMEOUT_S = 10.0
"""A controller answers in milliseconds; one that is busy replaying a long journal in seconds."""


class Away(EverstepError):
    """No controller answers: it died, is starting, or the job is over."""


class TokenRefused(EverstepError):
    """The controller does not take our token."""


class Declined(EverstepError):
    """The controller understood and said no; the message is its sentence."""


class Client:
    """Calls of one job's controller."""

    def __init__(self, job: JobPaths, *, url: str | None = None, token: str | None = None) -> None:
        """`url` and `token` for a job whose directory on this host does not have them."""
        self._job = job
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

    def status(self) -> Json:
        return self._call("GET", "/v1/status")

    def incidents(self) -> Json:
        return self._call("GET", "/v1/incidents")

    def why(self, subject: str) -> Json:
        return self._call("GET", f"/v1/why/{subject}")

    def output(self, after: int, wait_s: float) -> Json:
        """Lines of output that are newer than number `after`; waits for some, at most `wait_s`."""
        return self._call("GET", "/v1/output", params={"after": after, "wait_s": wait_s})

    def stop(self, by: str) -> Json:
        return self._call("POST", "/v1/stop", json={"by": by})

    def inject(self, fault: str, rank: int | None, machine: str | None) -> Json:
        return self._call(
            "POST", "/v1/inject", json={"fault": fault, "rank": rank, "machine": machine}
        )

    def _call(self, method: str, path: str, **parts: Any) -> Json:
        url = self._endpoint()
        headers = {"Authorization": f"Bearer {self._bearer()}"}
        try:
            answer = self._http.request(method, url + path, headers=headers, **parts)
        except httpx2.TransportError as error:
            raise Away(
                f"No controller answers at {url} ({error}): if the job should still run, see "
                f"{self._job.controller_log}."
            ) from error
        return self._read(answer, url)

    def _read(self, answer: httpx2.Response, url: str) -> Json:
        if answer.status_code in (401, 403):
            raise TokenRefused(
                f"The controller at {url} refuses the token of {self._job.token}: it belongs to "
                "another job, or EVERSTEP_TOKEN differs between the machines."
            )
        try:
            content: Json = answer.json()
        except ValueError as error:
            raise Away(f"What answers at {url} is not a controller of everstep.") from error
        if answer.status_code >= 400:
            raise Declined(str(content.get("error", f"HTTP {answer.status_code}")))
        return content

    def _endpoint(self) -> str:
        if self._url is not None:
            return self._url
        try:
            return read_json(self._job.endpoint, Endpoint).url
        except FileUnreadable as error:
            raise Away(
                f"The controller of job {self._job.root.name} has not said where it listens "
                f"({self._job.endpoint} is missing): see {self._job.controller_log}."
            ) from error

    def _bearer(self) -> str:
        if self._token is not None:
            return self._token
        try:
            return self._job.token.read_text().strip()
        except OSError as error:
            raise TokenRefused(
                f"The token of the job cannot be read from {self._job.token}: "
                f"{error.strerror}; run the command as the user who started the job."
            ) from error
