"""The calling end: sends a shard to a peer, fetches one back, and tries again where that may help.

Called in threads of the agent (backing_up.py, fetching.py, code.py). Every failure is one sentence
with the name and the address of the other end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple, TypeVar

from everstep.agent.transfer.channel import Cancel, Channel, Limits, PeerGone
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.messages import NONCE_BYTES, Get, GetCode, Put, TransferFailed
from everstep.agent.transfer.pace import TokenBucket
from everstep.agent.transfer.talk import Caller, Fetched, Talk, fetch, fetch_code, put
from everstep.checkpoint.format import Header
from everstep.model import AgentAt, Peer, Seconds, VersionId

CONNECT_WITHIN_S: Seconds = 5.0
RETRY_AFTER_S: tuple[Seconds, ...] = (0.1, 0.5, 1.0, 2.0)
"""An agent that was killed is back within a second; a cut link of two seconds is no failure."""
_Result = TypeVar("_Result")
_Called = Peer | AgentAt


class Way(NamedTuple):
    """Under which conditions a transfer runs."""

    cancel: Cancel
    pace: TokenBucket | None = None


class Client:
    """Of one agent."""

    def __init__(self, me: Identity, limits: Limits | None = None) -> None:
        self._me = me
        self._limits = limits or Limits()

    def put(
        self,
        peer: Peer,
        wanted: Put,
        chunks: Sequence[memoryview],
        whole: Callable[[], bool],
        way: Way,
    ) -> int:
        """Have the peer keep this shard; the bytes sent, 0 if it had it already.

        `chunks`: its payload, one after the other. Raises TransferFailed, and ShardLost if the
        shard was overwritten here.
        """
        return self._attempts(peer, way, lambda caller: put(caller, wanted, chunks, whole))

    def fetch(
        self, peer: Peer, wanted: Get, place: Callable[[Header], memoryview], way: Way
    ) -> Fetched:
        """Get this shard from the peer into `place`. Raises TransferFailed, and what that does."""
        return self._attempts(peer, way, lambda caller: fetch(caller, wanted, place))

    def fetch_code(self, peer: AgentAt, version: VersionId, sink: BinaryIO, way: Way) -> int:
        """Write the archive of a code version to an empty file; its size. Raises TransferFailed,
        and OSError of the file.
        """
        wanted = GetCode(version=version)

        def begin(caller: Caller) -> Talk[int]:
            sink.seek(0)
            sink.truncate()
            return fetch_code(caller, wanted, sink.write)

        return self._attempts(peer, way, begin)

    def _attempts(
        self, peer: _Called, way: Way, talk: Callable[[Caller], Talk[_Result]]
    ) -> _Result:
        for pause_s in (*RETRY_AFTER_S, None):
            try:
                return self._attempt(peer, way, talk)
            except TransferFailed as error:
                if pause_s is None or not error.again:
                    where = f"{peer.machine} at {peer.address}:{peer.port}"
                    raise type(error)(f"{where}: {error}") from error
            way.cancel.wait(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, peer: _Called, way: Way, talk: Callable[[Caller], Talk[_Result]]) -> _Result:
        caller = Caller(
            token=self._me.token,
            uid=self._me.uid,
            machine=self._me.machine,
            called=peer.machine,
            nonce=os.urandom(NONCE_BYTES),
        )
        with _connect(peer) as connection:
            return Channel(connection, way.cancel, way.pace).run(talk(caller), self._limits)


def _connect(peer: _Called) -> socket.socket:
    try:
        return socket.create_connection((peer.address, peer.port), CONNECT_WITHIN_S)
    except TimeoutError:
        raise PeerGone(f"no connection within {CONNECT_WITHIN_S:g} s") from None
    except OSError as error:
        raise PeerGone(f"no connection: {error.strerror or error}") from error
