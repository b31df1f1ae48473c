"""Whether another machine can be reached over the network: the second path to a silent one.

Used by effects.py for ProbeMachine. A connection to any port is enough, and so is a refusal: only a
kernel that runs, behind links that work, sends one.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import NamedTuple

from everstep.model import Seconds

_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN})
"""What a kernel says when packets do not get there, or nobody answers them."""


class Tried(NamedTuple):
    """What came of it."""

    reachable: bool | None
    """None: it could not be tried, which says nothing of the other machine."""
    why: str


async def reach(address: str, port: int, within_s: Seconds) -> Tried:
    """Try once. Says what it found, whatever happens."""
    try:
        async with asyncio.timeout(within_s):
            found = await asyncio.get_running_loop().getaddrinfo(
                address, port, type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError) as problem:  # a TimeoutError is an OSError
        return Tried(None, f"the address {address} could not be looked up: {problem}")
    host = str(found[0][4][0])
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return Tried(reachable=False, why=f"{host}:{port} did not answer in {within_s:g} s")
    except (ConnectionRefusedError, ConnectionResetError):
        return Tried(reachable=True, why=f"{host} refused port {port}")
    except OSError as problem:
        reachable = False if problem.errno in _NO_WAY else None
        return Tried(reachable, f"{host}:{port}: {problem.strerror or problem}")
    writer.close()
    return Tried(reachable=True, why=f"{host}:{port} took the connection")
