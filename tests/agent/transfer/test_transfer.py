"""Real servers and clients over the loopback: every way in which a transfer may go wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.agent.transfer import channel, client, server
from everstep.agent.transfer.channel import Cancel, Cancelled, Limits, PeerGone
from everstep.agent.transfer.client import Client, Way
from everstep.agent.transfer.desk import Visit
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.listening import bind
from everstep.agent.transfer.messages import TransferFailed
from everstep.agent.transfer.pace import TokenBucket
from everstep.agent.transfer.talk import PIECE_BYTES, Refused, WrongToken
from everstep.checkpoint.format import PAGE, Expected
from everstep.model import Generation, MachineId, Rank, Step
from everstep.paths import kept_shm, rank_shm
from tests.agent.support import wait_for
from tests.agent.transfer.ends import (
    OWNER,
    TOKEN,
    Machine,
    bring,
    content,
    get_of,
    kept_content,
    kept_steps,
    machine,
    peer_at,
    put_of,
    send,
    shared_memory,
)

LARGE = 2 * PIECE_BYTES + 12345
IMPATIENT = Limits(stall_s=0.2)


@pytest.fixture
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not try again."""
    monkeypatch.setattr(client, "RETRY_AFTER_S", ())


def test_shards_go_over_in_both_directions_several_at_once() -> None:
    with machine() as peer, ThreadPoolExecutor(4) as pool:
        puts = [put_of(3, LARGE + rank, rank=rank) for rank in range(4)]
        assert list(pool.map(lambda put: send(peer.peer, put), puts)) == [
            put.header.payload_bytes for put in puts
        ]
        got = list(pool.map(lambda rank: bring(peer.peer, get_of(3, rank)), range(4)))
        assert got == [content(3, LARGE + rank, rank) for rank in range(4)]
        assert peer.said == []


def test_two_backups_are_kept_and_the_safe_one_is_never_overwritten() -> None:
    with machine() as peer:
        held = []
        for step, safe in ((10, -1), (20, 10), (30, 10), (40, 30), (50, 40)):
            send(peer.peer, put_of(step, safe=safe))
            held.append(kept_steps(peer.kept))
        assert held == [[10], [10, 20], [10, 30], [30, 40], [40, 50]]


def test_a_backup_survives_the_agent_that_took_it() -> None:
    with shared_memory() as shm:
        first = Machine(shm)
        send(first.peer, put_of(10, LARGE))
        port = first.server.port
        first.server.close()
        second = Machine(shm, port=port)
        assert kept_content(second.kept, 10) == content(10, LARGE)
        send(second.peer, put_of(20, LARGE, safe=10))
        assert kept_steps(second.kept) == [10, 20]
        second.server.close()


@pytest.mark.parametrize(
    ("me", "error", "sentence"),
    [
        (
            Identity(b"other", OWNER.uid, OWNER.machine),
            WrongToken,
            "does not know this job's token",
        ),
        (Identity(TOKEN, "beef", OWNER.machine), Refused, "belongs to the job with uid cafe0001"),
    ],
)
def test_strangers_are_told_in_one_sentence_with_name_and_address(
    me: Identity, error: type[TransferFailed], sentence: str
) -> None:
    with machine() as peer:
        with pytest.raises(error, match=sentence) as caught:
            send(peer.peer, put_of(1), me=me)
        assert str(caught.value).startswith(f"peer at 127.0.0.1:{peer.server.port}: it ")
        assert peer.kept.inventory() == []
        assert send(peer.peer, put_of(1)) == 1000


def test_a_port_that_another_machine_got_since_is_noticed() -> None:
    with machine() as peer, pytest.raises(Refused, match="it is machine peer, not gone"):
        send(peer_at(peer.server.port, MachineId("gone")), put_of(1))


def test_a_backup_of_a_generation_that_is_over_is_refused() -> None:
    with machine() as peer:
        peer.desk.fence(Generation(3))
        with pytest.raises(Refused, match="generation 2 is over, it is at generation 3"):
            send(peer.peer, put_of(1, order=2))
        assert send(peer.peer, put_of(1, order=3)) == 1000


def test_a_shard_that_has_no_room_is_refused_with_the_figures_and_the_option() -> None:
    with machine() as peer:
        huge = put_of(1)
        huge = type(huge)(
            header=type(huge.header)(
                step=Step(1),
                generation=Generation(1),
                rank=Rank(0),
                world_size=4,
                sequence=1,
                payload_bytes=1 << 50,
                digest=0,
            ),
            safe=Step(-1),
            order_generation=Generation(1),
        )
        with pytest.raises(Refused, match=r"2048 TiB more .* has .* left: .*--no-backup"):
            Client(OWNER).put(peer.peer, huge, [memoryview(b"")], lambda: True, Way(Cancel()))
        assert peer.kept.inventory() == []


def flip_bit(shm: Path, step: int, at: int) -> None:
    """Damage a kept payload where it lies."""
    directory = rank_shm(kept_shm(shm), Rank(0))
    for path in directory.glob("slot-*"):
        with path.open("r+b") as file:
            file.seek(PAGE)
            if file.read(20) == content(step)[:20]:
                file.seek(PAGE + at)
                byte = file.read(1)[0]
                file.seek(PAGE + at)
                file.write(bytes([byte ^ 16]))


@pytest.mark.usefixtures("_once")
def test_a_flipped_bit_in_a_kept_shard_is_found_and_the_copy_is_offered_no_more() -> None:
    with shared_memory() as shm:
        peer = Machine(shm)
        send(peer.peer, put_of(10))
        send(peer.peer, put_of(20, safe=10))
        flip_bit(shm, 20, at=700)
        with pytest.raises(Refused, match="damaged in memory and is dropped"):
            bring(peer.peer, get_of(20))
        assert kept_steps(peer.kept) == [10]
        with pytest.raises(Refused, match="no backup of rank 0, step 20, generation 1 is kept"):
            bring(peer.peer, get_of(20))
        assert bring(peer.peer, get_of(10)) == content(10)
        peer.server.close()


def test_a_shard_of_another_generation_or_world_is_not_what_was_asked_for() -> None:
    with machine() as peer:
        send(peer.peer, put_of(10))
        with pytest.raises(Refused, match="generation 2 is kept"):
            bring(peer.peer, get_of(10, generation=2))


@pytest.mark.usefixtures("_once")
def test_a_slot_that_is_being_fetched_is_not_overwritten() -> None:
    with machine() as peer:
        send(peer.peer, put_of(10))
        send(peer.peer, put_of(20, safe=10))
        with (
            peer.kept.open(Expected(step=Step(20), rank=Rank(0))),
            pytest.raises(Refused, match="both backups of rank 0 are needed"),
        ):
            send(peer.peer, put_of(30, safe=10))
        assert kept_steps(peer.kept) == [10, 20]
        send(peer.peer, put_of(30, safe=10))
        assert kept_steps(peer.kept) == [10, 30]


# --- peers that are gone, silent or slow ---------------------------------------------------------


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """The port of somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.usefixtures("_once")
def test_a_peer_that_says_nothing_costs_a_bounded_time() -> None:
    with silent() as port, pytest.raises(PeerGone, match=r"nothing came from it for 0\.2 s"):
        send(peer_at(port), put_of(1), limits=IMPATIENT)


@pytest.mark.usefixtures("_once")
def test_a_peer_that_is_not_there_is_named_with_its_address() -> None:
    with silent() as port:
        pass
    with pytest.raises(PeerGone, match=rf"peer at 127\.0\.0\.1:{port}: no connection: .*refused"):
        send(peer_at(port), put_of(1))


def test_a_peer_that_comes_back_in_time_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_memory() as shm:
        first = Machine(shm)
        port = first.server.port
        first.server.close()
        tries: list[object] = []
        connect = client._connect
        machines: list[Machine] = []

        def come_back(peer: object) -> socket.socket:
            tries.append(peer)
            if len(tries) == 3:
                machines.append(Machine(shm, port=port))
            return connect(peer_at(port))

        monkeypatch.setattr(client, "_connect", come_back)
        assert send(peer_at(port), put_of(1)) == 1000
        assert len(tries) == 3
        machines[0].server.close()


class Stuck(TokenBucket):
    """Lets nothing through."""

    asked = False

    def take(self, count: int, now: float) -> float:
        del count, now
        self.asked = True
        return 1000.0


def hanging(peer: Machine, wanted_step: int, *, order: int = 1) -> tuple[threading.Thread, Cancel]:
    """A put that has begun and stands still in the middle, as one whose machine was frozen."""
    cancel, pace = Cancel(), Stuck(1.0)
    way = Way(cancel, pace)
    errors: list[TransferFailed] = []

    def put() -> None:
        try:
            send(peer.peer, put_of(wanted_step, LARGE, order=order), way)
        except TransferFailed as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    wait_for("the transfer to begin", lambda: pace.asked)
    return thread, cancel


def test_a_transfer_that_is_cancelled_ends_at_once_and_leaves_nothing() -> None:
    with machine() as peer:
        thread, cancel = hanging(peer, 10)
        cancel.cancel()
        thread.join(60)
        assert not thread.is_alive()
        wait_for("the other end to notice", lambda: not peer.desk._incoming)
        assert peer.kept.inventory() == []
        with pytest.raises(Cancelled):
            send(peer.peer, put_of(10), Way(cancel))


@pytest.mark.usefixtures("_once")
def test_a_new_transfer_of_a_rank_ends_the_one_that_hangs() -> None:
    with machine() as peer:
        thread, cancel = hanging(peer, 10)
        assert send(peer.peer, put_of(20, LARGE)) == LARGE
        assert kept_steps(peer.kept) == [20]
        cancel.cancel()
        thread.join(60)
        assert not thread.is_alive()


def test_a_new_generation_ends_what_the_old_one_ordered() -> None:
    with machine() as peer:
        send(peer.peer, put_of(5))
        thread, cancel = hanging(peer, 10, order=1)
        peer.desk.fence(Generation(2))
        settled = peer.kept.inventory()
        wait_for("the void transfer to end", lambda: not peer.desk._incoming)
        cancel.cancel()
        thread.join(60)
        assert peer.kept.inventory() == settled
        assert kept_steps(peer.kept) == [5]


def test_nothing_is_committed_once_its_generation_is_over() -> None:
    with machine() as peer:
        visit, put = Visit(peer.desk), put_of(10)
        taking = visit.take(put)
        peer.desk.fence(Generation(2))
        with pytest.raises(Refused, match="generation 1 is over"):
            visit.store(taking, 0)
        assert peer.kept.inventory() == []


def test_nothing_is_overwritten_once_its_generation_is_over() -> None:
    with machine() as peer:
        send(peer.peer, put_of(10))
        send(peer.peer, put_of(20, safe=10))
        visit = Visit(peer.desk)
        assert not visit.holds(put_of(30))
        peer.desk.fence(Generation(2))
        with pytest.raises(Refused, match="generation 1 is over"):
            visit.take(put_of(30))
        assert kept_steps(peer.kept) == [10, 20]


def test_whoever_connects_and_does_not_prove_itself_is_sent_away_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "GREET_WITHIN_S", 0.2)
    with machine() as peer, socket.create_connection(("127.0.0.1", peer.server.port)) as stranger:
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
        wait_for("one line about it", lambda: len(peer.said) == 1)


def test_garbage_does_not_keep_the_server_from_its_work() -> None:
    with machine() as peer:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"EVSM" + b"\xff" * 8):
            with socket.create_connection(("127.0.0.1", peer.server.port)) as stranger:
                stranger.settimeout(10)
                stranger.sendall(garbage)
                try:
                    assert stranger.recv(1) == b""
                except ConnectionResetError:
                    continue
        assert send(peer.peer, put_of(1)) == 1000
        assert 1 <= len(peer.said) <= 3


def test_only_so_many_connections_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    with machine() as peer:
        address = ("127.0.0.1", peer.server.port)
        three = [socket.create_connection(address) for _ in range(3)]
        wait_for("three visits", lambda: len(peer.server._visits) == 3)
        with socket.create_connection(address) as fourth:
            fourth.settimeout(10)
            assert fourth.recv(1) == b""
        for connection in three:
            connection.close()
        wait_for("them to leave", lambda: not peer.server._visits)
        assert send(peer.peer, put_of(1)) == 1000


def test_a_refusal_in_the_middle_of_a_payload_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_AFTER_S", ())
    monkeypatch.setattr(channel, "LINGER_S", 5.0)
    damage_once(monkeypatch)
    with machine() as peer:
        with pytest.raises(Refused, match="were changed under way"):
            send(peer.peer, put_of(1, 40 * PIECE_BYTES))
        assert peer.kept.inventory() == []


def test_a_piece_that_was_changed_under_way_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = damage_once(monkeypatch)
    with machine() as peer:
        assert send(peer.peer, put_of(1, LARGE)) == LARGE
        assert kept_steps(peer.kept) == [1]
        assert damaged() == 1


def damage_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The network flips a bit of the first large piece that is sent from here on."""
    sendmsg = channel.Channel._send
    count = 0

    def send(self: channel.Channel, parts: list[memoryview]) -> None:
        nonlocal count
        if len(parts) == 2 and not count:
            count += 1
            changed = bytearray(parts[1])
            changed[77] ^= 1
            parts = [parts[0], memoryview(changed)]
        sendmsg(self, parts)

    monkeypatch.setattr(channel.Channel, "_send", send)
    return lambda: count


# --- small parts ---------------------------------------------------------------------------------


def test_the_server_takes_the_port_of_its_predecessor_or_another_one() -> None:
    said: list[str] = []
    first = bind("127.0.0.1", 0, said.append)
    port = first.getsockname()[1]
    first.close()
    again = bind("127.0.0.1", port, said.append)
    again.listen()
    assert again.getsockname()[:2] == ("127.0.0.1", port)
    third = bind("127.0.0.1", port, said.append)
    assert third.getsockname()[1] != port
    assert said == []
    again.close()
    third.close()


def test_a_machine_whose_address_is_not_its_own_listens_everywhere_and_says_so() -> None:
    said: list[str] = []
    bound = bind("192.0.2.1", 0, said.append)
    assert bound.getsockname()[0] in ("::", "0.0.0.0")
    assert "192.0.2.1 is no address of this host" in said[0]
    bound.close()
