"""The agent's side of child.py: one child for each source that may hang, and never a second one.

A child that does not answer is killed. One that is inside a sick driver does not die of that: then
nothing is started beside it until it is proven gone, by this agent or by the next one of this
machine. Used by the runner.

Waiting for a processor is no silence, and neither is a pause of the whole machine: the time in
which a child could not run does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from everstep.agent.checks.check import AnySource, Here
from everstep.agent.checks.child import LENGTH_BYTES, MESSAGE_BYTES_MAX, Answer, framed
from everstep.agent.checks.judging import Failed
from everstep.agent.checks.memory import KeptChild
from everstep.model import Seconds
from everstep.processes import Process, alive, identify, send_signal

START_WITHIN_S: Seconds = 30.0
"""For the interpreter and the source's imports, perhaps from a busy file system."""
GONE_WITHIN_S: Seconds = 1.0
"""A killed process is gone in milliseconds, unless it is inside the kernel."""
SLICE_S: Seconds = 0.5
"""The agent looks so often while it waits; what it did not see itself (it was stopped, the machine
was paused) does not count as waiting."""
DELAYED_MAX = 6.0
"""So many times its time a child gets at most, however busy the processors are. One that waited for
them for nearly all of that was not silent: it had no chance to speak."""
PAUSE_MAX_S: Seconds = 60.0
"""Between two starts of a child that ends again and again: a start costs 0.1 s of a core."""
_GARBAGE = (msgspec.MsgspecError, ValueError, RecursionError)


class NotAsked(Exception):
    """There is no child that could answer, and why."""


class Unanswered(NamedTuple):
    """The child does not answer."""

    for_s: Seconds
    """Since it was asked; if several in a row did not answer, since the first was asked. The time
    in which the first could not run does not count."""
    times: int
    """Children in a row."""
    stuck: bool
    """Whether it was killed and goes on existing."""

    @property
    def why(self) -> str:
        if self.stuck:
            return f"the child that reads it has hung for {self.for_s:.0f} s and cannot be killed"
        return f"the child that reads it did not answer for {self.for_s:.0f} s"


class Replies:
    """The messages that come out of a pipe."""

    def __init__(self, fd: int) -> None:
        self.news = asyncio.Event()
        self.ended = False
        self._fd = fd
        self._buffer = bytearray()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self.read)

    def read(self) -> None:
        """Take what is there."""
        if self.ended:
            return
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._buffer += data
        if not data or len(self._buffer) > MESSAGE_BYTES_MAX:
            self.ended = True
            asyncio.get_running_loop().remove_reader(self._fd)
        self.news.set()

    def take(self) -> Answer | None:
        """The next one, if it is whole. ValueError or MsgspecError on anything else."""
        size = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
        if len(self._buffer) < LENGTH_BYTES:
            return None
        if size > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {size} bytes")
        end = LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return msgspec.msgpack.decode(message, type=Answer)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)


class Running(NamedTuple):
    """A child that was started by this agent."""

    popen: subprocess.Popen[bytes]
    process: Process
    replies: Replies


class Child:
    """The child of one source: there is one, there is none, or one does not die."""

    def __init__(
        self, source: AnySource, directory: Path, former: KeptChild | None, keep: Callable[[], None]
    ) -> None:
        """`former`: of an agent before this one. `keep` is called when a child was started."""
        cls = type(source)
        self._argv = [sys.executable, "-P", "-m", "everstep.agent.checks.child"]
        self._argv += [f"{cls.__module__}:{cls.__qualname__}", str(directory)]
        self._within_s = source.within_s
        self._keep = keep
        self._running: Running | None = None
        self._doomed = None if former is None else former.process
        """Killed, or to be: nothing is started while it exists."""
        self._reap: subprocess.Popen[bytes] | None = None
        """The same, if it is a child of this agent."""
        self._stuck: Process | None = None
        """The one that did not die of being killed."""
        self._silent_since = None if former is None else former.silent_since
        self._times = 0 if former is None else former.times
        self._pause_s = 0.0
        self._start_at = 0.0
        self._ended = Failed("its child process was not started")
        self._cpu_s = [0.0, 0.0]
        """Of the children that have ended, and of this one."""

    @property
    def cpu_s(self) -> Seconds:
        """Of all children so far."""
        return sum(self._cpu_s)

    @property
    def process(self) -> Process | None:
        """The one that there is, whether it answers or not."""
        return self._doomed if self._running is None else self._running.process

    @property
    def kept(self) -> KeptChild | None:
        """What the next agent must know."""
        process = self.process
        if process is None:
            return None
        return KeptChild(
            pid=process.pid,
            start_ticks=process.start_ticks,
            silent_since=self._silent_since,
            times=self._times,
        )

    async def ask(self, here: Here) -> bytes | Failed | Unanswered:
        """The encoded sample, or why there is none."""
        if self._doomed is not None and not await self._gone():
            return self._unanswered(stuck=True)
        if self._running is None and time.monotonic() < self._start_at:
            return self._ended if self._silent_since is None else self._unanswered(stuck=False)
        try:
            running = self._running or await self._started()
            answer = await self._asked(running, here)
        except NotAsked as error:
            return await self._failed(str(error))
        except TimeoutError:
            self._times += 1
            self._since(self._within_s)
            return self._unanswered(stuck=not await self._ending())
        except (OSError, *_GARBAGE) as error:
            return await self._failed(f"its child process failed: {error}")
        self._silent_since, self._times, self._pause_s = None, 0, 0.0
        self._cpu_s[1] = answer.cpu_s
        return Failed(answer.why, answer.defect) if answer.why else answer.sample

    async def close(self) -> None:
        """End it, as far as it can be ended."""
        await self._ending()

    # --- one question ---

    async def _started(self) -> Running:
        """A new child that is ready to be asked. NotAsked says why there is none."""
        running = self._running = self._start()
        self._keep()
        try:
            greeting = await self._answer(running, START_WITHIN_S)
        except TimeoutError:
            # That says nothing of what it would have read.
            raise NotAsked(
                f"its child process did not start within {START_WITHIN_S:.0f} s"
            ) from None
        if greeting.why:
            raise NotAsked(f"its child process cannot start: {greeting.why}")
        return running

    def _start(self) -> Running:
        popen = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert popen.stdout is not None
        process = identify(popen.pid) or Process(popen.pid, 0)
        return Running(popen, process, Replies(popen.stdout.fileno()))

    async def _asked(self, running: Running, here: Here) -> Answer:
        assert running.popen.stdin is not None
        running.popen.stdin.write(framed(msgspec.msgpack.encode(here)))
        running.popen.stdin.flush()
        return await self._answer(running, self._within_s)

    async def _answer(self, running: Running, within_s: Seconds) -> Answer:
        """TimeoutError if none comes in time, ValueError if none can come any more.

        NotAsked if it had hardly any time on a processor.
        """
        replies, waited_s = running.replies, 0.0
        before_s = _delayed_s(running.process.pid)
        while True:
            answer = replies.take()
            if answer is not None:
                return answer
            if replies.ended:
                raise ValueError(await _end_of(running.popen))
            delayed_s = _delayed_s(running.process.pid) - before_s
            left_s = min(within_s + delayed_s, DELAYED_MAX * within_s) - waited_s
            if left_s <= 0:
                if delayed_s >= (DELAYED_MAX - 1) * within_s:
                    raise NotAsked(f"its child process got no processor for {delayed_s:.0f} s")
                raise TimeoutError
            replies.news.clear()
            looked = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(SLICE_S, left_s)):
                    await replies.news.wait()
            replies.read()
            waited_s += min(time.monotonic() - looked, 2 * SLICE_S)

    # --- the end of one ---

    async def _failed(self, why: str) -> Failed:
        self._ended = Failed(why)
        await self._ending()
        return self._ended

    async def _ending(self) -> bool:
        """Kill the child; whether it is gone."""
        running, self._running = self._running, None
        if running is not None:
            running.replies.close()
            for pipe in (running.popen.stdin, running.popen.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what it did not read is lost
                    pipe.close()
            self._reap, self._doomed = running.popen, running.process
            self._cpu_s = [self.cpu_s, 0.0]
            self._start_at = time.monotonic() + self._pause_s
            self._pause_s = min(PAUSE_MAX_S, max(1.0, 2 * self._pause_s))
        return await self._gone()

    async def _gone(self) -> bool:
        """Whether the killed one is proven gone, waiting for a moment if it was just killed."""
        doomed, deadline = self._doomed, time.monotonic() + GONE_WITHIN_S
        if doomed is None:
            return True
        send_signal(doomed, signal.SIGKILL)
        while alive(doomed):
            if self._stuck == doomed:
                return False
            if time.monotonic() >= deadline:
                self._stuck = doomed
                self._times = max(1, self._times)
                self._since(0.0)
                self._keep()
                return False
            await asyncio.sleep(0.01)
        if self._reap is not None:
            self._reap.wait()
        self._doomed = self._reap = None
        return True

    def _since(self, ago_s: Seconds) -> None:
        if self._silent_since is None:
            self._silent_since = clock() - ago_s

    def _unanswered(self, *, stuck: bool) -> Unanswered:
        since = clock() if self._silent_since is None else self._silent_since
        return Unanswered(clock() - since, self._times, stuck)


def clock() -> Seconds:
    """Seconds since the boot, as samples have them: the same for every agent of this machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _delayed_s(pid: int) -> Seconds:
    """How long it has waited for a processor since it began; 0 where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


async def _end_of(popen: subprocess.Popen[bytes]) -> str:
    """How it ended: its pipes are closed a moment before."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        code = popen.poll()
        if code is not None:
            break
        if time.monotonic() >= deadline:
            return "it closed its output"
        await asyncio.sleep(0.01)
    return f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
