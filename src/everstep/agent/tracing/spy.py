"""Asks py-spy for the stack of one process, within a time limit, pausing none that may not be.

Always with --nonblocking: a blocking py-spy fails on a stopped process and hangs for ever on a
frozen one. Frames below Python cannot be had so (py-spy refuses the two together), so `dump` with
`native` pauses the process; it is for those that run and show no wait, and whatever happens to
py-spy, the process runs again afterwards. Used by tracer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from everstep.agent.tracing import kernel
from everstep.diagnosis import stacks
from everstep.diagnosis.frames import Dump
from everstep.model import Seconds
from everstep.processes import Process, send_signal

GONE_WITHIN_S: Seconds = 0.5
"""For a killed py-spy to be gone: one that is stuck in the kernel is not waited for."""
AGAIN_MAX = 2
"""Tries after one that failed."""
BYTES_MAX = 16 << 20
"""Of one answer."""


class WhyNot(StrEnum):
    """Why there is no stack; the value is how a clause says it."""

    MISSING = "py-spy is not installed beside this Python nor in PATH (everstep[agent] has it)"
    DENIED = "py-spy may not look into processes (ptrace_scope, or they are another user's)"
    NO_PYTHON = "there is no Python in it"
    LATE = "py-spy did not answer in time"
    GONE = "it has ended"
    FAILED = "py-spy failed"


class Answer(NamedTuple):
    """What came of it."""

    dump: Dump | None = None
    why: WhyNot = WhyNot.FAILED
    """If there is none."""
    detail: str = ""


class Spy:
    """The program, found once."""

    def __init__(self, program: str | None = None) -> None:
        self.program = program or find()
        self._resuming: set[asyncio.Task[None]] = set()

    async def dump(self, process: Process, within_s: Seconds, *, native: bool = False) -> Answer:
        """The stacks of this process. Says why there are none, whatever happens.

        What is not paused changes while it is read, and sometimes makes no sense: then again.
        """
        if self.program is None:
            return Answer(why=WhyNot.MISSING)
        clock = asyncio.get_running_loop().time
        deadline = clock() + within_s
        answer = await self._dump(process, within_s, native=native)
        for _ in range(0 if native else AGAIN_MAX):
            if answer.dump is not None or answer.why is not WhyNot.FAILED:
                break
            again = await self._dump(process, deadline - clock(), native=False)
            answer = answer if again.why is WhyNot.LATE else again
        return answer

    async def _dump(self, process: Process, within_s: Seconds, *, native: bool) -> Answer:
        if self.program is None or within_s <= 0:
            return Answer(why=WhyNot.LATE)
        mode = "--native" if native else "--nonblocking"
        argv = [self.program, "dump", "--json", mode, "--pid", str(process.pid)]
        try:
            out, err = _files()
        except OSError as problem:
            return Answer(detail=f"no file for its answer: {problem.strerror}")
        try:
            with contextlib.ExitStack() as stack:
                if native:
                    stack.callback(self._resume_later, process)
                code = await self._run(argv, out, err, within_s)
                if code == 0:
                    stack.pop_all()
            return _answer(code, _content(out), _content(err))
        finally:
            os.close(out)
            os.close(err)

    async def _run(self, argv: list[str], out: int, err: int, within_s: Seconds) -> int | None:
        """Its exit code, or None if it was killed because it took too long. It writes to files:
        nobody has to read on for it to end.
        """
        try:
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err
            )
        except OSError as problem:
            os.write(err, str(problem).encode())
            return -1
        try:
            async with asyncio.timeout(within_s):
                return await child.wait()
        except TimeoutError:
            return None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GONE_WITHIN_S):
                        await child.wait()

    def _resume_later(self, process: Process) -> None:
        """Also where the look is called off: a task of its own, which nobody cancels."""
        task = asyncio.create_task(_resume(process))
        self._resuming.add(task)
        task.add_done_callback(self._resuming.discard)

    async def resumed(self) -> None:
        """Wait until what py-spy may have left stopped runs again."""
        if self._resuming:
            await asyncio.wait(self._resuming)


async def _resume(process: Process) -> None:
    """A tracer that dies while it attaches leaves a stop signal behind. SIGCONT takes back those
    that are pending, too. It is not for one that somebody else traces: a debugger would stop at it.
    """
    deadline = asyncio.get_running_loop().time() + GONE_WITHIN_S
    while asyncio.get_running_loop().time() < deadline:
        if not kernel.traced(process.pid):
            with contextlib.suppress(PermissionError):
                send_signal(process, signal.SIGCONT)
            now = kernel.entry(process.pid)
            if now is None or now.state not in kernel.STOPPED:
                return
        await asyncio.sleep(0.01)


def find() -> str | None:
    """Beside this interpreter, where pip puts it; else in PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _files() -> tuple[int, int]:
    """For its answer and for what it complains of; both or none."""
    out = os.memfd_create("stacks")
    try:
        return out, os.memfd_create("problem")
    except OSError:
        os.close(out)
        raise


def _content(fd: int) -> str:
    size = min(os.fstat(fd).st_size, BYTES_MAX)
    return os.pread(fd, size, 0).decode("utf-8", errors="replace")


def _answer(code: int | None, out: str, err: str) -> Answer:
    if code is None:
        return Answer(why=WhyNot.LATE)
    dumps = stacks.read(out, "py-spy") if code == 0 else None
    if dumps:
        return Answer(dump=dumps[0])
    said = err.strip().partition("\n")[0].removeprefix("Error: ")[:200]
    text = err.lower()
    if "permission denied" in text or "operation not permitted" in text:
        return Answer(why=WhyNot.DENIED, detail=said)
    if "no such process" in text or "check that the process is running" in text:
        return Answer(why=WhyNot.GONE, detail=said)
    if "find python version" in text or "python interpreter" in text or "libpython" in text:
        return Answer(why=WhyNot.NO_PYTHON, detail=said)
    return Answer(why=WhyNot.FAILED, detail=said)
