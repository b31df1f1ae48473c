"""The real kernel log: lines that root writes, read through the path of a driver's lines."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent.checks.check import Here, History, NotReadable, Stamped
from everstep.agent.checks.kernel.kmsg import MOST_AT_ONCE, Kmsg, Remembered
from everstep.agent.checks.kernel.lines import KernelLog
from everstep.agent.checks.kernel.source import KernelSource
from everstep.diagnosis.words import Verdict
from tests.agent.checks.kernel.kernel_logs import (
    KMSG,
    alone,
    as_nobody,
    broken,
    judged,
    own_address,
    write,
)

HERE = Here()


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture
def source() -> Iterator[KernelSource]:
    made = KernelSource()
    yield made
    made.close()


def named(log: KernelLog, address: str) -> list[int]:
    """Numbers of the lines about it."""
    return [line.seq for line in log.lines if line.names.get("pci") == address]


def news(source: KernelSource) -> bool:
    found = source.fileno(HERE)
    assert found is not None
    return bool(select.select([found], [], [], 10.0)[0])


def test_a_line_is_news_at_once_and_is_read_back(source: KernelSource) -> None:
    source.sample(HERE)
    address = own_address()
    write(broken(address))
    assert news(source)
    log = source.sample(HERE)
    (seq,) = named(log, address)
    assert seq <= log.seq
    (line,) = [line for line in log.lines if line.seq == seq]
    assert line.rule == "nic.firmware"
    assert line.text == broken(address)
    assert 0 <= log.clock - line.at < 60


def test_what_was_written_before_is_filled_in(source: KernelSource) -> None:
    address = own_address()
    write(broken(address))
    first = source.sample(HERE)
    assert len(named(first, address)) == 1
    assert first.seq >= named(first, address)[0]
    assert first.oldest >= 0


def test_a_restarted_agent_repeats_nothing_and_hides_nothing(source: KernelSource) -> None:
    old, new, missed = own_address(), own_address(), own_address()
    write(broken(old))
    first = Stamped(at=1.0, sample=source.sample(HERE))
    write(broken(new))
    before = Stamped(at=2.0, sample=source.sample(HERE))
    source.close()
    write(broken(missed))
    again = KernelSource()
    log = again.sample(HERE)
    again.close()
    assert named(log, new) == named(before.sample, new)
    assert named(log, missed)[0] > before.sample.seq
    seen = History(
        first=first, past=(before,), now=Stamped(at=3.0, sample=_of(log, old, new, missed))
    )
    verdicts = {each.item.split()[0]: each.verdict for each in judged("kernel.log", seen)}
    assert verdicts[old] is Verdict.SUSPECT
    assert verdicts[new] is verdicts[missed] is Verdict.EVICT
    assert judged("kernel.reader", seen) == []


def _of(log: KernelLog, *pci: str) -> KernelLog:
    """As if these devices were the job's, and nothing else had been written."""
    lines = tuple(line for line in log.lines if line.names.get("pci") in pci)
    ours = type(log.ours)(pci=tuple(pci))
    return KernelLog(
        boot_id=log.boot_id, by=log.by, opened=log.opened, oldest=log.oldest, seq=log.seq,
        clock=log.clock, lines=lines, ours=ours,
    )  # fmt: skip


def test_a_flood_is_read_in_bounded_parts_and_hides_no_other_line() -> None:
    reader = Kmsg(KMSG, "")
    reader.look()
    address, other = own_address(), own_address()
    write(broken(address))
    most = 0
    for _ in range(50):
        for number in range(200):
            write(f"nvme nvme{number % 90}: I/O {number} QID 3 timeout, aborting {other}")
        before = reader.read
        reader.look()
        most = max(most, reader.read - before)
    while select.select([reader], [], [], 0)[0]:
        reader.look()
    log = reader.known()
    reader.close()
    assert most <= MOST_AT_ONCE
    assert len(log.lines) <= Remembered.KINDS * Remembered.OF_A_KIND
    assert log.read + log.lost >= 10_000
    assert log.forgotten > 0


def test_a_storm_of_one_kind_keeps_the_others() -> None:
    reader = Kmsg(KMSG, "")
    reader.look()
    address, other = own_address(), own_address()
    write(broken(address))
    reader.look()
    for number in range(500):
        write(f"I/O error, dev {other.replace(':', '-').replace('.', '-')}, sector {number}")
        reader.look()
    log = reader.known()
    reader.close()
    assert len(named(log, address)) == 1
    kept = [line for line in log.lines if line.rule == "disk.io"]
    assert len(kept) <= 3 * Remembered.OF_A_KIND
    assert any("sector 499" in line.text for line in kept)


def test_what_the_kernel_overwrote_is_counted() -> None:
    reader = Kmsg(KMSG, "")
    reader.look()
    before = reader.known()
    size = _log_bytes()
    for number in range(size // 400):
        write(f"filler {number} " + "x" * 900)
        if reader.overruns or _is_overrun(reader, number):
            break
    address = own_address()
    write(broken(address))
    while select.select([reader], [], [], 0)[0]:
        reader.look()
    after = reader.known()
    reader.close()
    assert after.overruns > before.overruns
    assert after.lost > before.lost
    assert len(named(after, address)) == 1
    seen = History(
        first=Stamped(at=1.0, sample=before),
        past=(Stamped(at=1.0, sample=before),),
        now=Stamped(at=2.0, sample=after),
    )
    (result,) = judged("kernel.reader", seen)
    assert result.verdict is Verdict.ERROR
    assert result.values["missing"] == after.lost - before.lost


def _log_bytes() -> int:
    """Of the kernel's ring, or more."""
    shown = subprocess.run(["dmesg"], capture_output=True, check=True).stdout
    return max(4 * len(shown), 1 << 20)


def _is_overrun(reader: Kmsg, number: int) -> bool:
    """Whether the oldest record that another reader gets is newer than what this one would read."""
    if number % 100 != 99:
        return False
    other = Kmsg(KMSG, "")
    other.look()
    oldest = other.oldest
    other.close()
    return oldest > reader.seq + 1


def test_records_that_are_none_are_counted_and_the_next_is_read() -> None:
    reader = Kmsg(KMSG, "")
    os.close(reader._fd)
    reader._fd, writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # each write is one record
    for raw in (
        b"6,5,1000,-;Oops: 1",
        b"\xff\xfe\x00",
        b"6;",
        b"6,9,2000,-;" + b"\\xff" * 400,
        b"3,10,2500,-;Kernel panic - not syncing: x",
    ):
        os.write(writing, raw)
    found = reader.look()
    assert [line.rule for line in found] == ["kernel.oops", "kernel.panic"]
    log = reader.known()
    assert (log.read, log.garbage, log.lost, log.oldest, log.seq) == (5, 2, 3, 5, 10)
    os.close(writing)
    assert reader.look() == []
    reader.close()


def test_what_is_not_the_kernel_log_is_not_read(tmp_path: Path) -> None:
    plain = tmp_path / "kmsg"
    plain.write_bytes(b"6,5,1000,-;Kernel panic - not syncing: x")
    for path in (plain, Path("/dev/null"), tmp_path / "none"):
        with pytest.raises(NotReadable):
            Kmsg(path, "")


def test_without_kernel_log_and_service_the_signal_is_absent(tmp_path: Path) -> None:
    empty = Here(root=str(tmp_path))
    assert KernelSource().absent(empty)
    assert KernelSource().absent(HERE) == ""
    with pytest.raises(NotReadable):
        KernelSource().sample(empty)
    assert KernelSource().fileno(empty) is None


def test_a_user_who_may_not_read_it_is_told_what_to_do() -> None:
    def looking() -> str:
        try:
            return f"read {KernelSource().sample(Here()).read > 0}"
        except NotReadable as reason:
            return str(reason)

    restricted = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1"
    said = as_nobody(looking)
    assert ("everstep check --serve" in said) is restricted
    assert (said == "read True") is not restricted


# --- memory that runs out, for real --------------------------------------------------------------

EATER = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
print("in", flush=True)
sys.stdin.readline()
hoard = bytearray(256 << 20)
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of 48 MiB."""
    cgroup = Path(f"/sys/fs/cgroup/memory/everstep-oom-{os.getpid()}-{time.monotonic_ns()}")
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(48 << 20))
        yield cgroup
    finally:
        _remove(cgroup)


def _remove(cgroup: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            cgroup.rmdir()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


def test_a_rank_that_the_oom_killer_ends_is_the_users(limited: Path, source: KernelSource) -> None:
    procs = str(limited / "cgroup.procs")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", EATER, procs], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as eater:
        assert eater.stdin is not None
        assert eater.stdout is not None
        assert eater.stdout.readline() == b"in\n"
        here = Here(pids=(eater.pid,))
        first = Stamped(at=1.0, sample=source.sample(here))
        assert f"/{limited.name}" in first.sample.ours.cgroups
        eater.stdin.write(b"\n")
        eater.stdin.flush()
        assert eater.wait(60) == -9
    now = source.sample(Here())
    deadline = time.monotonic() + 10
    while not _kills(now, eater.pid) and time.monotonic() < deadline:
        now = source.sample(Here())
    seen = History(first=first, now=Stamped(at=2.0, sample=now))
    item = f"pid {eater.pid}"
    (result,) = [each for each in judged("kernel.oom", seen) if each.item == item]
    assert result.verdict is Verdict.USER
    assert f"cgroup /{limited.name}" in result.why
    foreign = KernelSource()
    other = foreign.sample(Here())
    foreign.close()
    seen = History(first=first, now=Stamped(at=2.0, sample=other))
    (result,) = [each for each in judged("kernel.oom", seen) if each.item == item]
    assert result.verdict is Verdict.INFO


def _kills(log: KernelLog, pid: int) -> set[str]:
    found = {line.rule for line in log.lines if line.names.get("pid") == str(pid)}
    return found if found >= {"oom.why", "oom.killed"} else set()
