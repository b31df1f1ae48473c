"""Two machines' ends of a transfer: shared memory, shards of plain bytes, servers, clients."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from everstep.agent.transfer.channel import Cancel, Limits
from everstep.agent.transfer.client import Client, Way
from everstep.agent.transfer.desk import Desk
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.messages import Get, Put
from everstep.agent.transfer.server import ShardServer
from everstep.checkpoint.format import Expected, Header, crc_of
from everstep.checkpoint.kept import Kept
from everstep.code.store import CodeStore
from everstep.model import NO_STEP, Generation, MachineId, Peer, Rank, Step

TOKEN = b"the job's token"
OWNER = Identity(TOKEN, "cafe0001", MachineId("owner"))
PEER = Identity(TOKEN, "cafe0001", MachineId("peer"))
PEER_NAME = PEER.machine


@contextlib.contextmanager
def shared_memory() -> Iterator[Path]:
    """A machine's directory of shared memory."""
    shm = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    try:
        yield shm
    finally:
        shutil.rmtree(shm)


def content(step: int, size: int = 1000, rank: int = 0) -> bytes:
    """Bytes that no other shard has."""
    word = f"<step {step} of rank {rank}>".encode()
    return (word * (size // len(word) + 1))[:size]


def header(step: int, size: int = 1000, rank: int = 0, generation: int = 1) -> Header:
    return Header(
        step=Step(step),
        generation=Generation(generation),
        rank=Rank(rank),
        world_size=4,
        sequence=step + 1,
        payload_bytes=size,
        digest=crc_of(memoryview(content(step, size, rank))),  # agents only hand it on
    )


def put_of(
    step: int, size: int = 1000, *, rank: int = 0, safe: int = NO_STEP, order: int = 1
) -> Put:
    """The request to keep content(step, size, rank)."""
    return Put(
        header=header(step, size, rank),
        safe=Step(safe),
        order_generation=Generation(order),
    )


def get_of(step: int, rank: int = 0, generation: int = 1) -> Get:
    return Get(rank=Rank(rank), step=Step(step), generation=Generation(generation), world_size=4)


def kept_content(kept: Kept, step: int, rank: int = 0) -> bytes:
    """The payload that is offered for this step, verified."""
    with kept.open(Expected(step=Step(step), rank=Rank(rank))) as shard:
        shard.verify()
        assert shard.crc is not None
        return bytes(shard.payload)


def kept_steps(kept: Kept, rank: int = 0) -> list[int]:
    """Steps on offer; each must be whole."""
    steps = [int(copy.step) for copy in kept.inventory() if copy.rank == rank]
    for step in steps:
        found = kept_content(kept, step, rank)
        assert found == content(step, len(found), rank)
    return steps


class Machine:
    """A peer with a server on the loopback."""

    def __init__(self, shm: Path, me: Identity = PEER, port: int = 0) -> None:
        self.said: list[str] = []
        self.desk = Desk(me, shm, CodeStore(shm / "code"))
        self.kept = self.desk.kept
        self._listener = socket.create_server(("127.0.0.1", port))
        self.server = ShardServer(self._listener, self.desk, self.said.append)
        self.server.start()

    @property
    def peer(self) -> Peer:
        return peer_at(self.server.port)


def peer_at(port: int, machine: MachineId = PEER_NAME) -> Peer:
    return Peer(rank=Rank(0), machine=machine, address="127.0.0.1", port=port)


@contextlib.contextmanager
def machine(me: Identity = PEER) -> Iterator[Machine]:
    with shared_memory() as shm:
        peer = Machine(shm, me)
        try:
            yield peer
        finally:
            peer.server.close()


def send(
    peer: Peer,
    wanted: Put,
    way: Way | None = None,
    *,
    me: Identity = OWNER,
    limits: Limits | None = None,
) -> int:
    """Have the peer keep the shard that the request describes."""
    found = wanted.header
    payload = memoryview(content(found.step, found.payload_bytes, found.rank))
    return Client(me, limits).put(peer, wanted, [payload], lambda: True, way or Way(Cancel()))


def bring(peer: Peer, wanted: Get, *, me: Identity = OWNER) -> bytes:
    """Fetch a shard's payload from the peer."""
    got = bytearray()

    def place(offered: Header) -> memoryview:
        got.extend(bytes(offered.payload_bytes))
        return memoryview(got)

    Client(me).fetch(peer, wanted, place, Way(Cancel()))
    return bytes(got)
