"""Promises of the checks of memory, load and the job's cgroup, with a real kill among them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from everstep.agent.checks.host.cgroup import OwnCgroup
from everstep.agent.checks.host.handles import Handles
from everstep.agent.checks.host.load import Overload
from everstep.agent.checks.host.memory import Memory
from everstep.agent.checks.host.oom import Oom
from everstep.agent.checks.host.oom_anywhere import OomAnywhere
from everstep.agent.checks.host.pressure import Pressures
from everstep.agent.checks.host.reading import growth, size
from everstep.agent.checks.host.source_cgroup import (
    Cgroup,
    CgroupSample,
    GroupCpu,
    GroupMemory,
    GroupTasks,
)
from everstep.agent.checks.host.source_load import Load, LoadSample, Pressure
from everstep.agent.checks.host.source_proc import Proc, ProcSample
from everstep.diagnosis.words import Category
from everstep.health import Counts
from tests.agent.checks.host.support import (
    HERE,
    cgroup,
    check_of,
    fake_root,
    judged,
    verdict,
    verdicts,
)

GIB = 1 << 30
KILLED_IN_GROUP = """
import subprocess, sys
from pathlib import Path
import msgspec
from everstep.agent.checks.check import Here
from everstep.agent.checks.host.source_cgroup import Cgroup
from everstep.agent.checks.host.source_proc import Proc

Path(sys.argv[1], "cgroup.procs").write_text("0")
sources = Cgroup(), Proc()
before = [source.sample(Here()) for source in sources]
hungry = [sys.executable, "-S", "-E", "-c", "bytearray(400 << 20)"]
print(subprocess.run(hungry).returncode)
after = [source.sample(Here()) for source in sources]
print(msgspec.json.encode([*before, *after]).decode())
"""


def test_a_real_kill_for_want_of_memory_is_told_as_the_jobs_own_limit() -> None:
    with cgroup("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(96 << 20))
        argv = [sys.executable, "-c", KILLED_IN_GROUP, str(group)]
        ran = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    code, samples = ran.stdout.splitlines()
    assert code == "-9"
    raw = msgspec.json.decode(samples)
    groups = [msgspec.convert(each, CgroupSample) for each in raw[::2]]
    machines = [msgspec.convert(each, ProcSample) for each in raw[1::2]]
    assert groups[0].memory is not None
    assert (groups[0].memory.group, groups[0].memory.limit) == (str(group), 96 << 20)
    (result,) = judged(check_of(Oom), groups)
    assert (result.verdict, result.category) == ("user", Category.CPU_OOM)
    assert "ended 1 processes" in result.why
    assert "96.0 MiB" in result.why
    assert verdict(check_of(OomAnywhere), machines) == "warn"
    assert verdict(check_of(Oom), groups[1:]) == "info", "a first sample is a baseline"


def group_memory(**fields: object) -> CgroupSample:
    plain = {"group": "/g", "oom_kills": 3, "limit_hits": 5, "used": GIB, "limit": 10 * GIB}
    return CgroupSample(memory=msgspec.convert(plain | fields, GroupMemory))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, "info"),
        ({}, {"oom_kills": 4, "limit_hits": 6}, "user"),
        ({"used": 9 * GIB}, {"oom_kills": 4}, "user"),
        ({}, {"oom_kills": 4}, "suspect"),
        ({"limit": None}, {"oom_kills": 4, "limit": None}, "suspect"),
        ({}, {"oom_kills": 1}, "info"),
        ({"group": "/other", "oom_kills": 0}, {}, "info"),
        ({"oom_kills": None}, {}, "info"),
        ({}, {"oom_kills": None}, "error"),
    ],
)
def test_a_kill_is_the_jobs_fault_if_its_limit_was_reached(
    before: dict[str, object], after: dict[str, object], expected: str
) -> None:
    assert verdict(check_of(Oom), [group_memory(**before), group_memory(**after)]) == expected


def test_a_kill_is_told_once() -> None:
    samples = [group_memory(), group_memory(oom_kills=4), group_memory(oom_kills=4)]
    assert verdict(check_of(Oom), samples[:2]) == "suspect"
    assert verdict(check_of(Oom), samples) == "info"


def test_without_a_memory_cgroup_there_is_nothing_to_judge() -> None:
    assert not judged(check_of(Oom), [CgroupSample()])
    assert not judged(check_of(OwnCgroup), [CgroupSample()])


V2 = {
    "/proc/self/cgroup": "0::/kubepods/pod1/c1\n",
    "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "/sys/fs/cgroup/kubepods/pod1/memory.max": "1000\n",
    "/sys/fs/cgroup/kubepods/pod1/memory.events": "oom 3\noom_kill 9\n",
    "/sys/fs/cgroup/kubepods/pod1/c1/memory.max": "max\n",
    "/sys/fs/cgroup/kubepods/pod1/c1/memory.current": "900\n",
    "/sys/fs/cgroup/kubepods/pod1/c1/memory.stat": "anon 1\ninactive_file 300\n",
    "/sys/fs/cgroup/kubepods/pod1/c1/memory.events": "low 0\noom 2\noom_kill 1\n",
    "/sys/fs/cgroup/kubepods/pod1/c1/cpu.stat": "usage_usec 5\nnr_periods 40\nnr_throttled 4\n",
    "/sys/fs/cgroup/kubepods/pod1/c1/pids.current": "12\n",
    "/sys/fs/cgroup/kubepods/pod1/c1/pids.max": "max\n",
}


def test_version_2_of_cgroups_is_read_with_the_limits_around_the_group(tmp_path: Path) -> None:
    sample = Cgroup().sample(fake_root(tmp_path, V2))
    assert sample == CgroupSample(
        memory=GroupMemory(
            group="/sys/fs/cgroup/kubepods/pod1/c1",
            oom_kills=1,
            limit_hits=5,
            used=600,
            limit=1000,
        ),
        cpu=GroupCpu(periods=40, throttled=4),
        tasks=GroupTasks(used=12, limit=None),
    )


def test_in_a_container_the_group_is_what_is_mounted(tmp_path: Path) -> None:
    for number, (member, root) in enumerate(
        [
            ("/docker/abc/job", "/docker/abc"),  # a group below
            ("/docker/abc", "/docker/abc"),  # bound from the host's tree
            ("/", "/"),  # a cgroup namespace
            ("/docker/abc", "/"),  # the host's name, and a tree that does not have it
            ("/../other", "/"),  # outside of the namespace
        ]
    ):
        group = "/cg/memory" + ("/job" if member.endswith("/job") else "")
        files = {
            "/proc/self/cgroup": f"4:memory:{member}\n0::/\n",
            "/proc/self/mountinfo": f"31 23 0:29 {root} /cg/memory ro - cgroup cgroup rw,memory\n",
            f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n",
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/memory.usage_in_bytes": "4096\n",
        }
        memory = Cgroup().sample(fake_root(tmp_path / str(number), files)).memory
        assert memory == GroupMemory(
            group=group, oom_kills=None, limit_hits=0, used=4096, limit=None
        )


def test_a_process_that_is_moved_is_followed(tmp_path: Path) -> None:
    source, here = Cgroup(), fake_root(tmp_path, V2)
    source.sample(here)
    fake_root(tmp_path, {"/proc/self/cgroup": "0::/kubepods/pod1\n"})
    assert source.sample(here).memory is None, "no memory.current there"


def test_limits_of_the_group_are_warnings() -> None:
    def of(used: int, throttled: int, tasks: int) -> list[CgroupSample]:
        memory = GroupMemory(group="/g", oom_kills=0, limit_hits=0, used=used, limit=1000)
        group = GroupTasks(used=tasks, limit=100)
        cpus = (GroupCpu(periods=1000, throttled=10), GroupCpu(periods=1100, throttled=throttled))
        return [CgroupSample(memory=memory, cpu=cpu, tasks=group) for cpu in cpus]

    own = check_of(OwnCgroup)
    good, bad = of(950, 35, 80), of(951, 36, 81)
    assert verdicts(own, good) == {"memory": "info", "tasks": "info", "cpu": "info"}
    results = judged(own, bad)
    assert {each.verdict for each in results} == {"warn"}
    assert results[2].counts == Counts.NEVER, "the next machine would have the same limit"
    few = [CgroupSample(cpu=GroupCpu(periods=n, throttled=n)) for n in (0, 99)]
    assert verdict(own, few) == "info"
    reset = [CgroupSample(cpu=GroupCpu(periods=n, throttled=n)) for n in (5000, 50)]
    assert verdict(own, reset) == "info"


# --- memory and boot -----------------------------------------------------------------------------


def proc(**fields: object) -> ProcSample:
    plain = {"total": 1000, "available": 500, "oom_kills": 7}
    return msgspec.convert(plain | fields, ProcSample)


@pytest.mark.parametrize(("available", "expected"), [(1000, "info"), (50, "info"), (49, "warn")])
def test_little_memory_is_a_warning(available: int, expected: str) -> None:
    assert verdict(check_of(Memory), [proc(available=available)]) == expected


def test_a_threshold_is_what_the_site_says() -> None:
    assert verdict(check_of(Memory, available=0.6), [proc()]) == "warn"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([7], "info"),
        ([7, 7], "info"),
        ([7, 8], "warn"),
        ([7, 0], "info"),
        ([7, 0, 1], "warn"),
        ([7, 8, 8], "info"),
        ([7, None], "error"),
    ],
)
def test_kills_anywhere_are_a_warning(counts: list[int | None], expected: str) -> None:
    samples = [proc(oom_kills=count) for count in counts]
    assert verdict(check_of(OomAnywhere), samples) == expected


def test_memory_of_this_machine_is_read() -> None:
    sample = Proc().sample(HERE)
    assert 0 < sample.available <= sample.total
    assert sample.oom_kills is not None


# --- load ----------------------------------------------------------------------------------------


def load(**fields: object) -> LoadSample:
    plain = {"load": 1.0, "cpus": 8, "ticks": 10_000, "steal_ticks": 100}
    more = {"files": 800, "files_max": 1000, "tasks": 80, "tasks_max": 100}
    return msgspec.convert(plain | more | fields, LoadSample)


def test_load_and_stolen_time_are_never_more_than_warnings() -> None:
    check = check_of(Overload)
    assert verdicts(check, [load(load=16.0)]) == {"": "info", "steal": "info"}
    busy = [load(load=9999.0), load(load=9999.0, ticks=20_000, steal_ticks=1101)]
    assert verdicts(check, busy) == {"": "warn", "steal": "warn"}
    assert verdicts(check, [load(), load(ticks=20_000, steal_ticks=1100)])["steal"] == "info"
    assert verdicts(check, [load(), load(ticks=10, steal_ticks=5)])["steal"] == "info", "reset"


@pytest.mark.parametrize(
    ("name", "pressure", "expected"),
    [
        ("cpu", Pressure(some=0.5, full=0.0), "info"),
        ("cpu", Pressure(some=0.51, full=0.0), "warn"),
        ("memory", Pressure(some=0.9, full=0.2), "info"),
        ("memory", Pressure(some=0.9, full=0.21), "warn"),
        ("io", Pressure(some=0.9, full=0.6), "info"),
        ("io", Pressure(some=0.9, full=0.61), "warn"),
    ],
)
def test_waiting_is_a_warning(name: str, pressure: Pressure, expected: str) -> None:
    sample = load(pressure={name: {"some": pressure.some, "full": pressure.full}})
    assert verdicts(check_of(Pressures), [sample]) == {name: expected}


def test_a_kernel_that_does_not_tell_who_waits_is_no_failure() -> None:
    assert not judged(check_of(Pressures), [load()])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"open files": "info", "tasks": "info"}),
        ({"files": 801, "tasks": 81}, {"open files": "warn", "tasks": "warn"}),
        ({"files": None, "tasks_max": None}, {"open files": "error", "tasks": "error"}),
    ],
)
def test_limits_of_the_machine_are_warnings(
    fields: dict[str, object], expected: dict[str, str]
) -> None:
    assert verdicts(check_of(Handles), [load(**fields)]) == expected


def test_load_of_this_machine_is_read() -> None:
    sample = Load().sample(HERE)
    assert sample.cpus >= 1
    assert 0 <= sample.steal_ticks <= sample.ticks
    assert set(sample.pressure) == {"cpu", "memory", "io"}
    assert 0 < sample.tasks < (sample.tasks_max or 0)


def test_files_of_the_kernel_are_taken_apart(tmp_path: Path) -> None:
    files = {
        "/proc/loadavg": "0.10 12.50 3.00 2/345 6789\n",
        "/proc/stat": "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2\ncpu1 1 2\nintr 5 0 0\n",
        "/proc/pressure/memory": "some avg10=0.00 avg60=12.50 avg300=1.00 total=5\n"
        "full avg10=0.00 avg60=2.50 avg300=1.00 total=5\n",
        "/proc/sys/fs/file-nr": "992\t0\t9223372036854775807\n",
        "/proc/sys/kernel/pid_max": "4194304\n",
        "/proc/sys/kernel/threads-max": "1000\n",
    }
    assert Load().sample(fake_root(tmp_path, files)) == LoadSample(
        load=12.5,
        cpus=2,
        ticks=36,
        steal_ticks=8,
        pressure={"memory": Pressure(some=0.125, full=0.025)},
        files=992,
        files_max=9223372036854775807,
        tasks=345,
        tasks_max=1000,
    )


# --- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], 0),
        ([5], 0),
        ([5, 7, 7, 8], 3),
        ([5, 2], 0),
        ([5, 2, 4], 2),
        ([5, None, 7], 2),
        ([None, 3], 0),
    ],
)
def test_a_counter_grows_from_its_first_value_and_anew_after_a_reset(
    counts: list[int | None], expected: int
) -> None:
    assert growth(counts) == expected


def test_sizes_are_written_for_people() -> None:
    assert [size(each) for each in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3072.0 TiB",
    ]
