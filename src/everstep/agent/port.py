"""Reserves the port of rank 0's store before anybody knows it, and holds it while rank 0 binds it.

A bound socket that does not listen keeps the kernel from giving its port to anyone who asks for
any port or connects from one, but lets another socket with SO_REUSEADDR (which TCPStore sets) bind
and listen. So there is no moment at which the port is free for a stranger.
"""

from __future__ import annotations

import errno
import socket

from everstep.model import EverstepError


class PortTaken(EverstepError):
    """Somebody else listens on the port that rank 0's store was to get."""


class StorePort:
    """The reservation of one machine: at most one port at a time."""

    def __init__(self) -> None:
        self._held: socket.socket | None = None

    @property
    def number(self) -> int:
        """The port that is held, 0 for none."""
        return 0 if self._held is None else int(self._held.getsockname()[1])

    def reserve_fresh(self) -> int:
        """A port that differs from the one held so far, which is let go."""
        self._replace(_bind(0))
        return self.number

    def hold(self, number: int) -> None:
        """Hold this port, reserved by an agent that died since. PortTaken if it is lost."""
        if number == self.number:
            return
        try:
            self._replace(_bind(number))
        except OSError as error:
            raise PortTaken(
                f"port {number}, reserved for rank 0's store, cannot be had any more:"
                f" {error.strerror}; the next start gets another one"
            ) from error

    def close(self) -> None:
        """Let the port go."""
        if self._held is not None:
            self._held.close()
        self._held = None

    def _replace(self, fresh: socket.socket) -> None:
        self.close()
        self._held = fresh


def _bind(number: int) -> socket.socket:
    """On all addresses, both protocols, as TCPStore does; IPv4 alone where there is no IPv6."""
    try:
        return _bind_family(socket.AF_INET6, "::", number)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bind_family(socket.AF_INET, "0.0.0.0", number)


def _bind_family(family: socket.AddressFamily, address: str, number: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((address, number))
    except OSError:
        held.close()
        raise
    return held
