"""What the agent asks of the launcher: fork ranks, or try a code version. Messages and framing.

One connection on the launcher's Unix socket carries one request: the launcher greets when it is
ready to work (so the agent knows that a silent connection was lost to a launcher that died before
it did anything), the agent sends a ForkRequest, the launcher answers with a ForkReply. A TryRequest
is answered with a TryReply by the process that the launcher forked for it. Every message is msgpack
behind its length in four bytes.
"""

from __future__ import annotations

import struct
from typing import Protocol, TypeVar

import msgspec

from everstep.agent.placing import Places
from everstep.model import EverstepError, Rank, Seconds, Value, VersionId

GREETING = b"everstep launcher 2\n"
"""Sent by the launcher when it takes a connection."""
MESSAGE_BYTES_MAX = 64 << 20
"""A longer message is garbage: environments of a few hundred ranks fit many times."""
LENGTH = struct.Struct("<I")


class MessageBroken(EverstepError):
    """What came over the launcher's socket is not a message of ours, or ended in its middle."""


class NothingCame(MessageBroken):
    """The other end closed the connection and said nothing."""


class RankPlan(Value, frozen=True, kw_only=True):
    """One rank to start."""

    rank: Rank
    slot: int
    """Index of its heartbeat slot: its local rank."""
    env: dict[str, str]
    """Set on top of the environment that the launcher was started with."""
    log: str
    """File that takes standard output and error, appended to."""


class ForkRequest(Value, frozen=True, kw_only=True, tag=True):
    """Everything about the local ranks of one generation."""

    generation: int
    command: tuple[str, ...]
    module: bool
    no_python: bool
    no_fork: bool
    working_dir: str
    heartbeat: str
    """File of the heartbeat slots."""
    ranks: tuple[RankPlan, ...]
    places: Places = ()
    """Where the code version lies, if not in its source roots."""


class TryRequest(Value, frozen=True, kw_only=True, tag=True):
    """Import what the script of a code version imports, in a process that then ends."""

    version: VersionId
    command: tuple[str, ...]
    module: bool
    working_dir: str
    roots: tuple[str, ...]
    """Where the version's roots lie."""
    places: Places
    files: tuple[str, ...]
    """All of its files below these."""
    to_compile: tuple[str, ...]
    """Those that must be sound Python, imported or not."""
    within_s: Seconds
    beside_ranks: bool
    """Let it see no GPU, and ask for the processor last."""


class TryReply(Value, frozen=True, kw_only=True, tag=True):
    """As VersionTried has it."""

    problem: str = ""
    detail: str = ""
    untold: str = ""
    elsewhere: tuple[str, ...] = ()
    took_s: Seconds = 0.0


class Trying(Value, frozen=True, kw_only=True, tag=True):
    """What a trial does next, as a clause: if it ends without a reply, that is what ended it."""

    what: str


class Forked(Value, frozen=True, kw_only=True):
    """What a new rank says about itself, after its heartbeat slot says the same."""

    rank: Rank
    pid: int
    start_ticks: int
    problem: str = ""
    """Why it could not become a rank; empty if it did."""


class ForkReply(Value, frozen=True, kw_only=True):
    """Answer to a ForkRequest: all ranks run, or one sentence why not."""

    ranks: tuple[Forked, ...] = ()
    problem: str = ""


_Message = TypeVar("_Message", bound=Value)
Request = ForkRequest | TryRequest
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class Readable(Protocol):
    """Reads exactly so many bytes, fewer only at the end of the stream (a file, a socket file)."""

    def read(self, size: int, /) -> bytes | None: ...


def frame(message: Value) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def parse(body: bytes, of: type[_Message]) -> _Message:
    """Raises MessageBroken on anything but such a message."""
    try:
        return msgspec.msgpack.decode(body, type=of)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageBroken(f"{len(body)} bytes came that are no {of.__name__}: {error}") from None


def length_of(header: bytes) -> int:
    """Length of the body behind this header of four bytes."""
    if len(header) != LENGTH.size:
        raise NothingCame("the connection ended before a message came")
    (length,) = LENGTH.unpack(header)
    if length > MESSAGE_BYTES_MAX:
        raise MessageBroken(f"a message of {length} bytes was announced: that is garbage")
    return int(length)


def read(stream: Readable, of: type[_Message]) -> _Message:
    """The next message of a blocking stream. MessageBroken if there is none."""
    return parse(_body(stream), of)


def read_request(stream: Readable) -> Request:
    """What an agent asks. MessageBroken if it asks nothing."""
    body = _body(stream)
    try:
        return _REQUESTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageBroken(f"{len(body)} bytes came that are no request: {error}") from None


def _body(stream: Readable) -> bytes:
    length = length_of(stream.read(LENGTH.size) or b"")
    body = stream.read(length) or b""
    if len(body) != length:
        raise MessageBroken(f"the connection ended after {len(body)} of {length} bytes")
    return body
