"""The protocol without sockets: bytes cut anywhere, changed anywhere, ended anywhere."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.agent.transfer import messages, talk
from everstep.agent.transfer.desk import Desk, Visit
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.messages import ProtocolBroken, TransferFailed, Wanted
from everstep.agent.transfer.talk import Caller, Refused, Send, Talk, WrongToken
from everstep.checkpoint.format import Header, crc_of
from everstep.checkpoint.kept import Kept
from everstep.checkpoint.slots import ShardLost
from everstep.code.store import CodeStore
from tests.agent.transfer.ends import (
    OWNER,
    PEER,
    content,
    get_of,
    kept_steps,
    put_of,
    shared_memory,
)

CLIENT, SERVER = "client", "server"
NONCE = bytes(range(messages.NONCE_BYTES))


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk, "PIECE_BYTES", 64)
        yield


class Ended(TransferFailed):
    """The stream ended before what was wished for had come."""


class Side:
    """One end: its conversation, what came for it, and how it ended."""

    def __init__(self, conversation: Talk[Any]) -> None:
        self.came = bytearray()
        self.sent = 0
        self.result: Any = None
        self.error: Exception | None = None
        self.over = False
        self._talk = conversation
        self._wish = next(conversation)
        self._filled = 0

    def step(self, other: Side, cut: int, damage: Damage) -> bool:
        """Do a little of what is wished; whether anything could be done."""
        wish = self._wish
        if isinstance(wish, Send):
            for part in wish.parts:
                other.came += damage.of(self.sent, bytes(part))
                self.sent += len(part)
            self._go_on(said=bool(self.came))
            return True
        missing = len(wish.into) - self._filled
        count = min(missing, cut, len(self.came))
        wish.into[self._filled : self._filled + count] = self.came[:count]
        del self.came[:count]
        self._filled += count
        if count == missing:
            self._go_on(said=False)
        elif other.over and not self.came:
            self._end(Ended("the stream ended"))
        return count > 0 or count == missing or self.over

    def _go_on(self, *, said: bool) -> None:
        self._filled = 0
        try:
            self._wish = self._talk.send(said)
        except StopIteration as end:
            self.result, self.over = end.value, True
        except Exception as error:  # noqa: BLE001 -- whatever it is, the tests look at it
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._talk.close()
        self.error, self.over = error, True


class Damage(NamedTuple):
    """What happens to the bytes that one side sends."""

    side: str = ""
    at: int = 0
    flip: int = 0
    """Bits to flip in that byte; 0: the stream ends before it."""

    def of(self, before: int, data: bytes) -> bytes:
        if not self.side or not before <= self.at < before + len(data):
            return data if not self.side or self.flip or self.at >= before else b""
        place = self.at - before
        if not self.flip:
            return data[:place]
        return data[:place] + bytes([data[place] ^ self.flip]) + data[place + 1 :]


NONE = Damage()


def serve(visit: Visit) -> Talk[None]:
    wanted: Wanted = yield from talk.greet(visit, NONCE)
    yield from talk.answer(visit, wanted)


def run(
    client: Talk[Any], visit: Visit, cuts: list[int], damage: Damage = NONE
) -> tuple[Side, Side]:
    """Both ends to their end, in pieces of the sizes `cuts`, over and over."""
    sides = {CLIENT: Side(client), SERVER: Side(serve(visit))}
    at = 0
    while not all(side.over for side in sides.values()):
        moved = False
        for name, side in sides.items():
            if side.over:
                continue
            other = sides[SERVER if name == CLIENT else CLIENT]
            mine = damage if damage.side == name else NONE
            moved |= side.step(other, cuts[at % len(cuts)], mine)
            at += 1
        if not moved:  # somebody waits for bytes that were cut off: as if the connection broke
            for side in sides.values():
                if not side.over:
                    side._end(Ended("the stream ended"))
    visit.end()
    return sides[CLIENT], sides[SERVER]


def caller(me: Identity = OWNER, called: Identity = PEER) -> Caller:
    return Caller(
        token=me.token, uid=me.uid, machine=me.machine, called=called.machine, nonce=NONCE[::-1]
    )


def putting(step: int, size: int, safe: int = -1) -> Talk[int]:
    return talk.put(
        caller(), put_of(step, size, safe=safe), [memoryview(content(step, size))], lambda: True
    )


@contextlib.contextmanager
def peer() -> Iterator[tuple[Desk, Kept]]:
    with shared_memory() as shm:
        desk = Desk(PEER, shm, CodeStore(shm / "code"))
        yield desk, desk.kept


CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SIZES = st.integers(0, 300)


@settings(deadline=None, max_examples=40)
@given(size=SIZES, cuts=CUTS)
def test_a_shard_arrives_whole_however_the_bytes_are_cut(size: int, cuts: list[int]) -> None:
    with peer() as (desk, kept):
        client, server = run(putting(7, size), Visit(desk), cuts)
        assert (client.error, server.error, client.result) == (None, None, size)
        assert kept_steps(kept) == [7]
        got = bytearray(size)

        def place(header: Header) -> memoryview:
            assert header.payload_bytes == size
            return memoryview(got)

        client, server = run(talk.fetch(caller(), get_of(7), place), Visit(desk), cuts)
        assert (client.error, server.error) == (None, None)
        assert bytes(got) == content(7, size)
        assert client.result.crc == crc_of(memoryview(content(7, size)))


@settings(deadline=None, max_examples=120)
@given(
    side=st.sampled_from([CLIENT, SERVER]),
    at=st.integers(0, 900),
    flip=st.integers(0, 255),
    cuts=CUTS,
)
def test_a_put_that_is_changed_or_cut_off_offers_nothing_torn_and_keeps_the_former_shard(
    side: str, at: int, flip: int, cuts: list[int]
) -> None:
    with peer() as (desk, kept):
        run(putting(10, 200), Visit(desk), [100])
        client, server = run(putting(20, 300, safe=10), Visit(desk), cuts, Damage(side, at, flip))
        assert 10 in kept_steps(kept)
        for error in (client.error, server.error):
            assert error is None or isinstance(error, TransferFailed)
        if client.error is None:
            assert kept_steps(kept) == [10, 20]


@settings(deadline=None, max_examples=120)
@given(
    side=st.sampled_from([CLIENT, SERVER]),
    at=st.integers(0, 900),
    flip=st.integers(0, 255),
    cuts=CUTS,
)
def test_a_fetch_that_is_changed_or_cut_off_fails_or_brings_the_very_bytes(
    side: str, at: int, flip: int, cuts: list[int]
) -> None:
    with peer() as (desk, kept):
        run(putting(10, 300), Visit(desk), [100])
        got = bytearray(300)
        fetching = talk.fetch(caller(), get_of(10), lambda _: memoryview(got))
        client, server = run(fetching, Visit(desk), cuts, Damage(side, at, flip))
        for error in (client.error, server.error):
            assert error is None or isinstance(error, TransferFailed)
        if client.error is None:
            assert bytes(got) == content(10, 300)
        assert kept_steps(kept) == [10]


@settings(deadline=None, max_examples=60)
@given(garbage=st.binary(min_size=1, max_size=300))
def test_garbage_is_refused_and_changes_nothing(garbage: bytes) -> None:
    def spit() -> Talk[None]:
        yield Send((garbage,))

    with peer() as (desk, kept):
        _, server = run(spit(), Visit(desk), [50])
        assert isinstance(server.error, ProtocolBroken | Ended)
        assert kept.inventory() == []


@settings(deadline=None, max_examples=60)
@given(body=st.binary(max_size=100))
def test_a_whole_frame_of_garbage_is_refused(body: bytes) -> None:
    def spit() -> Talk[None]:
        yield Send((messages.HEAD.pack(b"EVSM", len(body), zlib.crc32(body)), body))

    with peer() as (desk, _):
        _, server = run(spit(), Visit(desk), [50])
        assert isinstance(server.error, ProtocolBroken)


def test_an_announced_length_beyond_reason_is_not_waited_for() -> None:
    for raw in (
        messages.HEAD.pack(b"EVSM", messages.MESSAGE_BYTES_MAX + 1, 0),
        messages.HEAD.pack(b"EVSP", messages.PIECE_BYTES_MAX + 1, 0),
        messages.HEAD.pack(b"HTTP", 3, 0),
    ):
        with pytest.raises(ProtocolBroken):
            messages.parse_head(raw)


def test_neither_end_goes_on_with_one_that_has_another_token() -> None:
    thief = OWNER._replace(token=b"guessed")
    with peer() as (desk, kept):
        stolen = talk.put(caller(thief), put_of(1), [memoryview(content(1))], lambda: True)
        client, _ = run(stolen, Visit(desk), [999])
        assert isinstance(client.error, WrongToken)
        assert kept.inventory() == []


def test_a_caller_that_cannot_prove_itself_is_refused_although_it_goes_on_regardless() -> None:
    """The server's proof is there for the taking; without the token the client has none."""
    body = messages.encode_wanted(put_of(1))

    def forger() -> Talk[None]:
        hello = messages.Hello(
            version=1, uid=OWNER.uid, caller=OWNER.machine, called=PEER.machine, nonce=NONCE
        )
        yield Send((messages.frame(hello),))
        challenge = yield from talk._hear(messages.Challenge)
        yield talk._say(messages.Request(proof=challenge.proof, body=body))
        yield from talk._listen()

    with peer() as (desk, kept):
        client, server = run(forger(), Visit(desk), [999])
        assert isinstance(server.error, WrongToken)
        assert isinstance(client.error, Refused)
        assert kept.inventory() == []


def test_a_recorded_conversation_cannot_be_played_again() -> None:
    """The server's nonce is another one then, so the recorded proof is worth nothing."""
    sent: list[bytes] = []

    def recorder() -> Talk[int]:
        talking = putting(1, 100)
        wish = next(talking)
        try:
            while True:
                if isinstance(wish, Send):
                    sent.append(b"".join(wish.parts))
                wish = talking.send((yield wish))
        except StopIteration as end:
            result: int = end.value
            return result

    def player() -> Talk[None]:
        yield Send((b"".join(sent),))

    with peer() as (desk, _):
        run(recorder(), Visit(desk), [999])
    with peer() as (desk, kept):
        visit = Visit(desk)
        talking = talk.greet(visit, NONCE[::-1])
        side = Side(talking)
        side.came += b"".join(sent)
        nobody = Side(player())
        nobody.over = True
        while not side.over:
            side.step(nobody, 999, NONE)
        assert isinstance(side.error, WrongToken)
        assert kept.inventory() == []


@pytest.mark.parametrize(
    ("me", "called", "sentence"),
    [
        (
            OWNER._replace(uid="beef0002"),
            PEER,
            "it belongs to the job with uid cafe0001, not beef0002",
        ),
        (OWNER, OWNER, "it is machine peer, not owner"),
    ],
)
def test_another_job_or_machine_is_told_apart_by_name(
    me: Identity, called: Identity, sentence: str
) -> None:
    with peer() as (desk, _):
        talking = talk.put(caller(me, called), put_of(1), [memoryview(content(1))], lambda: True)
        client, _ = run(talking, Visit(desk), [999])
        assert isinstance(client.error, Refused)
        assert str(client.error) == sentence
        assert not client.error.again


def test_a_peer_that_has_the_shard_already_is_not_sent_it_again() -> None:
    with peer() as (desk, kept):
        run(putting(5, 200), Visit(desk), [999])
        client, _ = run(putting(5, 200), Visit(desk), [999])
        assert client.result == 0
        assert kept_steps(kept) == [5]


def test_an_owner_whose_slot_was_overwritten_under_way_has_nothing_stored() -> None:
    with peer() as (desk, kept):
        talking = talk.put(caller(), put_of(5), [memoryview(content(5))], lambda: False)
        client, server = run(talking, Visit(desk), [999])
        assert isinstance(client.error, ShardLost)
        assert isinstance(server.error, Ended)
        assert kept.inventory() == []


def test_a_checksum_that_does_not_fit_an_empty_shard_is_noticed() -> None:
    def liar() -> Talk[None]:
        yield from talk._call(caller(), put_of(5, 0))
        yield from talk._hear(messages.Ready)
        yield talk._say(messages.Finished(crc=7))
        yield from talk._listen()

    with peer() as (desk, kept):
        client, _ = run(liar(), Visit(desk), [999])
        assert isinstance(client.error, Refused)
        assert kept.inventory() == []
