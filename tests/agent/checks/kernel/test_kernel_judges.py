"""Whom a line of the kernel log accuses, and of what: judges, from lines to results."""

from __future__ import annotations

import msgspec
import pytest

from everstep.agent.checks.kernel.attribution import pci_address
from everstep.agent.checks.kernel.lines import Ours
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from tests.agent.checks.kernel.kernel_logs import BOOT, history, judged, line, log

OURS = Ours(
    pci=("0000:3b:00.0", "0000:4d:01.0", "0000:05:00.0"),
    disks=("nvme0", "nvme0n1", "nvme0n1p2", "ata1", "sda", "sda1"),
    interfaces=("eth0",),
    servers=("store-3", "nfs4", "lus"),
    cgroups=("/kubepods/pod7", "*0a1b2c3d-0000-1111-2222-333344445555"),
    pids=(991,),
    uuids={"GPU-5ea5c1b4-0c4b-4a4f-9d3c-0123456789ab": "0000:3b:00.0"},
)
HUNG = "INFO: task python3:991 blocked for more than 120 seconds."
IO_ERROR = "I/O error, dev nvme0n1p2, sector 4992 op 0x1:(WRITE) flags 0x0"
NFS = "nfs: server store-3 not responding, still trying"
DEAD_NIC = "mlx5_core 0000:3b:00.0: print_health_info:458: synd 0x8: unrecoverable hardware error"
EVICTED = "LustreError: 167-0: lus-OST3-osc: This client was evicted by lus-OST3; in progress"
LUSTRE = (
    "Lustre: lus-OST0003-osc-ff1: Connection to lus-OST0003 (at 10.1.1.1@o2ib) was lost; in "
    "progress operations using this service will wait"
)
RESTORED = "Lustre: lus-OST0003-osc-ff1: Connection restored to {} (at 10.1.1.1@o2ib)"


def one(text: str, at: float = 999.0, first_seq: int = -1) -> Result:
    found = judged("kernel.log", history(log(line(7, at, text), ours=OURS), first_seq))
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("evict os_kernel_panic", "Kernel panic - not syncing: Fatal exception"),
        ("suspect os_kernel_panic", "Oops: 0002 [#1] SMP"),
        ("evict os_kernel_panic", "watchdog: Watchdog detected hard LOCKUP on cpu 3"),
        ("suspect os_kernel_panic", "watchdog: BUG: soft lockup - CPU#4 stuck for 23s! [x:1]"),
        ("evict os_kernel_panic", "EDAC MC0: 1 UE memory read error on x"),
        ("suspect os_kernel_panic", HUNG),
        ("evict infiniband_error", DEAD_NIC),
        ("evict gpu_unavailable", "pcieport 0000:4d:01.0: DPC: containment event, status:0x1f01"),
        ("evict disk_fault", "nvme nvme0: Disabling device after reset failure: -19"),
        ("evict disk_fault", "critical medium error, dev sda, sector 12"),
        ("evict disk_fault", "EXT4-fs (nvme0n1p2): Remounting filesystem read-only"),
        ("user cpu_overload", "cgroup: fork rejected by pids controller in /kubepods/pod7/c1"),
        ("suspect filesystem_mount", EVICTED),
        ("suspect filesystem_mount", "NFS: __nfs4_reclaim_open_state: Lock reclaim failed!"),
    ],
)
def test_a_line_about_what_the_job_uses_accuses(expected: str, text: str) -> None:
    result = one(text)
    assert f"{result.verdict} {result.category}" == expected
    assert text[:60] in result.why
    assert result.do


@pytest.mark.parametrize(
    "text",
    [
        "INFO: task python3:992 blocked for more than 120 seconds.",
        DEAD_NIC.replace("3b", "3c"),
        "pcieport 0000:4e:01.0: DPC: containment event, status:0x1f01",
        "nvme nvme1: Disabling device after reset failure: -19",
        "critical medium error, dev sdb, sector 12",
        "EXT4-fs (loop0): Remounting filesystem read-only",
        "XFS (nvme0n11): Metadata I/O error in x",
        "NETDEV WATCHDOG: eth1 (mlx5_core): transmit queue 3 timed out",
        "cgroup: fork rejected by pids controller in /kubepods/pod77",
        "cgroup: fork rejected by pids controller in /",
        "nfs: server store-4 not responding, still trying",
        EVICTED.replace("lus-OST3", "other-OST3"),
    ],
)
def test_a_line_about_what_is_not_the_jobs_accuses_nobody(text: str) -> None:
    assert one(text).verdict is Verdict.INFO


def test_lines_of_the_whole_host_are_of_its_boot() -> None:
    assert one("Kernel panic - not syncing: x").cause == f"boot {BOOT}"
    assert one("critical medium error, dev sda, sector 12").cause == f"boot {BOOT} sda"
    assert one(DEAD_NIC).cause == f"boot {BOOT} 0000:3b:00.0"
    assert one(NFS).cause == "nfs server store-3"
    assert one(HUNG).cause == ""


def test_a_nic_that_stops_sending_counts_twice() -> None:
    result = one(
        "mlx5_core 0000:3b:00.0 eth9: NETDEV WATCHDOG: CPU: 3: transmit queue 1 timed out 5 ms"
    )
    assert (result.verdict, result.counts) == (Verdict.WARN, Counts.TWICE)


def test_a_line_that_is_read_late_is_no_strike_of_its_own() -> None:
    """The link went down with it, and that was counted when it happened."""
    result = one("NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out", at=970.0)
    assert (result.verdict, result.counts) == (Verdict.WARN, Counts.NEVER)


def test_a_container_knows_its_pod_by_its_id() -> None:
    slice_ = "/kubepods.slice/kubepods-pod0a1b2c3d_0000_1111_2222_333344445555.slice/cri-1"
    assert one(f"cgroup: fork rejected by pids controller in {slice_}").verdict is Verdict.USER


def test_old_lines_weigh_less_and_say_so() -> None:
    result = one("critical medium error, dev sda, sector 12", first_seq=7)
    assert result.verdict is Verdict.SUSPECT
    assert "written before the first look, at 999.0 s after boot" in result.why
    assert one(HUNG, first_seq=7).verdict is Verdict.WARN
    assert one(HUNG, first_seq=6).verdict is Verdict.SUSPECT


def test_what_is_long_over_is_not_told() -> None:
    seen = history(log(line(7, 300.0, HUNG), ours=OURS))
    assert judged("kernel.log", seen) == []
    assert one(HUNG, at=401.0).failed


def test_lines_of_a_clock_that_runs_ahead_are_new() -> None:
    assert one(HUNG, at=1003.0).failed


def test_a_few_errors_warn_and_several_in_time_make_a_suspect() -> None:
    def result(*ats: float) -> Result:
        lines = [line(seq, at, IO_ERROR) for seq, at in enumerate(ats)]
        return judged("kernel.log", history(log(*lines, ours=OURS)))[0]

    assert result(900.0).verdict is Verdict.WARN
    assert result(900.0, 950.0).verdict is Verdict.WARN
    assert result(900.0, 950.0, 990.0).verdict is Verdict.SUSPECT
    assert result(300.0, 350.0, 990.0).verdict is Verdict.WARN


def test_corrected_errors_count_as_often_as_their_line_says() -> None:
    def result(times: int) -> Result:
        text = f"EDAC MC0: {times} CE memory read error on x"
        return judged("kernel.log", history(log(line(1, 999.0, text))))[0]

    assert result(9).verdict is Verdict.INFO
    assert result(10).verdict is Verdict.SUSPECT


@pytest.mark.parametrize(
    ("lost", "back"),
    [
        (NFS, "nfs: server store-3 OK"),
        (LUSTRE, RESTORED.format("lus-OST0003")),
        (LUSTRE, RESTORED.format("10.1.1.1@o2ib")),
    ],
)
def test_a_server_that_comes_back_is_no_finding(lost: str, back: str) -> None:
    def verdict(*lines: tuple[float, str]) -> Verdict:
        made = [line(seq, at, text) for seq, (at, text) in enumerate(lines)]
        found = judged("kernel.log", history(log(*made, ours=OURS)))
        return next(each.verdict for each in found if not each.item.endswith((".up", ".back")))

    assert verdict((990.0, lost)) is Verdict.WARN
    assert verdict((800.0, lost)) is Verdict.SUSPECT
    assert verdict((800.0, lost), (990.0, lost)) is Verdict.SUSPECT
    assert verdict((800.0, lost), (850.0, back)) is Verdict.INFO
    assert verdict((800.0, lost), (850.0, back), (990.0, lost)) is Verdict.WARN
    assert verdict((700.0, back), (800.0, lost)) is Verdict.SUSPECT
    other = (
        back.replace("store-3", "store-9").replace("0003", "0009").replace("10.1.1.1", "10.1.1.9")
    )
    assert verdict((800.0, lost), (850.0, other)) is Verdict.SUSPECT


def test_a_site_may_weigh_rules_otherwise() -> None:
    seen = history(log(line(7, 999.0, "Oops: 0002 [#1] SMP")))
    assert judged("kernel.log", seen, verdicts={"kernel.oops": "evict"})[0].verdict == "evict"
    assert judged("kernel.log", seen, off_rules=["kernel.oops"]) == []


def test_rules_of_another_version_are_left_alone() -> None:
    unknown = msgspec.structs.replace(line(7, 999.0, HUNG), rule="of.tomorrow")
    assert judged("kernel.log", history(log(unknown, ours=OURS))) == []


# --- XIDs ----------------------------------------------------------------------------------------


def xids(*texts: str, first_seq: int = -1) -> list[Result]:
    lines = [line(seq, 999.0, text) for seq, text in enumerate(texts, 1)]
    return judged("kernel.xid", history(log(*lines, ours=OURS), first_seq))


LOST = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)


def test_a_lost_gpu_is_evicted_however_the_driver_says_it() -> None:
    for text in (LOST, "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."):
        (result,) = xids(text)
        assert (result.verdict, result.item) == (Verdict.EVICT, "GPU 0000:3b:00.0")
        assert result.cause == f"boot {BOOT} 0000:3b:00.0"


def test_a_gpu_may_be_named_by_its_uuid() -> None:
    (result,) = xids("NVRM: Xid (GPU-5ea5c1b4-0c4b-4a4f-9d3c-0123456789ab): 95, pid=1, x")
    assert (result.verdict, result.item) == (Verdict.EVICT, "GPU 0000:3b:00.0")


def test_gpus_of_others_and_gpus_that_are_unknown_accuse_nobody() -> None:
    assert xids(LOST.replace("3b", "3c")) == []
    assert xids("NVRM: Xid (GPU-ffffffff-0c4b-4a4f-9d3c-0123456789ab): 95, pid=1, x") == []


@pytest.mark.parametrize(
    ("unseen_s", "written_s", "told"),
    [
        (5.0, 200.0, False),
        (300.0, 200.0, True),  # a health program that looks every five minutes
        (300.0, 301.0, False),
        (90_000.0, 3500.0, True),
        (90_000.0, 3700.0, False),  # repaired since, perhaps
    ],
)
def test_what_was_written_since_the_look_before_is_told(
    unseen_s: float, written_s: float, told: bool
) -> None:
    clock = 100_000.0
    now = log(line(7, clock - written_s, LOST), clock=clock, ours=OURS)
    seen = history(now, past=log(clock=clock - unseen_s), unseen_s=unseen_s)
    verdicts = [result.verdict for result in judged("kernel.xid", seen)]
    assert verdicts == ([Verdict.EVICT] if told else [])


def test_rules_and_oom_kills_know_what_was_not_seen_yet() -> None:
    killed = "Out of memory: Killed process 77 (python3) total-vm:9kB, anon-rss:9kB, file-rss:0kB"
    lines = (line(7, 300.0, HUNG), line(8, 300.0, killed))
    for unseen_s, told in ((5.0, False), (750.0, True)):
        seen = history(log(*lines, ours=OURS), past=log(), unseen_s=unseen_s)
        assert bool(judged("kernel.log", seen)) is told
        assert bool(judged("kernel.oom", seen)) is told


def test_an_old_xid_weighs_less() -> None:
    (result,) = xids(LOST, first_seq=1)
    assert result.verdict is Verdict.SUSPECT
    assert "written before the first look" in result.why


def test_what_the_driver_asks_for_decides() -> None:
    asked = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    text = f"NVRM: Xid (PCI:0000:3b:00): 154, {asked}"
    (result,) = xids("NVRM: Xid (PCI:0000:3b:00): 94, pid=1, contained", text)
    assert result.verdict is Verdict.EVICT


def sxids(*texts: str) -> list[Result]:
    lines = [line(seq, 999.0, text) for seq, text in enumerate(texts, 1)]
    return judged("kernel.sxid", history(log(*lines, ours=OURS)))


def test_fatal_errors_of_switches_evict_and_others_only_if_frequent() -> None:
    soft = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress PRIV error"
    fatal = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 22013, Fatal, Link 12"
    data = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 23001, Data {0x1, 0x2}"
    assert sxids(fatal)[0].verdict is Verdict.EVICT
    assert sxids(soft)[0].verdict is Verdict.INFO
    assert sxids(soft, soft, soft)[0].verdict is Verdict.SUSPECT
    assert sxids(data)[0].verdict is Verdict.INFO
    assert sxids(fatal.replace("05", "06")) == []


# --- memory that ran out -------------------------------------------------------------------------


def oom(constraint: str, pid: int, cgroup: str = "/", *, first_seq: int = -1) -> Result:
    limited = f"oom_memcg={cgroup}" if constraint == "MEMCG" else "global_oom"
    why = (
        f"oom-kill:constraint=CONSTRAINT_{constraint},nodemask=(null),cpuset=/,mems_allowed=0,"
        f"{limited},task_memcg={cgroup},task=python,pid={pid},uid=0"
    )
    where = "Memory cgroup out" if constraint == "MEMCG" else "Out"
    killed = (
        f"{where} of memory: Killed process {pid} (python) total-vm:9kB, anon-rss:2048kB, UID:0"
    )
    seen = history(log(line(3, 998.0, why), line(4, 998.1, killed), ours=OURS), first_seq)
    (found,) = judged("kernel.oom", seen)
    return found


def test_whose_memory_ran_out_decides() -> None:
    ours = oom("MEMCG", 991)
    assert (ours.verdict, ours.category) == (Verdict.USER, Category.CPU_OOM)
    assert "2 MiB" in ours.why
    assert oom("MEMCG", 5, "/kubepods/pod7/worker").verdict is Verdict.USER
    assert oom("MEMCG", 5, "/kubepods/pod8").verdict is Verdict.INFO
    hog = oom("NONE", 5, "/user.slice")
    assert (hog.verdict, hog.cause) == (Verdict.SUSPECT, f"boot {BOOT}")
    assert oom("NONE", 991).verdict is Verdict.USER


def test_a_kill_before_our_time_was_none_of_our_processes() -> None:
    assert oom("MEMCG", 991, first_seq=4).verdict is Verdict.INFO


# --- the reader and what a crash leaves ----------------------------------------------------------


def test_gaps_are_told_once_and_never_as_a_fault() -> None:
    before = log(seq=100, lost=5, garbage=1)
    after = log(seq=200, lost=45, garbage=1)
    (result,) = judged("kernel.reader", history(after, past=before))
    assert result.verdict is Verdict.ERROR
    assert result.values["missing"] == 40
    assert judged("kernel.reader", history(after, past=after)) == []
    assert judged("kernel.reader", history(log(seq=100, lost=5))) == []


def test_another_reader_counts_anew_and_the_numbers_of_records_tell_the_gap() -> None:
    before = log(seq=100, lost=500)
    whole = log(seq=200, oldest=3, opened=9.0)
    torn = log(seq=200, oldest=150, opened=9.0)
    assert judged("kernel.reader", history(whole, past=before)) == []
    (result,) = judged("kernel.reader", history(torn, past=before))
    assert result.values["missing"] == 49


def test_dumps_of_a_crashed_kernel() -> None:
    def verdict(before: tuple[str, ...] | None, now: tuple[str, ...] | None) -> Verdict:
        seen = history(log(pstore=now))
        first = msgspec.structs.replace(seen.first.sample, pstore=before)
        at = msgspec.structs.replace(seen.first, sample=first)
        found = judged("kernel.panic", msgspec.structs.replace(seen, first=at))
        return found[0].verdict if found else Verdict.INFO

    assert verdict((), ()) is Verdict.INFO
    assert verdict(None, None) is Verdict.ERROR
    assert verdict(("dmesg-efi-1",), ("dmesg-efi-1",)) is Verdict.WARN
    assert verdict(None, ("dmesg-efi-1",)) is Verdict.WARN
    assert verdict(("dmesg-efi-1",), ("dmesg-efi-1", "dmesg-efi-2")) is Verdict.SUSPECT
    assert verdict((), ("console-ramoops-0",)) is Verdict.INFO
    assert verdict((), ("dmesg-efi-1",)) is Verdict.SUSPECT


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("0000:3B:00", "0000:3b:00.0"),
        ("3b:00.1", "0000:3b:00.1"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("nothing", "nothing"),
        ("", ""),
    ],
)
def test_addresses_have_one_spelling(written: str, address: str) -> None:
    assert pci_address(written) == address
