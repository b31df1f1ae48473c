"""Asks addresses whether they are there, all at once and within a time. For the source "net.reach".

By an echo request where the kernel lets an ordinary user send one (net.ipv4.ping_group_range), else
and also if that stays unanswered by a TCP connection: a refusal is an answer as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection

from everstep.model import Seconds, Value

ECHO_PORT = 7
"""Where a host is asked that was named without a port. Nobody listens there: it refuses."""
ANSWERS = frozenset({0, errno.ECONNREFUSED, errno.ECONNRESET})
UNREACHABLE = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT}
)


class Target(Value, frozen=True, kw_only=True):
    """Where to ask."""

    address: str
    """Numeric, with %interface if it is a link-local one."""
    port: int = 0
    """0: the host, no matter which port."""


class Heard(Value, frozen=True, kw_only=True):
    """What came of it."""

    answered: bool | None
    """None: it could not be asked."""
    why: str


def ask(targets: Collection[Target], within_s: Seconds) -> dict[Target, Heard]:
    """One answer for each. The time is for each of both ways."""
    hosts = [target for target in targets if not target.port]
    heard = _all(hosts, _ping, select.POLLIN, within_s)
    silent = [each for each in targets if each not in heard or not heard[each].answered]
    return heard | _all(silent, _connect, select.POLLOUT, within_s)


def _all(
    targets: Collection[Target],
    begin: Callable[[Target], socket.socket | Heard],
    event: int,
    within_s: Seconds,
) -> dict[Target, Heard]:
    heard: dict[Target, Heard] = {}
    waiting: dict[int, tuple[Target, socket.socket]] = {}
    poll = select.poll()
    with contextlib.ExitStack() as sockets:
        for target in targets:
            begun = begin(target)
            if isinstance(begun, Heard):
                heard[target] = begun
            else:
                sockets.enter_context(begun)
                waiting[begun.fileno()] = target, begun
                poll.register(begun, event)
        deadline = time.monotonic() + within_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(left * 1000):
                target, begun = waiting[number]
                if (said := _said(begun)) is not None:
                    heard[target] = said
                    poll.unregister(number)
                    del waiting[number]
    for target, _ in waiting.values():
        heard[target] = Heard(answered=False, why=f"no answer within {within_s:g} s")
    return heard


def _ping(target: Target) -> socket.socket | Heard:
    six = ":" in target.address
    family, protocol = (
        (socket.AF_INET6, socket.IPPROTO_ICMPV6) if six else (socket.AF_INET, socket.IPPROTO_ICMP)
    )
    request = struct.pack("!BBHHH", 128 if six else 8, 0, 0, 0, 1) + b"everstep"
    return _begin(target, (family, socket.SOCK_DGRAM, protocol), request)


def _connect(target: Target) -> socket.socket | Heard:
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    return _begin(target, (family, socket.SOCK_STREAM, socket.IPPROTO_TCP), b"")


def _begin(target: Target, kind: tuple[int, int, int], request: bytes) -> socket.socket | Heard:
    """A socket to wait for, or what is known at once."""
    made = None
    try:
        made = socket.socket(*kind)
        made.setblocking(False)
        number = made.connect_ex(_place(target))
        if number == 0 and request:
            made.send(request)
            return made
    except OSError as error:
        number = error.errno or errno.EIO
    if number == errno.EINPROGRESS and made is not None:
        return made
    if made is not None:
        made.close()
    return _heard(number)


def _place(target: Target) -> tuple[str, int] | tuple[str, int, int, int]:
    address, _, interface = target.address.partition("%")
    port = target.port or ECHO_PORT
    if ":" not in address:
        return address, port
    return address, port, 0, socket.if_nametoindex(interface) if interface else 0


def _said(begun: socket.socket) -> Heard | None:
    """Of a socket that has news; None: not for us."""
    number = begun.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number or begun.type == socket.SOCK_STREAM:
        return _heard(number)
    try:
        reply = begun.recv(1024)
    except BlockingIOError:
        return None
    except OSError as error:
        return _heard(error.errno or errno.EIO)
    return _heard(0) if reply[:1] in (b"\0", b"\x81") else None


def _heard(number: int) -> Heard:
    if number in ANSWERS:
        return Heard(answered=True, why="it answers")
    said = os.strerror(number)
    return Heard(answered=False if number in UNREACHABLE else None, why=said[:1].lower() + said[1:])
