"""The socket that the controller listens on: the port asked for, else its former one, else any."""

from __future__ import annotations

import errno
import os
import socket
import urllib.parse

from everstep.files import FileUnreadable, read_json
from everstep.model import UserError
from everstep.paths import Endpoint, JobPaths

_ANY = ("", "0.0.0.0", "::")
BACKLOG = 2048
"""Connections waiting to be accepted: all agents come back at the same moment."""


class CannotListen(UserError):
    """The address or the port that was asked for cannot be had."""

    def __init__(self, message: str, *, in_use: bool) -> None:
        super().__init__(message)
        self.in_use = in_use


def listen(paths: JobPaths, host: str, port: int) -> socket.socket:
    """Bind and listen; `port` 0 means the former port, so that agents find us at once, or any."""
    if port:
        return _listen(host, port)
    former = former_port(paths)
    try:
        return _listen(host, former)
    except CannotListen as error:
        if not error.in_use:
            raise
        return _listen(host, 0)


def url_of(listener: socket.socket, host: str) -> str:
    """What to write into endpoint.json: how others reach this socket."""
    port = listener.getsockname()[1]
    name = _own_name() if host in _ANY else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _own_name() -> str:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


def former_port(paths: JobPaths) -> int:
    """Of the newest controller of the job, 0 if there was none."""
    try:
        return urllib.parse.urlsplit(read_json(paths.endpoint, Endpoint).url).port or 0
    except (FileUnreadable, ValueError):
        return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        advice = (
            "give another --port, or end what listens there" if in_use else "give another --host"
        )
        raise CannotListen(
            f"cannot listen on {host or 'any address'}, port {port}: {_reason(error)}; {advice}",
            in_use=in_use,
        ) from error


def _reason(error: OSError) -> str:
    """Without the address, which create_server adds to it and our sentence has already."""
    if error.errno is None or error.errno < 0:  # a name that cannot be resolved
        return str(error.strerror or error)
    return os.strerror(error.errno)
