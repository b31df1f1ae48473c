"""Promises of the checks of file systems, with file systems that hang, break and fill up."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from everstep.agent.checks.check import Here
from everstep.agent.checks.host import source_mounts
from everstep.agent.checks.host.disk import Disk
from everstep.agent.checks.host.mounts import MountsThere
from everstep.agent.checks.host.readonly import ReadOnly
from everstep.agent.checks.host.source_mounts import Mounts, MountsSample, Place
from everstep.agent.checks.host.storage import Storage
from everstep.agent.checks.kernel.clients import ClientsSource
from everstep.agent.checks.mount_table import by_point, mount_of, parse
from everstep.diagnosis.words import Category
from tests.agent.checks.host.support import (
    check_of,
    fuse,
    judged,
    mounted,
    until,
    verdict,
    verdicts,
)

STORAGE = check_of(Storage)
MOUNTS = check_of(MountsThere)
READ_ONLY = check_of(ReadOnly)
DISK = check_of(Disk)
NFS = Place(
    path="/data", mount="/data", type="nfs4", device="store:/x", shared=True, size=1, free=1
)
LOCAL = Place(
    path="/ckpt", mount="/", type="ext4", device="/dev/sda1", size=100 << 30, free=50 << 30
)
DATA = Here(paths=("/data",))
CKPT = Here(paths=("/ckpt",))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_mounts, "_ANSWER_WITHIN_S", 0.2)


def here_with(*paths: Path) -> Here:
    return Here(paths=tuple(map(str, paths)))


def at(path: Path, sample: MountsSample) -> Place:
    place = sample.of(str(path))
    assert place is not None
    return place


def with_(place: Place, **fields: object) -> MountsSample:
    known = {name: getattr(place, name) for name in place.__struct_fields__}
    return MountsSample(places=(Place(**(known | fields)),))


# --- storage that hangs --------------------------------------------------------------------------


def test_a_hung_file_system_is_told_with_its_time_and_the_others_still_answer(
    tmp_path: Path,
) -> None:
    hung, well = tmp_path / "hung", tmp_path / "well"
    well.mkdir()
    here, source = here_with(hung, well), Mounts()
    with fuse(hung) as server:
        first = source.sample(here)
        assert (at(hung, first).type, at(hung, first).shared) == ("fuse.everstep", True)
        assert at(hung, first).size == 4096 * 1000
        server.send_signal(signal.SIGSTOP)
        samples = [source.sample(here) for _ in range(3)]
        waits = [at(hung, sample).hangs_s for sample in samples]
        assert 0 < waits[0] < waits[1] < waits[2]
        assert all(not at(well, sample).hangs_s for sample in samples)
        assert looking_at(hung) == 1, "a second thread asks what the first one waits for"
        now = with_(at(hung, samples[-1]), hangs_s=16.0)
        (result,) = judged(STORAGE, [first, now], here)
        assert (result.verdict, result.item) == ("suspect", str(hung))
        assert result.cause == "storage everstep-test"
        server.send_signal(signal.SIGCONT)
        until(lambda: not at(hung, source.sample(here)).hangs_s)
        assert verdicts(STORAGE, [source.sample(here)], here)[str(hung)] == "info"


def looking_at(path: Path) -> int:
    looks = [each for each in threading.enumerate() if each.name == f"look {path}"]
    assert all(each.daemon for each in looks), "an exit would wait for it"
    return len(looks)


def test_a_file_system_whose_server_is_gone_is_suspect_at_once_and_evicts_later(
    tmp_path: Path,
) -> None:
    gone = tmp_path / "gone"
    here, source = here_with(gone), Mounts()
    with fuse(gone) as server:
        source.sample(here)
        server.kill()
        server.wait()
        sample = until(lambda: found if at(gone, found := source.sample(here)).error else None)
    assert at(gone, sample).error == "ENOTCONN"
    assert at(gone, sample).mount == str(gone)
    assert verdicts(STORAGE, [sample], here)[str(gone)] == "suspect"
    assert verdicts(STORAGE, [sample] * 16, here, every_s=5.0)[str(gone)] == "evict"


def test_a_directory_behind_a_link_is_told_with_what_it_lies_on(tmp_path: Path) -> None:
    link, hung = tmp_path / "link", tmp_path / "hung"
    link.symlink_to(hung)
    here, source = here_with(link), Mounts()
    with fuse(hung) as server:
        assert at(link, source.sample(here)).mount == str(hung)
        server.send_signal(signal.SIGSTOP)
        sample = source.sample(here)
        assert at(link, sample).mount == str(hung), "links are not followed by asking then"
        assert at(link, sample).hangs_s


def test_requests_that_pile_up_at_a_fuse_server_are_counted(tmp_path: Path) -> None:
    root, hung = tmp_path / "root", tmp_path / "hung"
    connections = root / "sys/fs/fuse/connections"
    connections.mkdir(parents=True)
    (root / "proc").symlink_to("/proc")
    (root / "data").symlink_to(hung)
    asks, source = Here(root=str(root), paths=("/data",)), Mounts()
    looks, clients = Here(root=str(root), paths=(str(hung),)), ClientsSource()
    with fuse(hung) as server, mounted(connections, "-t", "fusectl", "fusectl"):
        source.sample(asks)
        assert clients.sample(looks).waiting == {str(hung): 0}
        server.send_signal(signal.SIGSTOP)
        source.sample(asks)
        assert clients.sample(looks).waiting == {str(hung): 1}


def test_a_process_that_looks_at_storage_and_is_silent_itself_is_suspect() -> None:
    assert Mounts().unanswered(74.0, 10) is None
    result = Mounts().unanswered(75.0, 10)
    assert result is not None
    assert (result.check, result.verdict) == (Storage.name, "suspect")


@pytest.mark.parametrize(
    ("place", "hangs_s", "expected"),
    [
        (NFS, 0.0, "info"),
        (NFS, 14.9, "info"),
        (NFS, 15.0, "suspect"),
        (NFS, 74.0, "suspect"),
        (NFS, 75.0, "evict"),
        (LOCAL, 15.0, "suspect"),
        (LOCAL, 75.0, "evict"),
    ],
)
def test_storage_that_hangs_is_suspect_and_then_evicts(
    place: Place, hangs_s: float, expected: str
) -> None:
    (result,) = judged(STORAGE, [with_(place, hangs_s=hangs_s)])
    assert result.verdict == expected
    if result.failed:
        shared = place is NFS
        assert result.category == (Category.FILESYSTEM_MOUNT if shared else Category.DISK_FAULT)
        assert result.cause == ("storage store" if shared else "")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("EIO", "suspect"),
        ("ESTALE", "suspect"),
        ("EACCES", "error"),
        ("ELOOP", "error"),
        ("ValueError", "error"),
    ],
)
def test_an_error_about_the_path_is_no_fault_of_the_storage(error: str, expected: str) -> None:
    assert verdict(STORAGE, [with_(NFS, error=error)]) == expected


def test_a_path_that_may_not_be_looked_at_says_nothing_of_its_file_system() -> None:
    closed = Place(path="/data/closed", mount="/data", shared=True, error="EACCES")
    assert verdicts(STORAGE, [MountsSample(places=(NFS, closed))]) == {"/data": "info"}
    broken = Place(path="/data/x", mount="/data", shared=True, error="ESTALE")
    assert verdicts(STORAGE, [MountsSample(places=(NFS, broken))]) == {"/data": "suspect"}


def test_an_error_that_was_away_meanwhile_counts_from_its_return() -> None:
    bad, good = with_(LOCAL, error="EIO"), with_(LOCAL)
    assert verdict(STORAGE, [bad] * 20, every_s=5.0) == "evict"
    assert verdict(STORAGE, [*[bad] * 10, good, *[bad] * 10], every_s=5.0) == "suspect"


def test_directories_on_one_file_system_are_one_finding() -> None:
    places = (NFS, Place(path="/data/x", mount="/data", shared=True, hangs_s=80.0))
    assert verdicts(STORAGE, [MountsSample(places=places)]) == {"/data": "evict"}


# --- mounts that go ------------------------------------------------------------------------------


def test_a_mount_that_is_gone_is_suspect(tmp_path: Path) -> None:
    here, source = here_with(tmp_path / "data"), Mounts()
    with mounted(tmp_path / "data", "-t", "tmpfs", "-o", "size=1m", "data"):
        before = source.sample(here)
        assert verdict(MOUNTS, [before], here) == "info"
    (result,) = judged(MOUNTS, [before, source.sample(here)], here)
    assert result.verdict == "suspect"
    assert f"was on tmpfs data at {tmp_path / 'data'}" in result.why


def test_a_directory_that_is_gone_is_suspect_and_one_that_never_was_is_not(tmp_path: Path) -> None:
    here, source = here_with(tmp_path / "data"), Mounts()
    never = source.sample(here)
    assert not at(tmp_path / "data", never).exists
    assert at(tmp_path / "data", never).size, "space is that of the directory above"
    assert verdict(MOUNTS, [never, never], here) == "info"
    (tmp_path / "data").mkdir()
    there = source.sample(here)
    assert verdict(MOUNTS, [never, there], here) == "info"
    assert verdict(MOUNTS, [there, never], here) == "suspect"


def test_other_storage_below_a_directory_is_told_with_the_cause_of_the_lost_one() -> None:
    fallen = with_(NFS, mount="/", type="ext4", device="/dev/sda1", shared=False)
    (result,) = judged(MOUNTS, [with_(NFS), fallen], DATA)
    assert (result.verdict, result.cause) == ("suspect", "storage store")
    unknown = with_(NFS, mount="")
    assert verdict(MOUNTS, [with_(NFS), unknown], DATA) == "error"
    assert not judged(MOUNTS, [with_(NFS), fallen]), "the job does not need it"


def test_what_an_automounter_gives_and_takes_is_no_change() -> None:
    """The first sample is of the place that it holds; asking for it mounts data, read-only."""
    held = with_(NFS, type="autofs", device="auto.data")
    data = with_(NFS, read_only="ro")
    gone = with_(NFS, type="autofs", exists=False)
    assert verdict(MOUNTS, [held, data], DATA) == "info"
    assert verdict(MOUNTS, [data, held], DATA) == "info"
    assert verdict(READ_ONLY, [held, data], DATA) == "info"
    assert verdict(MOUNTS, [data, gone], DATA) == "suspect", "gone all the same"


def test_two_exports_of_one_server_are_one_cause() -> None:
    (home,) = with_(NFS, device="store:/home").places
    assert NFS.cause == home.cause == "storage store"


# --- file systems that turn read-only ------------------------------------------------------------


def test_a_file_system_that_turned_read_only_evicts_if_the_job_needs_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    source = Mounts()
    with mounted(data, "-t", "tmpfs", "-o", "size=1m", "data"):
        before = source.sample(here_with(data))
        subprocess.run(["mount", "-o", "remount,ro", str(data)], check=True)
        after = source.sample(here_with(data))
    results = {each.item: each for each in judged(READ_ONLY, [before, after], here_with(data))}
    assert results[str(data)].verdict == "evict"
    assert results[str(data)].category == Category.DISK_FAULT
    assert results["/"].verdict == "info"
    assert verdicts(READ_ONLY, [after, after], here_with(data))[str(data)] == "info", "as at first"
    assert verdicts(READ_ONLY, [before, after])[str(data)] == "suspect", "nobody needs it"


def test_a_file_system_that_the_kernel_stopped_after_an_error_evicts(tmp_path: Path) -> None:
    image, data = tmp_path / "image", tmp_path / "data"
    with image.open("wb") as file:
        file.truncate(4 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    here, source = here_with(data), Mounts()
    with mounted(data, "-o", "loop,errors=remount-ro", str(image)):
        before = source.sample(here)
        device = Path(at(data, before).device).name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test")
        after = source.sample(here)
    assert verdicts(READ_ONLY, [before], here)[str(data)] == "info"
    assert verdicts(READ_ONLY, [before, after], here)[str(data)] == "evict"
    assert at(data, after).read_only in {"ro", "emergency_ro"}


def test_a_file_system_that_was_stopped_before_the_job_came_evicts_as_well() -> None:
    stopped = with_(LOCAL, read_only="emergency_ro")
    assert verdict(READ_ONLY, [stopped, stopped], CKPT) == "evict"
    mounted_so = with_(LOCAL, read_only="ro")
    assert verdict(READ_ONLY, [mounted_so, mounted_so], CKPT) == "info"


def test_shared_storage_that_turned_read_only_names_what_the_accusers_share() -> None:
    (result,) = judged(READ_ONLY, [with_(NFS), with_(NFS, read_only="ro")], DATA)
    assert (result.cause, result.category) == ("storage store", Category.FILESYSTEM_MOUNT)


# --- space and inodes ----------------------------------------------------------------------------


def test_a_full_disk_that_the_job_needs_is_suspect(tmp_path: Path) -> None:
    data = tmp_path / "data"
    source = Mounts()
    with mounted(data, "-t", "tmpfs", "-o", "size=1m", "data"):
        empty = source.sample(here_with(data))
        (data / "much").write_bytes(b"x" * (1 << 20))
        full = source.sample(here_with(data))
    assert verdicts(DISK, [empty], here_with(data))[str(data)] == "info"
    assert verdicts(DISK, [full], here_with(data))[str(data)] == "suspect"
    assert verdicts(DISK, [full])[str(data)] == "warn", "the job does not need it"


def test_a_disk_without_inodes_is_full(tmp_path: Path) -> None:
    data = tmp_path / "data"
    source = Mounts()
    with mounted(data, "-t", "tmpfs", "-o", "size=1m,nr_inodes=8", "data"):
        for number in range(7):  # the eighth is the directory itself
            (data / str(number)).touch()
        sample = source.sample(here_with(data))
    results = {each.item: each for each in judged(DISK, [sample], here_with(data))}
    assert results[str(data)].verdict == "suspect"
    assert "0 of 8 inodes" in results[str(data)].why


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "info"),
        ({"free": 4 << 30}, "warn"),
        ({"free": 400 << 20}, "suspect"),
        ({"free": 400 << 20, "size": 1 << 30}, "info"),
        ({"free": 400 << 20, "size": 9 << 30}, "warn"),
        ({"inodes": 100, "inodes_free": 9}, "warn"),
        ({"inodes": 1000, "inodes_free": 9}, "suspect"),
        ({"inodes": 0}, "info"),
        ({"free": 0, "shared": True}, "job"),
    ],
)
def test_full_is_what_the_next_checkpoint_fails_on(
    fields: dict[str, object], expected: str
) -> None:
    (result,) = judged(DISK, [with_(LOCAL, **fields)], CKPT)
    assert result.verdict == expected
    if expected == "job":
        assert result.cause == "storage /dev/sda1"


@pytest.mark.parametrize("fields", [{"error": "EIO"}, {"size": 0}, {"read_only": "ro", "free": 0}])
def test_what_tells_no_space_is_not_full(fields: dict[str, object]) -> None:
    assert not judged(DISK, [with_(LOCAL, **fields)], CKPT)


def test_full_shared_memory_is_an_error_of_the_container() -> None:
    shm = Place(path="/dev/shm", mount="/dev/shm", type="tmpfs", size=64 << 20, free=0)
    (result,) = judged(DISK, [MountsSample(places=(shm,))])
    assert (result.verdict, result.category) == ("suspect", Category.CONTAINER_ERROR)
    assert "--shm-size" in result.do


# --- the table of mounts -------------------------------------------------------------------------

TABLE = r"""
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 23 0:50 / /data rw - nfs4 store:/x rw,vers=4.2
41 40 0:51 / /data/a\040b rw shared:3 master:1 - fuse.s3fs s3fs rw,user_id=0
42 23 0:52 / /data2 ro - lustre 10.0.0.1@tcp:/fs rw
43 23 0:53 / /cfg rw - fuse.lxcfs lxcfs rw
44 23 7:0 / /ext rw - ext4 /dev/loop0 rw,errors=remount-ro,emergency_ro
45 40 0:54 / /data ro - tmpfs over rw
nonsense
46 23 - ext4
"""


def test_the_table_of_mounts_tells_what_a_path_lies_on() -> None:
    mounts = by_point(parse(TABLE))
    assert len(mounts) == 6
    where = {
        path: mount.source if (mount := mount_of(path, mounts)) else None
        for path in ("/", "/home/x", "/data/y", "/data2/y", "/dataset", "/data/a b/c", "relative")
    }
    assert where == {
        "/": "/dev/vda",
        "/home/x": "/dev/vda",
        "/data/y": "over",
        "/data2/y": "10.0.0.1@tcp:/fs",
        "/dataset": "/dev/vda",
        "/data/a b/c": "s3fs",
        "relative": "/dev/vda",
    }
    assert [mount.point for mount in mounts.values() if mount.shared] == ["/data/a b", "/data2"]
    assert {mount.point: mount.read_only for mount in mounts.values() if mount.read_only} == {
        "/data": "ro",
        "/data2": "ro",
        "/ext": "emergency_ro",
    }
    assert mount_of("/x", {}) is None
