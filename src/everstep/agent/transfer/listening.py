"""Binds the socket on which peers reach a machine's shards."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from collections.abc import Callable, Iterator

ANY = "::"
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def address_of(interface: str) -> str | None:
    """The IPv4 address of this network interface of this host; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", interface.encode()[:_NAME_BYTES])
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def bind(address: str, port: int, say: Callable[[str], None]) -> socket.socket:
    """A bound socket: at the machine's address, at `port` if that can still be had (0: any).

    An address that is not one of this host's (behind a translation, say) means all addresses; then
    `say` is told. Raises OSError if nothing can be bound at all.
    """
    problem: OSError | None = None
    for host, number in _choices(address, port):
        try:
            bound = _bind(host, number)
        except OSError as error:
            problem = problem or error
            continue
        if host == ANY:
            say(
                f"{address} is no address of this host ({problem}): shards are taken at all of them"
            )
        return bound
    assert problem is not None
    raise problem


def _choices(address: str, port: int) -> Iterator[tuple[str, int]]:
    for host in (address, ANY):
        if port:
            yield host, port
        yield host, 0


def _bind(host: str, port: int) -> socket.socket:
    if host == ANY:
        return _bind_all(port)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, where = found[0]
    return _bound(family, where)


def _bind_all(port: int) -> socket.socket:
    """Both protocols; IPv4 alone where there is no IPv6."""
    try:
        return _bound(socket.AF_INET6, (ANY, port))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bound(socket.AF_INET, ("0.0.0.0", port))


def _bound(family: int, where: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != ANY))
        bound.bind(where)
    except OSError:
        bound.close()
        raise
    return bound
