"""The called end: takes shards of other machines and gives them back. One thread per connection.

Strangers cost little: they get a few seconds and a bounded number of threads, and not a byte of
memory is reserved before the caller has proven itself. What may be overwritten is desk.py's matter.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from everstep.agent.transfer.channel import GREET_WITHIN_S, Channel, Limits
from everstep.agent.transfer.desk import Desk, Visit
from everstep.agent.transfer.messages import NONCE_BYTES, ProtocolBroken, TransferFailed
from everstep.agent.transfer.talk import Refused, answer, greet
from everstep.model import Seconds

CONNECTIONS_MAX = 128
"""A machine of 16 ranks has 16 in and 16 out; the rest is for strays."""
BACKLOG = 128
PAUSE_S: Seconds = 0.1
"""Before accepting again when the kernel has no file descriptors left."""
SAID_MAX = 256
"""Different sentences of which it is remembered that they were said."""


class ShardServer:
    """Of one agent. Its threads end with the process, or soon after close()."""

    def __init__(self, listener: socket.socket, desk: Desk, say: Callable[[str], None]) -> None:
        """`listener`: bound. `say`: logs a sentence for people, from any thread."""
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._desk = desk
        self._say = say
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._visits: set[Visit] = set()
        self._closing = False

    def start(self) -> None:
        self._listener.listen(BACKLOG)
        threading.Thread(target=self._accept, name="everstep-shards", daemon=True).start()

    def close(self) -> None:
        """Take no more connections and end those that are open."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            visits = list(self._visits)
        for visit in visits:
            visit.cancel.cancel()
            visit.over.wait(PAUSE_S)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if not self._closing:
                    time.sleep(PAUSE_S)
                continue
            self._receive(connection, str(address[0]))

    def _receive(self, connection: socket.socket, address: str) -> None:
        visit = Visit(self._desk)
        with self._lock:
            full = len(self._visits) >= CONNECTIONS_MAX
            if not full:
                self._visits.add(visit)
        if full:
            connection.close()
            self._say_once(f"{CONNECTIONS_MAX} connections are open: {address} is sent away")
            return
        threading.Thread(
            target=self._serve,
            args=(visit, connection, address),
            name="everstep-shard",
            daemon=True,
        ).start()

    def _serve(self, visit: Visit, connection: socket.socket, address: str) -> None:
        """One visit to its end. What goes wrong is the caller's to mend, and has one line here."""
        try:
            with connection:
                _converse(visit, Channel(connection, visit.cancel))
        except (TransferFailed, OSError) as error:
            self._say_once(f"a transfer with {address} failed: {error}")
        finally:
            visit.end()
            with self._lock:
                self._visits.discard(visit)

    def _say_once(self, text: str) -> None:
        with self._lock:
            if text in self._said:
                return
            if len(self._said) >= SAID_MAX:
                self._said.clear()
            self._said.add(text)
        self._say(text)


def _converse(visit: Visit, channel: Channel) -> None:
    first = Limits(stall_s=GREET_WITHIN_S, total_s=GREET_WITHIN_S)
    try:
        wanted = channel.run(greet(visit, os.urandom(NONCE_BYTES)), first)
        channel.run(answer(visit, wanted), Limits())
    except (Refused, ProtocolBroken):
        channel.refuse_more()
        raise
