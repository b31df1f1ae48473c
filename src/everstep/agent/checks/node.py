"""The node service: reads the kernel log as root for the agents of ordinary users.

`everstep check --serve` runs it (a systemd unit, a DaemonSet, a prolog's background process). Each
client of its Unix socket gets what kernel/feed.py expects: messages, a line of JSON each, with the
lines of the kernel log that a rule knows, nothing of the others. What it may show to whom: lines
about the machine, its devices and mounts to everybody who may connect; a line about a process names
it only to that process's user and to root, and one that only mentions a process to root alone;
addresses of the kernel are left out. Clients say nothing; one that does, or that does not read what
it is sent, is hung up on. No user can keep the others out, or make much work.
"""

from __future__ import annotations

import contextlib
import grp
import os
import re
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec

from everstep.agent.checks.check import NotReadable
from everstep.agent.checks.kernel.feed import BEAT_S, NodeNews, peer_uid
from everstep.agent.checks.kernel.kmsg import Kmsg, boot_id, pstore
from everstep.agent.checks.kernel.lines import KernelLog, Line
from everstep.agent.checks.kernel.table import own_table
from everstep.model import Seconds, UserError

DEFAULT_SOCKET = Path("/run/everstep/node.sock")
MOST_CLIENTS = 256
"""Agents of one host; each stand-in machine of a test has one."""
OF_ONE_USER = 64
"""Of them, those of one user who is not root: the others' agents are to find room."""
UNREAD_MAX = 1 << 20
"""Bytes that wait for a client: three times all that is ever sent at once. Beyond it, the client is
hung up on; when it comes again it gets all lines anew, so it misses nothing."""
PAUSE_S: Seconds = 0.02
"""Between two looks into the log: a storm is read in larger parts."""
ACCEPT_PAUSE_S: Seconds = 0.005
"""Between two new clients, each of which is told all lines."""
SAY_EVERY_S: Seconds = 10.0
"""Between two lines of the log about clients: who connects again and again must not fill it."""
PROCESS_NAMES = ("comm", "library", "cgroup", "limited", "uid", "anon_kb")
"""Groups of rules that tell of a process what only its user may know."""

_KERNEL_ADDRESS = re.compile(r"\b(?:0x)?ffff[0-9a-f]{12}\b")
_MENTIONED = re.compile(r"\bpid=[^,]*, name=[^,]*|\bcomm [^:,]*|^[^:]{1,15}(?=: attempt to access)")
"""A process in lines about something else: XIDs, errors of file systems, ends of devices."""


def serve(
    path: Path = DEFAULT_SOCKET,
    group: str = "",
    root: str = "/",
    say: Callable[[str], None] = print,
) -> None:
    """Serve on this socket until SIGTERM or SIGINT; call it in the main thread.

    `group`: only its members and root may connect; empty: everybody. `root`: prefix of /dev, /proc
    and /sys, as in Here. `say` takes sentences for a log. UserError if it cannot begin.
    """
    try:
        log = Kmsg(Path(root) / "dev/kmsg", boot_id(Path(root)))
    except NotReadable as error:
        raise UserError(f"{error}: run the node service as root") from error
    with contextlib.closing(log), _listening(path, group) as listener, _ends() as ends:
        say(f"node service: the kernel log of boot {boot_id(Path(root))} on {path}")
        _notify("READY=1")
        NodeService(log, listener, Path(root), say).run(ends)
        _notify("STOPPING=1")


class NodeService:
    """The loop, with all its clients."""

    def __init__(
        self, log: Kmsg, listener: socket.socket, root: Path, say: Callable[[str], None]
    ) -> None:
        self._log = log
        self._listener = listener
        self._root = root
        self._say = say
        self._clients: dict[int, _Client] = {}
        self._owners: dict[int, int | None] = {}
        self._selector = selectors.DefaultSelector()
        self._paused: dict[int, Seconds] = {}
        """Descriptors that nobody looks at before this time."""
        self._said_at = -SAY_EVERY_S

    def run(self, ends: socket.socket) -> None:
        """Until something can be read from `ends`."""
        self._own(self._log.look())
        self._selector.register(ends, selectors.EVENT_READ)
        self._paused = dict.fromkeys((self._log.fileno(), self._listener.fileno()), 0.0)
        beat_at = _now() + BEAT_S
        try:
            while True:
                self._resume()
                wait_s = min([beat_at, *self._paused.values()]) - _now()
                ready = {key.fd: mask for key, mask in self._selector.select(max(0.0, wait_s))}
                if ends.fileno() in ready:
                    return
                if self._log.fileno() in ready:
                    self._pause(self._log.fileno(), PAUSE_S)
                    self._tell(self._log.look())
                if _now() >= beat_at:
                    beat_at = _now() + BEAT_S
                    self._tell([], beat=True)
                if self._listener.fileno() in ready:
                    self._pause(self._listener.fileno(), ACCEPT_PAUSE_S)
                    self._accept()
                for fd, mask in ready.items():
                    if fd in self._clients:
                        self._attend(self._clients[fd], mask)
        finally:
            for client in list(self._clients.values()):
                self._hang_up(client, "")
            self._selector.close()

    def _pause(self, fd: int, for_s: Seconds) -> None:
        self._selector.unregister(fd)
        self._paused[fd] = _now() + for_s

    def _resume(self) -> None:
        for fd in [fd for fd, at in self._paused.items() if at <= _now()]:
            del self._paused[fd]
            self._selector.register(fd, selectors.EVENT_READ)

    def _mention(self, text: str) -> None:
        """Something about a client, which it may do again and again."""
        if _now() - self._said_at >= SAY_EVERY_S:
            self._said_at = _now()
            self._say(f"node service: {text}")

    # --- clients ---

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        uid = peer_uid(connection)
        same = sum(client.uid == uid for client in self._clients.values())
        if len(self._clients) >= MOST_CLIENTS or (same >= OF_ONE_USER and uid):
            self._mention(f"{len(self._clients)} clients, {same} of user {uid}: no more of them")
            connection.close()
            return
        client = _Client(connection, uid)
        self._clients[client.fd] = client
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(client, self._message(self._log.known(), client.uid))

    def _attend(self, client: _Client, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            try:
                said = client.connection.recv(4096)
            except BlockingIOError:
                said = None
            except OSError:
                said = b""
            if said is not None:
                self._hang_up(client, "it sent something" if said else "")
                return
        if mask & selectors.EVENT_WRITE:
            self._send(client, b"")

    def _send(self, client: _Client, message: bytes) -> None:
        client.unread += message
        try:
            sent = client.connection.send(client.unread) if client.unread else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._hang_up(client, "")
            return
        del client.unread[:sent]
        if len(client.unread) > UNREAD_MAX:
            self._hang_up(client, "it does not read")
            return
        writes = selectors.EVENT_WRITE if client.unread else 0
        self._selector.modify(client.connection, selectors.EVENT_READ | writes)

    def _hang_up(self, client: _Client, why: str) -> None:
        if why:
            self._mention(f"a client of user {client.uid} was hung up on: {why}")
        self._selector.unregister(client.connection)
        del self._clients[client.fd]
        client.connection.close()

    # --- what is told ---

    def _tell(self, new: list[Line], *, beat: bool = False) -> None:
        """Everybody what is new, if anything is."""
        self._own(new)
        if not new and not beat:
            return
        log = msgspec.structs.replace(self._log.known(), lines=tuple(new))
        messages: dict[int, bytes] = {}
        for client in list(self._clients.values()):
            if client.uid not in messages:
                messages[client.uid] = self._message(log, client.uid)
            self._send(client, messages[client.uid])

    def _message(self, log: KernelLog, uid: int) -> bytes:
        may_see_all = uid in {0, os.geteuid()}
        lines = log.lines if may_see_all else tuple(self._shown(log, uid))
        news = NodeNews(log=msgspec.structs.replace(log, lines=lines, pstore=pstore(self._root)))
        return msgspec.json.encode(news) + b"\n"

    def _shown(self, log: KernelLog, uid: int) -> Iterator[Line]:
        """Lines as this user may see them."""
        for line in log.lines:
            shown = msgspec.structs.replace(line, text=_KERNEL_ADDRESS.sub("(address)", line.text))
            if "pid" not in line.names:
                yield _without_process(shown)
            elif self._owners.get(line.seq) == uid:
                yield shown
            elif line.rule != "oom.killed":  # of which oom.why tells as well
                names = {k: v for k, v in line.names.items() if k not in PROCESS_NAMES}
                why = own_table().of[line.rule].why
                yield msgspec.structs.replace(
                    line,
                    names={**names, "pid": f"other-{line.seq}"},
                    text=f"{why} (a process of another user)",
                )

    def _own(self, new: list[Line]) -> None:
        """Note whose process each line speaks of, while it may still be there to ask."""
        for line in new:
            if "pid" in line.names:
                self._owners[line.seq] = _owner(line, self._root)
        kept = {line.seq for line in self._log.known().lines} if new else set(self._owners)
        self._owners = {seq: uid for seq, uid in self._owners.items() if seq in kept}


class _Client:
    """One connection."""

    def __init__(self, connection: socket.socket, uid: int) -> None:
        self.connection = connection
        self.fd = connection.fileno()
        self.uid = uid
        self.unread = bytearray()


def _without_process(line: Line) -> Line:
    """A line about something else, without the process that it may mention."""
    names = {name: _MENTIONED.sub("(process)", value) for name, value in line.names.items()}
    return msgspec.structs.replace(line, names=names, text=_MENTIONED.sub("(process)", line.text))


def _owner(line: Line, root: Path) -> int | None:
    """User of the process that a line names; None: it is gone."""
    if line.names.get("uid", "").isdecimal():
        return int(line.names["uid"])
    try:
        return (root / "proc" / line.names["pid"]).stat().st_uid
    except OSError:
        return None


def _now() -> Seconds:
    return time.monotonic()


# --- the socket, signals, systemd ----------------------------------------------------------------


@contextlib.contextmanager
def _listening(path: Path, group: str) -> Iterator[socket.socket]:
    """The socket at its path, with its rights from the first moment on."""
    gid = _gid(group)
    _refuse_another(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(str(beside))
        finally:
            os.umask(before)
        if gid is not None:
            os.chown(beside, -1, gid)
        beside.chmod(0o666 if gid is None else 0o660)
        listener.listen(MOST_CLIENTS)
        beside.rename(path)
    except OSError as error:
        listener.close()
        beside.unlink(missing_ok=True)
        raise UserError(f"no socket can be made at {path}: {error.strerror}") from error
    ours = path.stat().st_ino
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if path.stat().st_ino == ours:
                path.unlink()


def _gid(group: str) -> int | None:
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise UserError(f"there is no group {group!r} on this machine") from error


def _refuse_another(path: Path) -> None:
    """A socket that nobody listens on is one of the past, and is replaced."""
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UserError(f"{path} exists and is no socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass
        except OSError:
            return
    raise UserError(f"a node service listens on {path} already")


@contextlib.contextmanager
def _ends() -> Iterator[socket.socket]:
    """Readable once SIGTERM or SIGINT came."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame

    before = {each: signal.signal(each, note) for each in (signal.SIGTERM, signal.SIGINT)}
    woken = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        reading.close()
        writing.close()


def _notify(state: str) -> None:
    """Tell systemd, if it wants to know (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, contextlib.suppress(OSError):
        told.sendto(state.encode(), address.replace("@", "\0", 1))
