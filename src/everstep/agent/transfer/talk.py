"""The two ends of a transfer as plain sequences of "send this" and "fill that". No sockets here.

Each function is a generator: it yields what it wants done with the connection, and whoever drives
it does that (channel.py with a socket; tests with bytes cut anywhere, changed or ended early). So
the protocol reads from top to bottom, and whatever comes over the connection ends in a return or in
one of the errors named. Payload bytes go from shared memory to the connection and back into
shared memory; nothing here makes a copy of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

from everstep.agent.transfer import messages
from everstep.agent.transfer.checksums import Checks, pieces_of
from everstep.agent.transfer.messages import (
    AnyMessage,
    Challenge,
    Finished,
    Get,
    GetCode,
    Head,
    Hello,
    Offer,
    OfferCode,
    Proofs,
    ProtocolBroken,
    Put,
    Ready,
    Refusal,
    Request,
    Stored,
    TransferFailed,
    Wanted,
)
from everstep.checkpoint.format import Header
from everstep.checkpoint.kept import Taking
from everstep.checkpoint.slots import ShardLost
from everstep.model import MachineId, Value, VersionId

PIECE_BYTES = 4 << 20
CODE_PIECE_BYTES = 1 << 20
"""The most of a piece of code: it is copied, unlike shards."""


class Send(NamedTuple):
    """Send all of this. The answer: whether the other end has said something meanwhile."""

    parts: tuple[bytes | memoryview, ...]
    bulk: bool = False
    """A piece of a payload: it may have to wait for the bandwidth that backups are given."""


class Fill(NamedTuple):
    """Receive until this is full."""

    into: memoryview


_Result = TypeVar("_Result")
_Wished = TypeVar("_Wished", bound=messages.Message)
Talk = Generator[Send | Fill, bool, _Result]


class Refused(TransferFailed):
    """The other end says no."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


class WrongToken(TransferFailed):
    """The other end does not have this job's token."""


class Caller(Value, frozen=True, kw_only=True):
    """The client of one connection."""

    token: bytes
    uid: str
    machine: MachineId
    called: MachineId
    nonce: bytes
    """Fresh and random for every connection."""


class Frame(NamedTuple):
    """A message, and the bytes that it was."""

    message: AnyMessage
    bytes: bytes


class Fetched(NamedTuple):
    """What a fetch brought: the payload is in place, whole."""

    header: Header
    crc: int


class Given(NamedTuple):
    """What is sent to whoever asked for it."""

    header: Header
    chunks: Sequence[memoryview]
    crc: int | None
    """That it should have, if it is known."""


class CodeGiven(NamedTuple):
    """The archive of a code version."""

    size: int
    chunks: Iterator[bytes]


class Host(Protocol):
    """What a server's conversation asks of its machine."""

    token: bytes
    uid: str
    machine: MachineId

    def holds(self, put: Put) -> bool:
        """Whether this very shard is kept already. Raises Refused if the backup is void."""

    def take(self, put: Put) -> Taking:
        """Reserve where the shard goes. Raises Refused."""

    def store(self, taking: Taking, crc: int) -> None:
        """Commit what was received. Raises Refused if it is void meanwhile."""

    def give(self, get: Get) -> AbstractContextManager[Given]:
        """Open a shard that is kept here. Raises Refused."""

    def give_code(self, version: VersionId) -> CodeGiven:
        """Open a code version that is kept here. Raises Refused, also while it is read."""

    def damaged(self, header: Header) -> None:
        """A kept shard turned out to be bad."""


# --- the client ----------------------------------------------------------------------------------


def put(
    caller: Caller, wanted: Put, chunks: Sequence[memoryview], whole: Callable[[], bool]
) -> Talk[int]:
    """Have the other end keep this shard; the bytes sent, 0 if it had it already.

    `chunks`: its payload, one after the other. `whole` tells afterwards whether it was still the
    same shard. Raises ShardLost if not, TransferFailed for the other end.
    """
    yield from _call(caller, wanted)
    first = yield from _listen()
    if isinstance(first, Stored):
        return 0
    _wished(first, Ready)
    crc = yield from _give(chunks)
    if not whole():
        raise ShardLost(f"step {wanted.header.step} was overwritten while it was sent")
    yield _say(Finished(crc=crc))
    yield from _hear(Stored)
    return sum(map(len, chunks))


def fetch(caller: Caller, wanted: Get, place: Callable[[Header], memoryview]) -> Talk[Fetched]:
    """Get this shard's payload into `place`. Raises TransferFailed, and whatever `place` does."""
    yield from _call(caller, wanted)
    offer = yield from _hear(Offer)
    header = offer.header
    asked = (wanted.rank, wanted.step, wanted.generation, wanted.world_size)
    if (header.rank, header.step, header.generation, header.world_size) != asked:
        raise ProtocolBroken(f"{asked} was asked for, and {header} came")
    crc = yield from _take(place(header))
    return Fetched(header, crc)


def fetch_code(caller: Caller, wanted: GetCode, take: Callable[[memoryview], object]) -> Talk[int]:
    """Have `take` get the archive, a piece at a time; its size. Raises TransferFailed, and whatever
    `take` does. What it took before is worth nothing then.
    """
    yield from _call(caller, wanted)
    size = (yield from _hear(OfferCode)).size
    buffer = memoryview(bytearray(CODE_PIECE_BYTES))
    crc = done = 0
    while done < size:
        head = yield from _piece_head(min(size - done, len(buffer)))
        yield Fill(buffer[: head.length])
        crc = zlib.crc32(buffer[: head.length], crc)
        if crc != head.crc:
            raise ProtocolBroken(f"bytes after {done} were changed under way")
        take(buffer[: head.length])
        done += head.length
    yield from _end_of_pieces(crc)
    return size


def _call(caller: Caller, wanted: Wanted) -> Talk[None]:
    hello = messages.frame(
        Hello(
            version=messages.VERSION,
            uid=caller.uid,
            caller=caller.machine,
            called=caller.called,
            nonce=caller.nonce,
        )
    )
    yield Send((hello,))
    challenge = yield from _hear(Challenge)
    if len(challenge.nonce) != messages.NONCE_BYTES:
        raise ProtocolBroken(f"a nonce of {len(challenge.nonce)} bytes came")
    proofs = Proofs(caller.token, hello, challenge.nonce)
    if not messages.same_proof(challenge.proof, proofs.server()):
        raise WrongToken("it does not know this job's token")
    body = messages.encode_wanted(wanted)
    yield _say(Request(proof=proofs.client(body), body=body))


# --- the server ----------------------------------------------------------------------------------


def greet(host: Host, nonce: bytes) -> Talk[Wanted]:
    """Find out who calls and what for. Raises Refused (and says so) or TransferFailed."""
    raw = yield from _frame()
    hello = _wished(raw.message, Hello)
    problem = _stranger(host, hello)
    if problem:
        yield _say(Refusal(reason=problem))
        raise Refused(problem)
    proofs = Proofs(host.token, raw.bytes, nonce)
    yield _say(Challenge(nonce=nonce, proof=proofs.server()))
    request = yield from _hear(Request)
    if not messages.same_proof(request.proof, proofs.client(request.body)):
        yield _say(Refusal(reason="it does not take the caller's word: wrong token"))
        raise WrongToken(f"{hello.caller} does not know this job's token")
    return messages.parse_wanted(request.body)


def answer(host: Host, wanted: Wanted) -> Talk[None]:
    """Do what was asked for; a reason not to is told. Raises TransferFailed when it failed."""
    try:
        if isinstance(wanted, Put):
            yield from _keep(host, wanted)
        elif isinstance(wanted, GetCode):
            yield from _give_code(host, wanted)
        else:
            yield from _return(host, wanted)
    except (Refused, ProtocolBroken) as problem:
        yield _say(Refusal(reason=str(problem), again=problem.again))
        raise


def _keep(host: Host, wanted: Put) -> Talk[None]:
    if not host.holds(wanted):
        taking = host.take(wanted)
        yield _say(Ready())
        crc = yield from _take(taking.payload)
        host.store(taking, crc)
    yield _say(Stored())


def _return(host: Host, wanted: Get) -> Talk[None]:
    with host.give(wanted) as given:
        yield _say(Offer(header=given.header))
        crc = yield from _give(given.chunks)
        if given.crc not in (None, crc):
            host.damaged(given.header)
            raise Refused("its copy was damaged in memory and is dropped")
        yield _say(Finished(crc=crc))


def _give_code(host: Host, wanted: GetCode) -> Talk[None]:
    given = host.give_code(wanted.version)
    yield _say(OfferCode(size=given.size))
    crc = 0
    for chunk in given.chunks:
        for at in range(0, len(chunk), CODE_PIECE_BYTES):
            piece = memoryview(chunk)[at : at + CODE_PIECE_BYTES]
            crc = zlib.crc32(piece, crc)
            if (yield Send((messages.piece_head(len(piece), crc), piece))):
                _wished((yield from _listen()), Refusal)
    yield _say(Finished(crc=crc))


def _stranger(host: Host, hello: Hello) -> str:
    if abs(hello.version - messages.VERSION) > 1:
        return (
            f"it speaks version {messages.VERSION} of the shard protocol, not {hello.version}:"
            " the everstep versions of the two machines are too far apart"
        )
    if hello.uid != host.uid:
        return f"it belongs to the job with uid {host.uid}, not {hello.uid}"
    if hello.called != host.machine:
        return f"it is machine {host.machine}, not {hello.called}"
    if len(hello.nonce) != messages.NONCE_BYTES:
        return f"it wants a nonce of {messages.NONCE_BYTES} bytes, not {len(hello.nonce)}"
    return ""


# --- both ----------------------------------------------------------------------------------------


def _give(chunks: Sequence[memoryview]) -> Talk[int]:
    """Send all pieces; the checksum of what was sent. Refused if the other end interrupts."""
    crc = 0
    for piece, crc in pieces_of(chunks, PIECE_BYTES):
        head = messages.piece_head(sum(map(len, piece)), crc)
        if (yield Send((head, *piece), bulk=True)):
            _wished((yield from _listen()), Refusal)
    return crc


def _take(payload: memoryview) -> Talk[int]:
    """Receive all pieces and the word that they are all; the checksum."""
    crc = done = 0
    with Checks() as checks:
        while done < len(payload):
            head = yield from _piece_head(len(payload) - done)
            piece, crc = payload[done : done + head.length], head.crc
            yield Fill(piece)
            if not checks.expect(piece, crc):
                raise ProtocolBroken(f"bytes before {done} were changed under way")
            done += len(piece)
        if not checks.right():
            raise ProtocolBroken(f"bytes before {done} were changed under way")
    yield from _end_of_pieces(crc)
    return crc


def _piece_head(most: int) -> Talk[Head]:
    head = yield from _head()
    if head.message:
        _wished(_heard((yield from _rest(head)).message), Refusal)
    if not 0 < head.length <= most:
        raise ProtocolBroken(f"a piece of {head.length} bytes came where {most} is the most")
    return head


def _end_of_pieces(crc: int) -> Talk[None]:
    finished = yield from _hear(Finished)
    if finished.crc != crc:
        raise ProtocolBroken(f"checksum {finished.crc:08x} was sent, {crc:08x} came")


def _say(message: AnyMessage) -> Send:
    return Send((messages.frame(message),))


def _hear(kind: type[_Wished]) -> Talk[_Wished]:
    return _wished((yield from _listen()), kind)


def _listen() -> Talk[AnyMessage]:
    """The next message; Refused if it is a refusal."""
    return _heard((yield from _frame()).message)


def _heard(message: AnyMessage) -> AnyMessage:
    if isinstance(message, Refusal):
        raise Refused(message.reason, again=message.again)
    return message


def _wished(message: AnyMessage, kind: type[_Wished]) -> _Wished:
    if not isinstance(message, kind):
        raise ProtocolBroken(f"a {type(message).__name__} came where a {kind.__name__} was due")
    return message


def _frame() -> Talk[Frame]:
    head = yield from _head()
    if not head.message:
        raise ProtocolBroken(f"a piece of {head.length} bytes came where a message was due")
    return (yield from _rest(head))


def _head() -> Talk[Head]:
    raw = bytearray(messages.HEAD.size)
    yield Fill(memoryview(raw))
    return messages.parse_head(raw)


def _rest(head: Head) -> Talk[Frame]:
    body = bytearray(head.length)
    yield Fill(memoryview(body))
    return Frame(messages.parse(body, head.crc), messages.pack_head(head) + bytes(body))
