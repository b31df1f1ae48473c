"""Takes the ranks' notices: sentences for the agent's log, and a reason to look at the slots now.

A datagram socket: a rank never waits for us, and what nobody takes is dropped by the kernel.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.agent.log import say
from everstep.trainer.notices import Notice


class _Notices(asyncio.DatagramProtocol):
    """Reads one datagram after the other."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard

    def datagram_received(self, data: bytes, addr: object) -> None:
        del addr
        try:
            notice = msgspec.msgpack.decode(data, type=Notice)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            say(f"{len(data)} bytes came on the notice socket that are no notice")
        else:
            say(f"rank {notice.rank}, generation {notice.generation}: {notice.text}")
        self._heard()


async def listen(path: Path, heard: Callable[[], None]) -> None:
    """Take notices on this socket for ever; `heard` is called after each. OSError if it fails."""
    await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Notices(heard), sock=_bind(path)
    )


def _bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    finally:
        os.umask(before)
    return bound
