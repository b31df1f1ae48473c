"""The node service: an ordinary user's agent hears what only root may read."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from everstep.agent.checks.check import Here, NotReadable
from everstep.agent.checks.kernel.feed import MESSAGE_MAX, NodeFeed, NodeNews
from everstep.agent.checks.kernel.kmsg import Kmsg, boot_id
from everstep.agent.checks.kernel.lines import KernelLog
from everstep.agent.checks.kernel.source import KernelSource
from everstep.agent.checks.node import OF_ONE_USER, UNREAD_MAX, NodeService, _Client, serve
from everstep.model import UserError
from tests.agent.checks.kernel.kernel_logs import (
    KMSG,
    NOBODY,
    alone,
    as_nobody,
    broken,
    line,
    log,
    own_address,
    write,
)

SERVE = """
import sys
from pathlib import Path
from everstep.agent.checks.node import serve
serve(Path(sys.argv[1]), say=lambda text: print(text, flush=True))
"""
HERE = Here()
BOOT = boot_id(Path("/"))


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where everybody may go: the tests' own directories are root's."""
    made = Path(tempfile.mkdtemp(prefix="everstep-node-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


class Service(NamedTuple):
    """A node service in a process of its own."""

    path: Path
    process: subprocess.Popen[str]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def started(path: Path) -> Service:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert str(path) in process.stdout.readline()
    return Service(path, process)


@pytest.fixture
def service(directory: Path) -> Iterator[Service]:
    made = started(directory / "node.sock")
    yield made
    made.process.kill()
    made.process.wait()
    assert made.process.stdout is not None
    made.process.stdout.close()


def until(look: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def sampled(source: KernelSource, here: Here) -> KernelLog:
    """A loaded machine may need longer than the source waits for the first answer."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return source.sample(here)
        except NotReadable as reason:
            if "not answered" not in str(reason) or time.monotonic() > deadline:
                raise


def hears(feed: NodeFeed, address: str) -> bool:
    feed.look()
    if feed._newest is None:
        return False
    return any(each.names.get("pci") == address for each in feed.known().lines)


def test_a_client_hears_what_was_and_what_comes(service: Service) -> None:
    before, after = own_address(), own_address()
    write(broken(before))
    with_reader = Kmsg(KMSG, BOOT)
    with_reader.look()
    feed = NodeFeed(service.path, BOOT)
    until(lambda: hears(feed, before))
    write(broken(after))
    until(lambda: hears(feed, after))
    known = feed.known()
    assert known.by == "node service"
    assert known.boot_id == BOOT
    assert known.seq >= with_reader.seq
    assert known.pstore is not None
    feed.close()
    with_reader.close()


def test_a_user_hears_of_devices_but_not_of_others_processes(service: Service) -> None:
    address, mark = own_address(), os.urandom(4).hex()
    write(broken(address))
    write(f"INFO: task {mark}:{os.getpid()} blocked for more than 120 seconds.")
    here = Here(root="/nowhere", boot_id=BOOT, node_socket=str(service.path))

    def listening() -> str:
        source = KernelSource()
        until(lambda: address in str(sampled(source, here).lines))
        return msgspec.json.encode(source.sample(here).lines).decode()

    said = as_nobody(listening)
    assert broken(address) in said
    assert mark not in said
    assert str(os.getpid()) not in said
    assert "a process of another user" in said
    feed = NodeFeed(service.path, BOOT)
    until(lambda: hears(feed, address))
    assert mark in str(feed.known().lines)
    feed.close()


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:05:00): 31, pid=4711, name=secret, Ch 00000008",
        "NVRM: Xid (PCI:0000:05:00): 31, pid='4711', name=secret, Ch 00000008",
        "EXT4-fs error (device sda1): ext4_find_entry:1684: inode #2: comm secret: reading 0",
        "secret: attempt to access beyond end of device sda6: rw=0, sector=4, nr_sectors = 1",
    ],
)
def test_a_process_that_a_line_only_mentions_is_roots_to_know(text: str) -> None:
    reader = Kmsg(KMSG, BOOT)
    service = NodeService(reader, socket.socket(), Path("/"), print)
    known = log(line(7, 1.0, text))
    assert known.lines, "a rule knows it"
    shown = service._message(known, NOBODY).decode()
    assert "secret" not in shown
    assert "4711" not in shown
    assert "(process)" in shown
    assert "secret" in service._message(known, 0).decode()
    service._selector.close()
    service._listener.close()
    reader.close()


def test_no_user_keeps_the_others_out(service: Service) -> None:
    """And who tries gets no line of the log for each try."""

    def greedy() -> str:
        held = []
        for _ in range(OF_ONE_USER + 8):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(20)
            connection.connect(str(service.path))
            held.append(connection)
        return str(sum(bool(each.recv(1)) for each in held))

    assert as_nobody(greedy) == f"{OF_ONE_USER}"
    feed = NodeFeed(service.path, BOOT)
    address = own_address()
    write(broken(address))
    until(lambda: hears(feed, address))
    feed.close()
    assert service.process.stdout is not None
    assert f"of user {NOBODY}: no more" in service.process.stdout.readline()
    service.end()
    assert service.process.stdout.read() == ""


def test_a_user_hears_of_his_own_processes(service: Service) -> None:
    mark = os.urandom(4).hex()
    here = Here(root="/nowhere", boot_id=BOOT, node_socket=str(service.path))
    reading, writing = os.pipe()

    def listening() -> str:
        os.write(writing, f"{os.getpid()}\n".encode())
        source = KernelSource()
        until(lambda: mark in str(sampled(source, here).lines))
        return "heard"

    child = os.fork()
    if child == 0:
        with os.fdopen(reading) as told:
            pid = int(told.readline())
        write(f"INFO: task {mark}:{pid} blocked for more than 120 seconds.")
        os._exit(0)
    assert as_nobody(listening) == "heard"
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


def test_a_server_of_another_user_is_not_believed(directory: Path) -> None:
    directory.chmod(0o777)
    path = directory / "node.sock"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)

        def false_server() -> str:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen()
                os.read(reading, 1)
            return ""

        as_nobody(false_server)
        os._exit(0)
    os.close(reading)
    try:
        until(lambda: _listens(path))
        with pytest.raises(NotReadable, match=f"user {NOBODY}"):
            NodeFeed(path, BOOT)
        source = KernelSource()
        with pytest.raises(NotReadable, match=f"user {NOBODY}"):
            source.sample(Here(root="/nowhere", boot_id=BOOT, node_socket=str(path)))
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def test_a_client_that_talks_is_hung_up_on_and_no_other(service: Service) -> None:
    feed = NodeFeed(service.path, BOOT)
    rude = socket.socket(socket.AF_UNIX)
    rude.connect(str(service.path))
    rude.settimeout(20)
    rude.sendall(b"\x00garbage" * 100)
    with rude:
        try:
            while rude.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
    address = own_address()
    write(broken(address))
    until(lambda: hears(feed, address))
    feed.close()


def test_clients_come_and_go(service: Service) -> None:
    feeds = [NodeFeed(service.path, BOOT) for _ in range(20)]
    for feed in feeds[::2]:
        feed.close()
    address = own_address()
    write(broken(address))
    for feed in feeds[1::2]:
        until(lambda feed=feed: hears(feed, address))  # type: ignore[misc]
        feed.close()


def test_a_source_finds_a_restarted_service_again(service: Service) -> None:
    address = own_address()
    write(broken(address))
    here = Here(root="/nowhere", boot_id=BOOT, node_socket=str(service.path))
    source = KernelSource()
    assert source.absent(here) == ""
    before = sampled(source, here)
    assert source.fileno(here) is not None
    assert service.end() == 0
    assert not service.path.exists()
    with pytest.raises(NotReadable, match="has ended"):
        source.sample(here)
    with pytest.raises(NotReadable, match="no node service"):
        source.sample(here)
    again = started(service.path)
    after = sampled(source, here)
    assert address in str(after.lines)
    assert after.opened > before.opened
    assert after.seq >= before.seq
    source.close()
    assert again.end() == 0
    assert again.process.stdout is not None
    again.process.stdout.close()


def test_the_socket_is_for_everybody_and_a_dead_one_is_replaced(service: Service) -> None:
    assert stat.S_IMODE(service.path.stat().st_mode) == 0o666
    with pytest.raises(UserError, match="already"):
        serve(service.path)
    service.process.kill()
    service.process.wait()
    assert service.path.exists()
    again = started(service.path)
    NodeFeed(again.path, BOOT).close()
    assert again.end() == 0
    assert again.process.stdout is not None
    again.process.stdout.close()


def test_it_says_why_it_cannot_begin(directory: Path) -> None:
    with pytest.raises(UserError, match="no group"):
        serve(directory / "node.sock", group="nobody-has-this-name")
    plain = directory / "plain"
    plain.write_text("mine")
    with pytest.raises(UserError, match="no socket"):
        serve(plain)
    assert plain.read_text() == "mine"
    with pytest.raises(UserError, match="as root"):
        serve(directory / "node.sock", root=str(directory))
    assert sorted(directory.iterdir()) == [plain]


def test_a_client_that_does_not_read_is_hung_up_on() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    said: list[str] = []
    reader = Kmsg(KMSG, BOOT)
    service = NodeService(reader, ours, Path("/"), said.append)
    client = _Client(ours, NOBODY)
    service._clients[client.fd] = client
    service._selector.register(ours, selectors.EVENT_READ)
    service._send(client, b"x" * UNREAD_MAX)
    assert client.fd in service._clients
    service._send(client, b"x" * UNREAD_MAX)
    assert not service._clients
    assert "does not read" in said[0]
    service._selector.close()
    reader.close()
    theirs.close()


# --- what a client believes of what it is told ---------------------------------------------------


class Told(NamedTuple):
    """A feed whose server is the test."""

    feed: NodeFeed
    server: socket.socket

    def say(self, news: KernelLog) -> None:
        self.server.sendall(msgspec.json.encode(NodeNews(log=news)) + b"\n")


@pytest.fixture
def told(directory: Path) -> Iterator[Told]:
    path = directory / "node.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        feed = NodeFeed(path, "5f3a")
        server, _ = listener.accept()
    with server:
        yield Told(feed, server)
    feed.close()


def test_lines_add_up_and_unknown_ones_are_left_out(told: Told) -> None:
    first, second = line(1, 1.0, "Oops: 1"), line(2, 2.0, "Kernel panic - not syncing: x")
    told.say(log(first, clock=5.0))
    tomorrow = msgspec.structs.replace(first, rule="of.tomorrow", seq=3)
    told.say(log(second, tomorrow, clock=6.0))
    assert told.feed.look() == [first, second]
    known = told.feed.known()
    assert known.lines == (first, second)
    assert known.clock >= 6.0


def test_a_message_may_come_in_parts(told: Told) -> None:
    message = msgspec.json.encode(NodeNews(log=log(line(1, 1.0, "Oops: 1")))) + b"\n"
    told.server.sendall(message[:30])
    assert told.feed.look() == []
    with pytest.raises(NotReadable, match="not answered"):
        told.feed.known()
    told.server.sendall(message[30:])
    assert len(told.feed.look()) == 1


@pytest.mark.parametrize(
    "garbage", [b"\n", b"{}\n", b"\xff\n", b'{"log": {"seq": "x"}}\n', b"[1,2]\n"]
)
def test_garbage_is_no_finding(told: Told, garbage: bytes) -> None:
    told.server.sendall(garbage)
    with pytest.raises(NotReadable, match="garbage"):
        told.feed.look()


def test_another_boot_is_not_believed(told: Told) -> None:
    told.say(log(boot_id="other"))
    with pytest.raises(NotReadable, match="another boot"):
        told.feed.look()


def test_a_message_without_end_is_given_up(told: Told) -> None:
    told.server.setblocking(False)
    sent = 0

    def refused() -> bool:
        nonlocal sent
        with contextlib.suppress(BlockingIOError):
            sent += told.server.send(b"x" * (1 << 16))
        try:
            told.feed.look()
        except NotReadable as reason:
            return "no message" in str(reason)
        return False

    until(refused)
    assert sent <= 2 * MESSAGE_MAX
