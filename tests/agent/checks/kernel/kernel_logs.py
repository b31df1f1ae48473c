"""Kernel logs for tests: written for real as root, or made of lines for the judges."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from everstep.agent.checks.check import AnyCheck, Here, History, Stamped
from everstep.agent.checks.kernel.lines import KernelLog, Line, Ours
from everstep.agent.checks.kernel.records import Record
from everstep.agent.checks.kernel.table import own_table
from everstep.agent.checks.registry import CHECKS
from everstep.health import Result

KMSG = Path("/dev/kmsg")
BOOT = "5f3a"
NOBODY = 65534


def write(text: str, level: int = 6) -> None:
    """One line into the real kernel log. Each opening may write ten lines in five seconds.

    Without the line's end the kernel waits for more before it shows it.
    """
    opened = os.open(KMSG, os.O_WRONLY)
    try:
        os.write(opened, f"<{level}>{text}\n".encode())
    finally:
        os.close(opened)


@contextmanager
def alone() -> Iterator[None]:
    """One test at a time: some fill the log with so much that it forgets the others' lines."""
    with KMSG.open("rb", buffering=0) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def broken(address: str) -> str:
    """A line that says that the NIC at this address is."""
    count = "device's health compromised - reached miss count"
    return f"mlx5_core {address}: poll_health:852:(pid 0): {count}"


def as_nobody(work: Callable[[], str]) -> str:
    """What it says when an ordinary user does it.

    In a fork, as that user may have no right to start our Python.
    """
    own_table()  # whose file the user may not be able to read either
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            said = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must see it
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        said = told.read().decode()
    os.waitpid(child, 0)
    return said


def own_address() -> str:
    """A PCI address that no other test and no machine has."""
    domain, bus, slot = secrets.randbelow(0xE0000000) + 0x10000000, secrets.randbelow(256), 0x1E
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def line(seq: int, at: float, text: str) -> Line:
    """As a reader would keep it; the text must be one that a rule knows."""
    match = own_table().match(Record(3, seq, at, text.encode(), b""))
    assert match is not None, text
    rule, names, said = match
    return Line(seq=seq, at=at, rule=rule.id, names=names, text=said)


def log(*lines: Line, clock: float = 1000.0, ours: Ours | None = None, **more: Any) -> KernelLog:
    known = KernelLog(
        boot_id=BOOT,
        by="/dev/kmsg",
        opened=1.0,
        oldest=0,
        seq=max((each.seq for each in lines), default=0),
        clock=clock,
        lines=lines,
        ours=ours or Ours(),
    )
    return msgspec.structs.replace(known, **more)


def history(
    now: KernelLog, first_seq: int = -1, past: KernelLog | None = None, unseen_s: float = 5.0
) -> History[KernelLog]:
    """`first_seq`: the newest record when this machine came to the job."""
    first = msgspec.structs.replace(now, seq=first_seq, lines=())
    return History(
        first=Stamped(at=now.clock - 500.0, sample=first),
        past=() if past is None else (Stamped(at=now.clock - unseen_s, sample=past),),
        now=Stamped(at=now.clock, sample=now),
    )


def check(name: str, **limits: Any) -> AnyCheck:
    kind = CHECKS[name]
    return kind(msgspec.convert(limits, kind.limits_type))


def judged(name: str, seen: History[Any], **limits: Any) -> list[Result]:
    """Results of one check that are no pass of the whole."""
    results = list(check(name, **limits).judge(Here(), seen))
    assert len({result.item for result in results}) == len(results)
    return [
        result for result in results if result.item or result.failed or result.verdict == "error"
    ]
