"""Tries a code version in a process that then ends: what agent/launcher.py forks for a TryRequest.

Two processes. The one below runs user code (importing.py) and may do anything: hang, start threads
and programs, print, exit. The one above runs nothing but this file: it waits for what the other one
says, for its time to be over, or for the agent to be gone, ends everything that was started, and
only then answers. It inherits every orphan below it, so nothing gets away; if it is killed itself,
the other one goes with it, and the rest becomes the keeper's, whom no end of ranks spares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import msgspec
from msgspec.structs import replace

from everstep.agent import fork, importing, placing, rank_main
from everstep.agent.fork import MessageBroken, Trying, TryReply, TryRequest
from everstep.model import Seconds, Value
from everstep.processes import snapshot

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_DECODER: msgspec.msgpack.Decoder[Trying | TryReply] = msgspec.msgpack.Decoder(Trying | TryReply)
OUTPUT_BYTES = 4096
"""The end of what it prints may be all that there is to see."""
GONE_WITHIN_S: Seconds = 3.0
"""For killed processes to be gone: one in a driver's hands is not waited for."""
LOOK_EVERY_S: Seconds = 0.005


class _Below(NamedTuple):
    """The process that runs user code, as the one above sees it."""

    pid: int
    handle: int
    """A pidfd: readable when the process has ended."""
    said: int
    """What importing.py says."""
    printed: int
    """What anybody prints."""


def supervise(
    connection: int, request: TryRequest, env: dict[str, str], clear: Callable[..., None]
) -> NoReturn:
    """In a fork of the launcher. `connection` is the socket to the agent, and `clear` closes all
    descriptors but those it is given.
    """
    clear(connection)
    os.setsid()
    rank_main.reset_signals()
    began = time.monotonic()
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        below = _start(request, env, clear)
        reply = _Watch(below, connection, request).run(began + request.within_s)
    except (OSError, MessageBroken, msgspec.DecodeError) as error:
        reply = TryReply(untold=f"it could not be tried: {error}")
    _end_all()
    reply = replace(reply, took_s=time.monotonic() - began)
    with contextlib.suppress(OSError), os.fdopen(connection, "wb", closefd=False) as agent:
        agent.write(fork.frame(reply))
    os._exit(0)


def _start(request: TryRequest, env: dict[str, str], clear: Callable[..., None]) -> _Below:
    (said, say), (printed, output) = os.pipe(), os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                null = os.open(os.devnull, os.O_RDONLY)
                for source, target in ((null, 0), (output, 1), (output, 2)):
                    os.dup2(source, target)
                clear(say)
                _try(say, request, env)
        finally:
            os._exit(1)
    os.close(say)
    os.close(output)
    for fd in (said, printed):
        os.set_blocking(fd, False)
    return _Below(pid, os.pidfd_open(pid), said, printed)


# --- below: user code runs here ------------------------------------------------------------------


def _try(fd: int, request: TryRequest, env: dict[str, str]) -> NoReturn:
    def say(what: Value) -> None:
        os.write(fd, fork.frame(what))

    try:
        _set_up(request, env)
    except OSError as error:
        say(TryReply(untold=f"it could not be set up: {error}"))
        os._exit(1)
    say(importing.run(request, say))
    os._exit(0)  # whatever threads there are, and whatever wants to be done at an orderly exit


def _set_up(request: TryRequest, env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.environ[placing.CODE_VERSION] = request.version
    if request.beside_ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.nice(19)
    os.chdir(request.working_dir)
    placing.move_pythonpath(request.places)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text files


# --- above ---------------------------------------------------------------------------------------


class _Watch:
    """From what the other process says, prints and does to one reply."""

    def __init__(self, below: _Below, connection: int, request: TryRequest) -> None:
        self._below = below
        self._connection = connection
        self._request = request
        self._events = select.poll()
        for fd in (below.handle, below.said, below.printed):
            self._events.register(fd, select.POLLIN)
        self._events.register(connection, select.POLLIN | select.POLLRDHUP)
        self._said = b""
        self._printed = b""
        self._doing = "it begins"

    def run(self, deadline: Seconds) -> TryReply:
        """Raises OSError."""
        while (left_s := deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in self._events.poll(left_s * 1000)}
            if self._connection in ready:
                return TryReply(untold="nobody waited for the answer")
            self._printed = (self._printed + self._read(self._below.printed))[-OUTPUT_BYTES:]
            self._said += self._read(self._below.said)
            reply = self._reply()
            if reply is None and self._below.handle in ready:
                reply = self._ended()
            if reply is not None:
                return reply
        limit = f"it did not end within {self._request.within_s:.0f} s: {self._doing}"
        return TryReply(untold=limit, detail=self._tail())

    def _read(self, fd: int) -> bytes:
        """All that is there now. A pipe that has ended is not looked at again."""
        found = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(fd, 1 << 16):
                found += chunk
            with contextlib.suppress(KeyError):
                self._events.unregister(fd)
        return found

    def _reply(self) -> TryReply | None:
        """Take what was said, frame by frame; the reply if it is among it."""
        head = fork.LENGTH.size
        while len(self._said) >= head:
            end = head + fork.length_of(self._said[:head])
            if len(self._said) < end:
                break
            said = _DECODER.decode(self._said[head:end])
            self._said = self._said[end:]
            if isinstance(said, TryReply):
                return said
            self._doing = said.what
        return None

    def _ended(self) -> TryReply:
        """It ended without a reply. Its last words may have come at the same moment."""
        self._said += self._read(self._below.said)
        reply = self._reply()
        if reply is not None:
            return reply
        _, status = os.waitpid(self._below.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            problem = f"it ends the process with exit code {code}: {self._doing}"
            return TryReply(problem=problem, detail=self._tail())
        how = f"its process was ended by {signal.Signals(-code).name}: {self._doing}"
        if -code == signal.SIGKILL or self._request.beside_ranks:
            # By us, for want of memory, or because a library did not take it that there is no GPU.
            return TryReply(untold=how, detail=self._tail())
        return TryReply(problem=how, detail=self._tail())

    def _tail(self) -> str:
        return self._printed.decode(errors="replace")


def _end_all() -> None:
    """Everything below this process, also what left its session: it is the parent of orphans.

    That nothing is left is told by the kernel: whoever is waited for has given us its children.
    """
    deadline = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < deadline:
        for pid, entry in snapshot().items():
            if entry.parent == os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(LOOK_EVERY_S)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
