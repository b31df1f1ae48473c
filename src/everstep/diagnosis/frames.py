"""Stacks of processes, as values, and what makes two of them alike.

stacks.py reads them from dumps; the tracers of live ranks build them too, and vote by `signature`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from everstep.diagnosis.findings import Place
from everstep.model import Rank, Value

DEPTH = 8
"""Innermost frames that count for a signature: below them every trainer looks the same."""


class Frame(Value, frozen=True, kw_only=True):
    """One function of a stack."""

    name: str
    """As printed, with its class or namespace if the tool prints it."""
    file: str = ""
    line: int = 0


class Thread(Value, frozen=True, kw_only=True):
    """One thread, its innermost frame first."""

    frames: tuple[Frame, ...]
    name: str = ""
    main: bool = False
    active: bool | None = None
    """On a processor, as py-spy judges. A rank that waits in NCCL spins, so it counts as active."""
    holds_gil: bool = False


class Dump(Value, frozen=True, kw_only=True):
    """One process at one moment."""

    place: Place
    threads: tuple[Thread, ...]
    pid: int | None = None
    rank: Rank | None = None
    """Global. Taken from a heading or from the file's name, never from a local rank alone."""
    local_rank: int | None = None
    machine: str | None = None
    command: str = ""
    child: bool = False
    """Its parent is a process of the same dump: a worker of a data loader, a writer."""
    state: str = ""
    """The kernel's letter for it, if the dump has it: D sleeps there and cannot be killed."""
    kernel: tuple[str, ...] = ()
    """Functions of the kernel it is in, innermost first, if the dump has them."""

    @property
    def main(self) -> Thread | None:
        """The main thread, or the only one."""
        mains = [t for t in self.threads if t.main]
        if mains:
            return mains[0]
        started = [t for t in self.threads if t.frames and t.frames[-1].name == "<module>"]
        return started[0] if started else (self.threads[0] if len(self.threads) == 1 else None)


_TEMPLATE = re.compile(r"<[^<>]*>")
_ADDRESS = re.compile(r"^0x[0-9a-fA-F]+$")
_SERVING = re.compile(
    # queues, servers and monitors of Python
    r"_feed|_?(do_)?pin_memory(_loop)?|accept|_serve|_monitor_loop|_heartbeat\w*|_read_thread"
    r"|_worker_thread|monitor_target"
    # torch's and NCCL's own threads
    r"|c10d::.*(Watchdog|[Hh]eartbeat|CleanupLoop|BackgroundThread|HealthCheck).*"
    r"|nccl(Proxy(Service|Progress)|Ras|CommWatchdog|AsyncJob)\w*|gloo::transport::tcp::Loop::run"
)
_SERVING_FILES = (
    "tqdm/_monitor.py",
    "concurrent/futures/thread.py",
    "compile_worker/subproc_pool.py",
)


def plain(name: str) -> str:
    """A function's name without class, arguments, template parameters: Condition.wait is wait.

    Versions of one tool differ in whether they print the class, so it cannot count.
    """
    if name.startswith("<") and name.endswith(">"):
        return name
    name = name.replace("<locals>.", "").replace("(anonymous namespace)::", "")
    while (shorter := _TEMPLATE.sub("", name)) != name:
        name = shorter
    name = name.split("(")[0].split("@")[0].strip()
    return name if "::" in name else name.rsplit(".", 1)[-1]


def serves(thread: Thread) -> bool:
    """Whether a thread only waits to serve others: it says nothing about a hang."""
    if thread.frames and not thread.main and thread.frames[0].file.startswith("everstep/"):
        return True
    return not thread.frames or any(
        _SERVING.fullmatch(plain(frame.name)) or frame.file.endswith(_SERVING_FILES)
        for frame in thread.frames[:DEPTH]
    )


def signature(threads: Iterable[Thread], role: str = "", depth: int = DEPTH) -> str:
    """What two processes that do the same have in common; equal strings mean alike.

    Role and the function names of the `depth` innermost frames of each thread, threads in order of
    the alphabet; no addresses, paths, line numbers or thread ids (ByteRobust, section 5.1, groups
    by string; which string it leaves open). Threads without frames and threads that only serve are
    left out: some ranks have a queue's feeder and some have not.
    """
    stacks = sorted(_names(thread, depth) for thread in threads if not serves(thread))
    return f"{role}|" + "|".join(stacks)


def _names(thread: Thread, depth: int) -> str:
    names = (plain(f.name) for f in thread.frames if not _ADDRESS.match(f.name))
    return ";".join([name for name in names if name][:depth])
