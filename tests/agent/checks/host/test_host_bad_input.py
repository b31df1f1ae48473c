"""Promises of all host checks: garbage, missing files and missing rights accuse nobody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from everstep.agent.checks.check import AnyCheck, Here, MakeSource, NotReadable
from everstep.agent.checks.host import CHECKS, SOURCES
from everstep.diagnosis.words import Verdict
from everstep.health import Result
from everstep.model import Value
from tests.agent.checks.host.support import as_nobody, check_of, fake_root, history

_STAT = "(python3) S 1 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 70 0 0 0\n"
VALID = {
    "/proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 900 kB\n",
    "/proc/vmstat": "nr_free_pages 5\noom_kill 2\n",
    "/proc/loadavg": "0.10 0.20 0.30 2/345 6789\n",
    "/proc/stat": "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2\nintr 5 0 0\n",
    "/proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n",
    "/proc/pressure/memory": "full avg10=0.00 avg60=0.00 avg300=0.00 total=5\n",
    "/proc/sys/fs/file-nr": "992\t0\t9223372036854775807\n",
    "/proc/sys/kernel/pid_max": "4194304\n",
    "/proc/sys/kernel/threads-max": "1000\n",
    "/proc/self/cgroup": "",
    "/proc/self/mountinfo": "",
    "/proc/7/stat": f"7 {_STAT}",
    "/proc/7/task/7/stat": f"7 {_STAT}",
    "/proc/7/wchan": "0",
    "/proc/8/stat": f"8 {_STAT}".replace(") S", ") D"),
    "/proc/8/wchan": "rpc_wait_bit_killable",
    "/cg/cpu.stat": "nr_periods 40\nnr_throttled 4\n",
    "/cg/pids.current": "12\n",
    "/cg/pids.max": "max\n",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "/sys/devices/system/edac/mc/mc0/ce_count": "4\n",
    "/sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    "/sys/devices/system/cpu/online": "0-1\n",
    "/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
    "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "performance\n",
}
"""A healthy machine: what lacks here is where cgroups differ."""
V1 = {
    "/proc/self/cgroup": "4:memory,cpu,pids:/\n",
    "/proc/self/mountinfo": "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "31 23 0:29 / /cg rw - cgroup cgroup rw,memory,cpu,pids\n",
    "/cg/memory.oom_control": "under_oom 0\noom_kill 1\n",
    "/cg/memory.limit_in_bytes": "1000\n",
    "/cg/memory.usage_in_bytes": "900\n",
    "/cg/memory.failcnt": "3\n",
    "/cg/memory.stat": "total_inactive_file 300\n",
}
V2 = {
    "/proc/self/cgroup": "0::/\n",
    "/proc/self/mountinfo": "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "31 23 0:29 / /cg rw - cgroup2 cgroup2 rw\n",
    "/cg/memory.max": "1000\n",
    "/cg/memory.current": "900\n",
    "/cg/memory.events": "oom 2\noom_kill 1\n",
    "/cg/memory.stat": "inactive_file 300\n",
}
TREES = {"v1": VALID | V1, "v2": VALID | V2}
GARBAGE = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "bytes": bytes(range(256)) * 3,
    "negative": b"-1\n",
    "not a number": b"nan nan nan nan/nan nan\n",
    "hardly a number": b"nan nan nan 2/345 1\nsome avg60=nan\nfull avg60=inf\n",
    "infinite": b"inf inf inf inf/inf inf\n",
    "huge": b"9" * 5000 + b"\n",
    "more than 64 bits": b"18446744073709551616 18446744073709551616 1 1/18446744073709551616\n",
    "huge table": b"MemTotal: 99999999999999999999 kB\noom_kill 99999999999999999999\ncpu "
    + b"9" * 30,
    "short lines": b"cpu\ncpu0\nsome\nfull avg60\n0::\n7 (\n7 (a) D\n:::\n - \n",
    "a range": b"0-99999999999\n",
    "a long line": b"a " * 200_000,
}


@pytest.fixture(params=SOURCES, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> MakeSource:
    made: MakeSource = request.param
    return made


@pytest.fixture(params=TREES)
def files(request: pytest.FixtureRequest) -> dict[str, str]:
    return TREES[request.param]


def machine(root: Path, files: dict[str, str]) -> Here:
    return msgspec.structs.replace(
        fake_root(root, files), paths=("/cg", "/no\0path"), pids=(7, 4_000_000)
    )


HARMLESS = {Verdict.INFO, Verdict.ERROR, Verdict.WARN}


def test_a_healthy_machine_is_well(
    source: MakeSource, files: dict[str, str], tmp_path: Path
) -> None:
    found = results(source, machine(tmp_path, files))
    bad = {(each.check, each.item) for each in found if each.verdict is not Verdict.INFO}
    # Its clock is this machine's, a task waits for storage, and one path is none at all.
    assert bad <= {("host.clock", ""), ("host.dstate", "pid 8"), ("host.mounts", "/no\0path")}
    assert {each.check for each in found} >= {
        check.name for check in CHECKS if check.source == source.name
    } - {"host.open_files", "host.services"}


def test_garbage_in_any_file_accuses_nobody(
    source: MakeSource, files: dict[str, str], tmp_path: Path
) -> None:
    here = machine(tmp_path, files)
    for name in used(source, files):
        for kind, content in GARBAGE.items():
            here.path(name).write_bytes(content)
            assert {each.verdict for each in results(source, here)} <= HARMLESS, (name, kind)
        here.path(name).write_text(files[name])


def used(source: MakeSource, files: dict[str, str]) -> Iterator[str]:
    """Those that the source reads."""
    starts = {
        "proc": ("/proc/meminfo", "/proc/vmstat", "/proc/sys/kernel/random"),
        "load": ("/proc/loadavg", "/proc/stat", "/proc/pressure", "/proc/sys"),
        "cgroup": ("/proc/self", "/cg"),
        "mounts": ("/proc/self/mountinfo",),
        "clock": ("/sys/devices/system/clocksource",),
        "processes": ("/proc/7", "/proc/8", "/proc/sys/kernel/pid_max"),
        "edac": ("/sys/devices/system/edac",),
        "cpu": ("/sys/devices/system/cpu",),
    }
    return (name for name in files if name.startswith(starts[source.name]))


def results(source: MakeSource, here: Here) -> list[Result]:
    """What its checks say of it three times over; nothing if it cannot be read."""
    made = source()
    if made.absent(here):
        return []
    try:
        sample = made.sample(here)
    except (NotReadable, OSError, ValueError):
        return []
    sample = travelled(sample)
    return [
        result
        for check in checks_of(source)
        for result in check.judge(here, history([sample] * 30, every_s=source.every_s))
    ]


def travelled(sample: Value) -> Any:
    """Samples come from a child, and outlive the agent."""
    again = msgspec.json.decode(msgspec.json.encode(sample), type=type(sample))
    assert again == sample
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=type(sample)) == sample
    return again


def checks_of(source: MakeSource) -> list[AnyCheck]:
    return [check_of(check) for check in CHECKS if check.source == source.name]


def test_every_source_is_judged_and_every_check_has_one() -> None:
    assert {check.source for check in CHECKS} == {source.name for source in SOURCES}
    assert all(check.about and check.name.startswith("host.") for check in CHECKS)


def test_a_machine_without_a_single_file_has_none_of_it(source: MakeSource, tmp_path: Path) -> None:
    made, here = source(), Here(root=str(tmp_path))
    if not made.absent(here):
        assert source.name == "clock", "it asks the kernel, not a file"
    else:
        assert made.absent(here)[0].islower()


def test_files_that_vanish_one_by_one_accuse_nobody(
    source: MakeSource, files: dict[str, str], tmp_path: Path
) -> None:
    here = machine(tmp_path, files)
    for name in used(source, files):
        here.path(name).unlink()
        assert {each.verdict for each in results(source, here)} <= HARMLESS, name
        here.path(name).write_text(files[name])


@pytest.fixture
def open_path() -> Iterator[Path]:
    """As `tmp_path`, which is closed to others."""
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_whoever_has_no_rights_is_told_so_or_sees_what_is_public(
    source: MakeSource, open_path: Path
) -> None:
    hidden = open_path / "hidden"
    (hidden / "below").mkdir(parents=True)
    hidden.chmod(0o700)
    with as_nobody():
        found = results(source, Here(paths=(str(hidden / "below"),), pids=(os.getpid(),)))
    assert found or source().absent(Here()), "these files are public"
    assert not [each for each in found if each.verdict in {Verdict.SUSPECT, Verdict.EVICT}]


def test_what_only_root_may_read_accuses_nobody(
    source: MakeSource, files: dict[str, str], open_path: Path
) -> None:
    here = machine(open_path, files)
    for name in (*used(source, files), "/proc", "/cg", "/sys/devices/system/edac/mc", "/"):
        path = here.path(name)
        path.chmod(0o000)
        with as_nobody():
            found = results(source, here)
        path.chmod(0o755)
        assert {each.verdict for each in found} <= HARMLESS, name
