"""Who may ask the controller what: whoever has the job's token everything, monitors their findings.

The second token is computed from the first, so that there is nothing more to store or to lose.
`everstep token --findings` prints it, server.py stands behind the gate.
"""

from __future__ import annotations

import hmac

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

FINDINGS = "/v1/findings"
ALERTMANAGER = "/v1/alertmanager"
OF_MONITORS = (FINDINGS, ALERTMANAGER)
"""All that the second token opens."""
_LABEL = b"everstep findings 1"


def findings_token(token: str) -> str:
    """The token for other people's monitors. Whoever has it cannot compute the job's own."""
    return hmac.digest(token.encode(), _LABEL, "sha256").hex()


class TokenGate:
    """Lets in who knows a token for what is asked; everything else is told to get one."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._own = f"Bearer {token}".encode()
        self._monitors = f"Bearer {findings_token(token)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._lets_in(given, scope["path"]):
            await self._app(scope, receive, send)
            return
        refusal = error_response(*self._refusal(given))
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(refusal)
        else:
            await refusal(scope, receive, send)

    def _lets_in(self, given: bytes, path: str) -> bool:
        own = hmac.compare_digest(given, self._own)
        return own or (path in OF_MONITORS and hmac.compare_digest(given, self._monitors))

    def _refusal(self, given: bytes) -> tuple[int, str]:
        if hmac.compare_digest(given, self._monitors):
            return 403, f"this token is for findings: it opens {' and '.join(OF_MONITORS)} only"
        return 401, "wrong or missing token: it is in the file `token` of the job"


def error_response(code: int, sentence: str) -> Response:
    """The form of every error."""
    return json_response({"error": sentence}, code)


def json_response(content: object, code: int = 200) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status_code=code, media_type="application/json")
