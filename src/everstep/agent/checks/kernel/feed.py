"""The agent's end of the node service: lines of the kernel log that only root may read.

Used by source.py where /dev/kmsg is not readable. It believes a server that runs as root or as this
user, nobody else: whoever writes into that socket can have machines evicted.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from pathlib import Path

import msgspec

from everstep.agent.checks.check import NotReadable
from everstep.agent.checks.kernel.attribution import thing_of
from everstep.agent.checks.kernel.kmsg import Remembered
from everstep.agent.checks.kernel.lines import KernelLog, Line
from everstep.agent.checks.kernel.table import own_table
from everstep.model import Seconds, Value

GREETED_WITHIN_S: Seconds = 0.3
"""Once, when it is connected: a service that runs answers in a millisecond."""
SILENT_S: Seconds = 40.0
"""A service that said nothing for so long is stuck: it says something every BEAT_S."""
BEAT_S: Seconds = 10.0
MESSAGE_MAX = 2 << 20
"""Bytes of one message: all that can be remembered fits three times."""


class NodeNews(Value, frozen=True, kw_only=True):
    """One message of the node service, a line of JSON. `log.lines` are those since the last one."""

    version: int = 1
    log: KernelLog


def peer_uid(connection: socket.socket) -> int:
    """Who is at the other end, as the kernel says."""
    size = struct.calcsize("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", raw)[1])


class NodeFeed:
    """One connection. NotReadable if nobody is there, or not whom we believe."""

    def __init__(self, path: Path, boot_id: str, trusted: frozenset[int] | None = None) -> None:
        self._boot_id = boot_id
        self._path = path
        self._socket = _connect(path, trusted or frozenset({0, os.getuid()}))
        self._buffer = bytearray()
        self._remembered = Remembered()
        self._newest: KernelLog | None = None
        self._heard = _now()
        self._waited = False
        self._opened = self._heard

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def look(self) -> list[Line]:
        """Take what came. Lines that no rule here knows are left out: it may be another version."""
        if not self._waited:
            self._waited = True
            select.select([self._socket], [], [], GREETED_WITHIN_S)
        self._receive()
        found = []
        while (end := self._buffer.find(b"\n")) >= 0:
            message = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            found += self._take(message)
        return found

    def known(self) -> KernelLog:
        """All that is known now."""
        silent = _now() - self._heard
        if self._newest is None:
            raise NotReadable(f"the node service at {self._path} has not answered yet")
        if silent > SILENT_S:
            raise NotReadable(f"the node service at {self._path} is silent for {silent:.0f} s")
        return msgspec.structs.replace(
            self._newest,
            by="node service",
            opened=self._opened,
            clock=self._newest.clock + silent,
            lines=self._remembered.lines(),
            forgotten=self._newest.forgotten + self._remembered.forgotten,
        )

    def _receive(self) -> None:
        while len(self._buffer) <= MESSAGE_MAX:
            try:
                part = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            if not part:
                raise NotReadable(f"the node service at {self._path} has ended")
            self._buffer += part
        if b"\n" not in self._buffer:
            raise NotReadable(f"the node service at {self._path} sends what is no message")

    def _take(self, message: bytes) -> list[Line]:
        try:
            log = msgspec.json.decode(message, type=NodeNews).log
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NotReadable(f"the node service at {self._path} sends garbage: {error}") from error
        if self._boot_id and log.boot_id != self._boot_id:
            raise NotReadable(f"the node service at {self._path} is of another boot or machine")
        self._newest = log
        self._heard = _now()
        rules = own_table().of
        known = [line for line in log.lines if line.rule in rules]
        for line in known:
            self._remembered.add(line, thing_of(rules[line.rule], line.names))
        return known


def _now() -> Seconds:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _connect(path: Path, trusted: frozenset[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(str(path))
        uid = peer_uid(connection)
    except OSError as error:
        connection.close()
        raise NotReadable(f"no node service at {path}: {error.strerror}") from error
    if uid not in trusted:
        connection.close()
        raise NotReadable(f"the node service at {path} runs as user {uid}, not as root")
    return connection
