"""Drives a conversation over a socket: with time limits, at a pace, until somebody cancels it.

A transfer runs in a thread of its own and blocks; the kernel wakes it when a whole piece is there.
It ends in bounded time whatever the other end does: every wait has a limit, and cancel() wakes all.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from everstep.agent.transfer.messages import TransferFailed
from everstep.agent.transfer.pace import TokenBucket
from everstep.agent.transfer.talk import Fill, Send, Talk
from everstep.model import Seconds

STALL_S: Seconds = 10.0
"""A peer that moves no byte for so long is gone. TCP itself would try for a quarter of an hour."""
GREET_WITHIN_S: Seconds = 5.0
"""For whoever connects, to prove that it is one of ours."""
PACED_BYTES = 256 << 10
"""Sent at once where a pace is kept: 16 ranks that share 1 MiB/s wait 4 s for their turn."""
LINGER_S: Seconds = 1.0
"""How long a refusal waits to be read by who is still sending."""
_TIMEVAL = struct.Struct("@ll")
_Result = TypeVar("_Result")


class PeerGone(TransferFailed):
    """The other end closed, died, or stands still."""

    again = True


class Cancelled(TransferFailed):
    """We gave it up ourselves: something newer has begun."""


class Limits(NamedTuple):
    """How patient to be."""

    stall_s: Seconds = STALL_S
    total_s: Seconds | None = None
    """None: as long as something moves."""


class Cancel:
    """Ends all transfers that were begun under it, in any thread, now and later."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        self._event.set()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: Seconds) -> None:
        """Sleep. Raises Cancelled at once when that is so."""
        if self._event.wait(timeout_s):
            raise Cancelled("it was given up: something newer has begun")

    @contextlib.contextmanager
    def watching(self, connection: socket.socket) -> Iterator[None]:
        """Within this, cancel() shuts the connection down."""
        with self._lock:
            self._sockets.add(connection)
        try:
            self.wait(0)
            yield
        finally:
            with self._lock:
                self._sockets.discard(connection)


class Channel:
    """One connection, and what may be done with it. The caller closes the socket."""

    def __init__(
        self, connection: socket.socket, cancel: Cancel, pace: TokenBucket | None = None
    ) -> None:
        self._socket = connection
        self._cancel = cancel
        self._pace = pace
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)

    def run(self, talk: Talk[_Result], limits: Limits) -> _Result:
        """Drive it to its end. Raises what it raises, PeerGone, and Cancelled."""
        self._set_limits(limits)
        deadline = None if limits.total_s is None else time.monotonic() + limits.total_s
        with self._cancel.watching(self._socket), contextlib.closing(talk):
            try:
                wish = next(talk)
                while True:
                    if deadline is not None and time.monotonic() > deadline:
                        raise PeerGone(f"it took longer than {limits.total_s:g} s")
                    wish = talk.send(self._do(wish))
            except StopIteration as end:
                result: _Result = end.value
                return result
            except OSError as error:
                self._cancel.wait(0)
                raise PeerGone(f"the connection broke: {error.strerror or error}") from error

    def refuse_more(self) -> None:
        """After a refusal: let the other end read it, although it may be sending still."""
        deadline = time.monotonic() + LINGER_S
        self._set_limits(Limits(stall_s=LINGER_S))
        waste = bytearray(1 << 16)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv_into(waste) and time.monotonic() < deadline:
                pass

    def _do(self, wish: Send | Fill) -> bool:
        if isinstance(wish, Fill):
            self._fill(wish.into)
            return False
        parts = [memoryview(part) for part in wish.parts]
        if wish.bulk and self._pace is not None and self._pace.paces:
            self._send_at(self._pace, parts)
        else:
            self._send(parts)
        return bool(self._readable.poll(0))

    def _fill(self, into: memoryview) -> None:
        while into:
            try:
                count = self._socket.recv_into(into, len(into), socket.MSG_WAITALL)
            except BlockingIOError:
                raise PeerGone(f"nothing came from it for {self._stall_s:g} s") from None
            if not count:
                self._cancel.wait(0)
                raise PeerGone("it closed the connection in the middle")
            into = into[count:]

    def _send_at(self, pace: TokenBucket, parts: list[memoryview]) -> None:
        """Little by little: however slow, the other end sees that something moves."""
        for part in parts:
            for at in range(0, len(part), PACED_BYTES):
                little = part[at : at + PACED_BYTES]
                self._cancel.wait(pace.take(len(little), time.monotonic()))
                while pause_s := pace.hold(time.monotonic()):
                    self._cancel.wait(pause_s)
                self._send([little])

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            try:
                count = self._socket.sendmsg(parts)
            except BlockingIOError:
                raise PeerGone(f"it took nothing for {self._stall_s:g} s") from None
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][count:]

    def _set_limits(self, limits: Limits) -> None:
        """By the kernel, not by Python's timeouts: those would make the socket non-blocking, and
        then a piece arrives in hundreds of small reads.
        """
        self._stall_s = limits.stall_s
        seconds, rest = divmod(limits.stall_s, 1)
        value = _TIMEVAL.pack(int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
