"""The room for slots, read from cgroup files of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.checkpoint import budget
from everstep.checkpoint.budget import Room, cgroup_headroom, room_in

MIB = 1 << 20


def group(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def proc(tmp_path: Path, lines: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(lines)
    return path


def test_version_2_counts_file_cache_as_free(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    stat = f"anon 1\ninactive_file {3 * MIB}\nactive_file {MIB}"
    group(root / "job", memory__max=100 * MIB, memory__current=70 * MIB, memory__stat=stat)
    assert cgroup_headroom(proc(tmp_path, "0::/job\n"), root) == 34 * MIB


def test_the_tightest_parent_decides(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root / "pod" / "job", memory__max="max", memory__current=MIB)
    group(root / "pod", memory__max=10 * MIB, memory__current=8 * MIB)
    assert cgroup_headroom(proc(tmp_path, "0::/pod/job\n"), root) == 2 * MIB


def test_version_1_is_read_with_its_totals(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    files = {"memory.limit_in_bytes": 50 * MIB, "memory.usage_in_bytes": 20 * MIB}
    stat = f"inactive_file 5\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}"
    group(root / "memory" / "a", memory__stat=stat)
    for name, value in files.items():
        (root / "memory" / "a" / name).write_text(str(value))
    lines = "5:cpu,cpuacct:/a\n4:memory:/a\n"
    assert cgroup_headroom(proc(tmp_path, lines), root) == 32 * MIB


def test_a_container_that_sees_only_its_own_group_finds_it_at_the_top(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root, memory__max=9 * MIB, memory__current=MIB)
    assert cgroup_headroom(proc(tmp_path, "0::/docker/0123\n"), root) == 8 * MIB


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_no_limit_is_no_limit(tmp_path: Path, limit: str) -> None:
    root = tmp_path / "fs"
    group(root / "job", memory__max=limit, memory__current=MIB)
    assert cgroup_headroom(proc(tmp_path, "0::/job\n"), root) is None


def test_no_cgroup_at_all_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_headroom(tmp_path / "absent", tmp_path) is None


def test_the_tighter_of_file_system_and_cgroup_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group(tmp_path / "fs" / "job", memory__max=9 * MIB, memory__current=MIB)
    monkeypatch.setattr(budget, "CGROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr(budget, "PROC_CGROUP", proc(tmp_path, "0::/job\n"))
    room = room_in(tmp_path)
    assert room == Room(free_bytes=8 * MIB, where="this process's memory cgroup")
    monkeypatch.setattr(budget, "PROC_CGROUP", tmp_path / "absent")
    assert "the file system of" in room_in(tmp_path).where
