"""Whether another controller of the job is alive: asks the one that endpoint.json names.

Used at the start, before a term is taken. The term, not this question, is what keeps two
controllers apart; the question only spares a healthy one from being replaced by mistake.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse

from everstep.files import FileUnreadable, read_json
from everstep.model import JobId
from everstep.paths import Endpoint, JobPaths

ANSWER_WITHIN_S = 3.0
"""A controller answers within milliseconds; who does not in this time is no help to the job."""


def living_controller(paths: JobPaths, job: JobId, token: str) -> Endpoint | None:
    """Where a controller of this job answers right now; None if none does."""
    try:
        endpoint = read_json(paths.endpoint, Endpoint)
    except FileUnreadable:
        return None
    return endpoint if _answers(endpoint, token, job) else None


def _answers(endpoint: Endpoint, token: str, job: JobId) -> bool:
    address = urllib.parse.urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=ANSWER_WITHIN_S
    )
    try:
        connection.request("GET", "/v1/status", headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        # The port may be somebody else's by now: only a status of this job is an answer.
        return response.status == http.client.OK and json.load(response).get("job") == job
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False
    finally:
        connection.close()
