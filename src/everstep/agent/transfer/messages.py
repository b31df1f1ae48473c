"""What two agents say to each other about shards and code, and how that looks on the wire. Pure.

One connection carries one transfer. Everything is framed: a tag of four bytes, a length, a CRC-32,
then so many bytes, either a message (msgpack) or a piece of a shard's payload.

    client: Hello(nonce)
    server: Challenge(nonce, proof of the server)
    client: Request(proof of the client, Put | Get | GetCode)
    Put:    server: Ready -> client: pieces, Finished -> server: Stored       (or server: Stored)
    Get:    server: Offer, pieces, Finished
    GetCode:  server: OfferCode, pieces, Finished

Either side may say Refusal instead of what is due and close. The proofs are HMAC-SHA256 with the
job's token over everything said so far, so each end knows that the other has the token, which is
never sent, and that both mean the same job, the same two machines and the same request. That keeps
strangers and strays out; it is no encryption, and whoever can change packets under way is on the
training network already.

Checksums of pieces run on from piece to piece: the last one is that of the whole payload.
"""

from __future__ import annotations

import hmac
import struct
import zlib
from typing import Final, TypeVar

import msgspec

from everstep.checkpoint.format import Header
from everstep.model import EverstepError, Generation, MachineId, Rank, Step, Value, VersionId

VERSION = 1
TAG_MESSAGE: Final = b"EVSM"
TAG_PIECE: Final = b"EVSP"
HEAD = struct.Struct("<4sII")
MESSAGE_BYTES_MAX = 8192
"""A longer one is garbage: names and sentences fit many times."""
PIECE_BYTES_MAX = 16 << 20
NONCE_BYTES = 32


class TransferFailed(EverstepError):
    """A shard did not get over. `again`: the same attempt may well succeed in a moment."""

    again = False


class ProtocolBroken(TransferFailed):
    """What came is not what this protocol has at this place, or it was changed under way."""

    again = True


class Message(Value, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the class name is the tag."""


class Hello(Message, frozen=True, kw_only=True):
    """Who calls, and whom."""

    version: int
    uid: str
    """Of the job's submission."""
    caller: MachineId
    called: MachineId
    nonce: bytes


class Challenge(Message, frozen=True, kw_only=True):
    """The server has the token; now the client shall prove it."""

    nonce: bytes
    proof: bytes


class Put(Message, frozen=True, kw_only=True):
    """Keep this shard."""

    header: Header
    safe: Step
    """The machine-safe step: its backup must not be overwritten."""
    order_generation: Generation
    """The one that ordered this backup: an older one than the receiver's is over."""


class Get(Message, frozen=True, kw_only=True):
    """Give this shard."""

    rank: Rank
    step: Step
    generation: Generation
    world_size: int
    reader: Rank | None = None
    """None: as it is kept here. Else only its slices of what this rank holds, too, which may also
    come from what the given rank saved here itself."""


class GetCode(Message, frozen=True, kw_only=True):
    """Give this code version."""

    version: VersionId


class Request(Message, frozen=True, kw_only=True):
    """What the client wants, with its proof."""

    proof: bytes
    body: bytes
    """An encoded Put, Get or GetCode."""


class Ready(Message, frozen=True, kw_only=True):
    """The memory is reserved: send."""


class Offer(Message, frozen=True, kw_only=True):
    """The shard that follows."""

    header: Header


class OfferCode(Message, frozen=True, kw_only=True):
    """The archive that follows (code/store.py)."""

    size: int


class Finished(Message, frozen=True, kw_only=True):
    """That was the whole payload, and its sender vouches for it."""

    crc: int


class Stored(Message, frozen=True, kw_only=True):
    """The shard is kept here, whole."""


class Refusal(Message, frozen=True, kw_only=True):
    """No, and why: one sentence without the name of who says it."""

    reason: str
    again: bool = False
    """Whether it may be otherwise in a second."""


AnyMessage = Hello | Challenge | Request | Ready | Offer | OfferCode | Finished | Stored | Refusal
Wanted = Put | Get | GetCode

_Decoded = TypeVar("_Decoded")
_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_WANTED: msgspec.msgpack.Decoder[Wanted] = msgspec.msgpack.Decoder(Wanted)


class Head(Value, frozen=True, kw_only=True):
    """The twelve bytes in front of every frame."""

    message: bool
    """Else a piece of a payload."""
    length: int
    crc: int


def pack_head(head: Head) -> bytes:
    return HEAD.pack(TAG_MESSAGE if head.message else TAG_PIECE, head.length, head.crc)


def frame(message: AnyMessage) -> bytes:
    body = _ENCODER.encode(message)
    return pack_head(Head(message=True, length=len(body), crc=zlib.crc32(body))) + body


def piece_head(length: int, running_crc: int) -> bytes:
    """In front of a piece after which the payload's checksum is `running_crc`."""
    return pack_head(Head(message=False, length=length, crc=running_crc))


def parse_head(raw: bytes | bytearray) -> Head:
    """Raises ProtocolBroken for what no side of this protocol sends."""
    tag, length, crc = HEAD.unpack(raw)
    if tag not in (TAG_MESSAGE, TAG_PIECE):
        raise ProtocolBroken(f"{bytes(raw[:4])!r} came: the other end speaks another protocol")
    most = MESSAGE_BYTES_MAX if tag == TAG_MESSAGE else PIECE_BYTES_MAX
    if length > most:
        raise ProtocolBroken(f"{length} bytes were announced where {most} is the most")
    return Head(message=tag == TAG_MESSAGE, length=length, crc=crc)


def parse(body: bytes | bytearray, crc: int) -> AnyMessage:
    """Raises ProtocolBroken for anything but a whole message."""
    if zlib.crc32(body) != crc:
        raise ProtocolBroken(f"a message of {len(body)} bytes was changed under way")
    return _decode(_MESSAGES, body)


def encode_wanted(wanted: Wanted) -> bytes:
    return _ENCODER.encode(wanted)


def parse_wanted(body: bytes) -> Wanted:
    """Raises ProtocolBroken."""
    return _decode(_WANTED, body)


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], body: bytes | bytearray) -> _Decoded:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolBroken(f"{len(body)} bytes came that are no message: {error}") from None


# --- proofs --------------------------------------------------------------------------------------


class Proofs:
    """Both ends' proofs for one connection, made from what was said on it."""

    def __init__(self, token: bytes, greeting: bytes, server_nonce: bytes) -> None:
        """`greeting`: the bytes of Hello's frame as they went over the connection."""
        self._token = token
        self._said = struct.pack("<I", len(greeting)) + greeting + server_nonce

    def server(self) -> bytes:
        return self._proof(b"everstep shard server")

    def client(self, body: bytes) -> bytes:
        """Also vouches for the request."""
        return self._proof(b"everstep shard client", body)

    def _proof(self, label: bytes, more: bytes = b"") -> bytes:
        return hmac.digest(self._token, label + b"\0" + self._said + more, "sha256")


def same_proof(one: bytes, other: bytes) -> bool:
    """Compare without telling by the time taken where they differ."""
    return hmac.compare_digest(one, other)
