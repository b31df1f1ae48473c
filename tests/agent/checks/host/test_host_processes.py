"""Promises of the checks of processes, clock, main memory and processors."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from everstep.agent.checks.check import Here
from everstep.agent.checks.host.clock import ClockRight
from everstep.agent.checks.host.cpu import CpuSpeed
from everstep.agent.checks.host.dstate import Dstate
from everstep.agent.checks.host.edac import MemoryErrors
from everstep.agent.checks.host.open_files import RanksOpenFiles
from everstep.agent.checks.host.services import Services
from everstep.agent.checks.host.source_clock import Clock, ClockSample
from everstep.agent.checks.host.source_cpu import Cpu, CpuSample
from everstep.agent.checks.host.source_edac import Controller, Edac, EdacSample
from everstep.agent.checks.host.source_processes import (
    OpenFiles,
    Processes,
    ProcessesSample,
    Stuck,
)
from everstep.agent.checks.host.zombies import Zombies
from everstep.health import Counts
from tests.agent.checks.host.support import (
    HERE,
    cgroup,
    check_of,
    fake_root,
    judged,
    process,
    until,
    verdict,
    verdicts,
)

DSTATE = check_of(Dstate)
SERVICES = check_of(Services)
TWO_THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def ready(started: object) -> None:
    assert started.stdout.readline() == "ready\n"  # type: ignore[attr-defined]


# --- tasks that are stuck in the kernel ----------------------------------------------------------


def test_a_rank_that_no_signal_ends_is_suspect_with_its_threads() -> None:
    source = Processes()
    with (
        cgroup("freezer") as group,
        process(sys.executable, "-S", "-E", "-c", TWO_THREADS) as rank,
        process(sys.executable, "-S", "-E", "-c", TWO_THREADS) as other,
    ):
        ready(rank)
        ready(other)
        here = Here(pids=(rank.pid, other.pid))
        assert not mine(source.sample(here), rank.pid)
        (group / "cgroup.procs").write_text(str(rank.pid))
        (group / "freezer.state").write_text("FROZEN")
        until(lambda: (group / "freezer.state").read_text() == "FROZEN\n")
        samples = [source.sample(here) for _ in range(5)]
        rank.kill()
        assert len(mine(source.sample(here), rank.pid)) == 2, "killed, and still there"
        (group / "freezer.state").write_text("THAWED")
        rank.wait()
        after = source.sample(here)
    results = {each.item: each for each in judged(DSTATE, samples, here, every_s=60.0)}
    tasks = mine(samples[0], rank.pid)
    assert len(tasks) == 2
    assert rank.pid in {each.pid for each in tasks}
    assert not mine(samples[0], other.pid)
    for task in tasks:
        assert results[f"pid {task.pid}"].verdict == "suspect"
        assert "for 240 s" in results[f"pid {task.pid}"].why
    later = verdicts(DSTATE, [*samples, after], here, every_s=60.0)
    assert not later.keys() & {f"pid {task.pid}" for task in tasks}


def mine(sample: ProcessesSample, rank: int) -> list[Stuck]:
    return [each for each in sample.stuck if each.rank == rank]


RANK = Stuck(pid=7, start=70, name="python3", rank=7)
WORKER = Stuck(pid=8, start=80, name="pt_data_worker", rank=7)
SMI = Stuck(pid=9, start=90, name="nvidia-smi", where="os_acquire_mutex")
BACKUP = Stuck(pid=10, start=100, name="rsync")
AGAIN = Stuck(pid=7, start=71, name="python3", rank=7)


def stuck(*tasks: Stuck) -> ProcessesSample:
    return ProcessesSample(processes=100, stuck=tasks)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([stuck(RANK)] * 5, {"pid 7": "suspect"}),
        ([stuck(RANK)] * 9, {"pid 7": "suspect"}),
        ([stuck(RANK)] * 4, {"": "info"}),
        ([stuck(RANK)] * 4 + [stuck()], {"": "info"}),
        ([stuck(RANK), stuck(RANK), stuck(), stuck(RANK), stuck(RANK)], {"": "info"}),
        ([stuck(RANK), stuck(RANK), stuck(AGAIN), stuck(RANK), stuck(RANK)], {"": "info"}),
        ([stuck(SMI, WORKER)] * 5, {"pid 9": "suspect", "pid 8": "suspect"}),
        ([stuck(BACKUP)] * 5, {"pid 10": "warn"}),
        ([stuck()] * 5, {"": "info"}),
    ],
)
def test_the_same_task_stuck_five_times_is_told(
    samples: list[ProcessesSample], expected: dict[str, str]
) -> None:
    assert verdicts(DSTATE, samples, every_s=60.0) == expected


def test_a_site_may_hear_of_ranks_only() -> None:
    check = check_of(Dstate, ranks_only=True)
    samples = [stuck(SMI, WORKER, BACKUP)] * 5
    assert verdicts(check, samples) == {"pid 9": "suspect", "pid 8": "suspect"}
    assert verdicts(check, [stuck(BACKUP)] * 5) == {"": "info"}


STAT = "{pid} ({name}) {state} {parent} 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 {start} 0 0 0\n"


def stat(pid: int, name: str, state: str, parent: int = 1) -> str:
    return STAT.format(pid=pid, name=name, state=state, parent=parent, start=pid * 10)


def test_processes_are_told_apart_by_what_the_kernel_says_of_them(tmp_path: Path) -> None:
    files = {
        "/proc/7/stat": stat(7, "a) D (b c", "S"),
        "/proc/7/task/7/stat": stat(7, "python3", "S"),
        "/proc/7/task/71/stat": stat(71, "cuda-EvtHandlr", "D"),
        "/proc/8/stat": stat(8, "pt_data_worker", "D", parent=7),
        "/proc/8/wchan": "rpc_wait_bit_killable",
        "/proc/9/stat": stat(9, "nv_queue", "D", parent=2),
        "/proc/9/wchan": "0",
        "/proc/10/stat": stat(10, "sh", "Z"),
        "/proc/11/stat": "garbage",
        "/proc/12/stat": stat(12, "slurmd", "S"),
        "/proc/13/stat": stat(13, "nv-fabricmanage", "S"),
        "/proc/14/comm": "gone meanwhile",
        "/proc/sys/kernel/pid_max": "4194304\n",
    }
    sample = Processes().sample(
        msgspec.structs.replace(fake_root(tmp_path, files), pids=(7, 4_000_000))
    )
    assert sample.processes == 6
    assert sample.zombies == 1
    assert sample.daemons == ("nv-fabricmanager", "slurmd")
    assert {(each.pid, each.rank, each.where) for each in sample.stuck} == {
        (71, 7, ""),
        (8, 7, "rpc_wait_bit_killable"),
        (9, 0, ""),
    }


def test_the_dead_who_nobody_buries_are_counted() -> None:
    read_end, write_end = os.pipe()
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.close(read_end)
    os.close(write_end)
    try:
        until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][1] == "Z")
        assert Processes().sample(HERE).zombies >= 1
    finally:
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("zombies", "pid_max", "expected"),
    [(1000, None, "info"), (1001, 4194304, "warn"), (300, 1024, "warn"), (200, 1024, "info")],
)
def test_many_zombies_are_a_warning(zombies: int, pid_max: int | None, expected: str) -> None:
    sample = ProcessesSample(processes=2000, zombies=zombies, pid_max=pid_max)
    assert verdict(check_of(Zombies), [sample]) == expected


def test_open_files_of_ranks_are_counted() -> None:
    own = os.getpid()
    sample = Processes().sample(Here(pids=(own,)))
    (files,) = sample.open_files
    assert (files.pid, files.used > 2) == (own, True)
    check = check_of(RanksOpenFiles)
    many = ProcessesSample(
        processes=1,
        open_files=(
            OpenFiles(pid=1, used=80, limit=100),
            OpenFiles(pid=2, used=81, limit=100),
        ),
    )
    assert verdicts(check, [many]) == {"pid 1": "info", "pid 2": "warn"}


def daemons(*names: str) -> ProcessesSample:
    return ProcessesSample(processes=9, daemons=names)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([daemons("slurmd")], {"slurmd": "info"}),
        ([daemons("slurmd"), daemons()], {"slurmd": "info"}),
        ([daemons("slurmd"), daemons(), daemons()], {"slurmd": "warn"}),
        ([daemons("slurmd"), daemons(), daemons(), daemons("slurmd")], {"slurmd": "info"}),
        ([daemons(), daemons()], {}),
        ([daemons(), daemons("slurmd")], {}),
    ],
)
def test_a_daemon_that_ended_is_a_warning(
    samples: list[ProcessesSample], expected: dict[str, str]
) -> None:
    assert verdicts(SERVICES, samples) == expected


def test_a_daemon_that_the_site_wants_is_missed_from_the_start() -> None:
    wanted = check_of(Services, wanted=("munged",))
    assert verdicts(wanted, [daemons()]) == {"munged": "info"}
    assert verdicts(wanted, [daemons(), daemons()]) == {"munged": "warn"}


# --- clock ---------------------------------------------------------------------------------------


def clock(**fields: object) -> ClockSample:
    plain = {"ahead_s": 1e9, "offset_s": 0.001, "synchronised": True, "clocksource": "tsc"}
    return msgspec.convert(plain | fields, ClockSample)


@pytest.mark.parametrize(
    ("fields", "item", "expected"),
    [
        ({}, "", "info"),
        ({"offset_s": 0.1}, "", "info"),
        ({"offset_s": 0.11}, "", "warn"),
        ({"offset_s": 1.1}, "", "suspect"),
        ({"synchronised": False, "offset_s": 16.0}, "", "warn"),
        ({"offset_s": None}, "", "error"),
        ({"ahead_s": 1e9 + 0.5}, "set", "info"),
        ({"ahead_s": 1e9 + 0.6}, "set", "warn"),
        ({"ahead_s": 1e9 - 3600}, "set", "warn"),
        ({"clocksource": "kvm-clock"}, "clocksource", "info"),
        ({"clocksource": "hpet"}, "clocksource", "warn"),
        ({"clocksource": ""}, "clocksource", "error"),
    ],
)
def test_a_clock_that_is_off_or_was_set(
    fields: dict[str, object], item: str, expected: str
) -> None:
    found = verdicts(check_of(ClockRight), [clock(), clock(**fields)])
    assert found[item] == expected
    assert {each for key, each in found.items() if key != item} == {"info"}


def test_a_clock_that_was_always_read_slowly_or_far_away_is_no_change() -> None:
    slow = clock(clocksource="hpet", ahead_s=0.0)
    assert set(verdicts(check_of(ClockRight), [slow]).values()) == {"info"}


def test_the_clock_of_this_machine_is_asked() -> None:
    one, two = Clock().sample(HERE), Clock().sample(HERE)
    assert one.offset_s is not None
    assert one.clocksource
    assert abs(one.ahead_s - two.ahead_s) < 0.1
    assert abs(one.ahead_s - (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))) < 0.1


# --- main memory and processors ------------------------------------------------------------------


def edac(corrected: int, uncorrected: int = 0) -> EdacSample:
    return EdacSample(controllers={"mc0": Controller(corrected=corrected, uncorrected=uncorrected)})


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([edac(500, 3)], "info"),
        ([edac(500, 3), edac(509, 3)], "info"),
        ([edac(500), edac(510)], "suspect"),
        ([edac(500, 3), edac(500, 4)], "evict"),
        ([edac(500, 3), edac(0, 0)], "info"),
        ([edac(500, 3), edac(0, 0), edac(0, 1)], "evict"),
        ([EdacSample(controllers={}), edac(500, 3)], "info"),
    ],
)
def test_errors_of_main_memory(samples: list[EdacSample], expected: str) -> None:
    assert verdict(check_of(MemoryErrors), samples, every_s=60.0) == expected


def test_memory_is_of_all_machines_on_one_kernel() -> None:
    samples = [edac(0, 0), edac(0, 1)]
    (result,) = judged(check_of(MemoryErrors), samples, Here(boot_id="k1"))
    assert (result.verdict, result.cause) == ("evict", "boot k1")
    assert judged(check_of(MemoryErrors), samples)[0].cause == ""


def test_corrected_errors_of_earlier_hours_do_not_add_up() -> None:
    samples = [edac(count) for count in range(0, 40, 4)]
    assert verdict(check_of(MemoryErrors), samples, every_s=1800.0) == "info"


def test_memory_controllers_are_read_where_there_are_any(tmp_path: Path) -> None:
    root = "/sys/devices/system/edac/mc"
    assert Edac().absent(fake_root(tmp_path, {f"{root}/power/control": "auto"}))
    here = fake_root(
        tmp_path,
        {f"{root}/mc{n}/{kind}_count": f"{n}\n" for n in (0, 1) for kind in ("ce", "ue")},
    )
    assert not Edac().absent(here)
    assert Edac().sample(here).controllers == {
        "mc0": Controller(corrected=0, uncorrected=0),
        "mc1": Controller(corrected=1, uncorrected=1),
    }
    (tmp_path / root.lstrip("/") / "mc1/ue_count").unlink()
    with pytest.raises(FileNotFoundError):
        Edac().sample(here)


def cpu(throttles: int | None, online: int = 4) -> CpuSample:
    return CpuSample(online=online, throttles=throttles, governors=("powersave",))


@pytest.mark.parametrize(
    ("throttles", "expected"),
    [
        ([5], "info"),
        ([0, 1, 2, 3, 4, 5], "warn"),
        ([9, 9, 0, 1, 2, 3, 4, 5], "warn"),
        ([0, 1, 2, 3, 4], "info"),
        ([0, 1, 2, 2, 3, 4], "info"),
        ([9, 0, 1, 2, 3, 4], "info"),
    ],
)
def test_heat_that_goes_on_is_a_warning(throttles: list[int], expected: str) -> None:
    results = judged(check_of(CpuSpeed), [cpu(each) for each in throttles])
    heat = next(each for each in results if each.item == "heat")
    assert heat.verdict == expected
    assert heat.counts == (Counts.WITH_SLOWDOWN if heat.failed else Counts.NEVER)


def test_processors_that_are_off_and_governors() -> None:
    check = check_of(CpuSpeed, governor="performance")
    assert verdicts(check, [cpu(None, 4), cpu(None, 3)]) == {"online": "warn", "governor": "warn"}
    assert verdicts(check_of(CpuSpeed), [cpu(None, 4)]) == {"online": "info", "governor": "info"}
    assert verdicts(check_of(CpuSpeed), [CpuSample(online=4)]) == {"online": "info"}


def test_processors_are_read(tmp_path: Path) -> None:
    assert Cpu().sample(HERE).online == os.cpu_count()
    root = "/sys/devices/system/cpu"
    files = {
        f"{root}/online": "0-1,3\n",
        f"{root}/cpu0/thermal_throttle/core_throttle_count": "3\n",
        f"{root}/cpu2/thermal_throttle/core_throttle_count": "9\n",
        f"{root}/cpu3/thermal_throttle/package_throttle_count": "4\n",
        f"{root}/cpufreq/policy0/scaling_governor": "powersave\n",
        f"{root}/cpufreq/policy3/scaling_governor": "performance\n",
        f"{root}/cpufreq/boost": "1\n",
    }
    assert Cpu().sample(fake_root(tmp_path, files)) == CpuSample(
        online=3, throttles=7, governors=("performance", "powersave")
    )
