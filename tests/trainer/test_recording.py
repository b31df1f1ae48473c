"""Promises of flight records beside what the tests of looks show (tests/agent/tracing)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep.trainer import recording
from everstep.trainer.recording import ERRORS, NoRoom, _Quiet
from everstep.trainer.spare_threads import spare_threads

WARNINGS = 1


@pytest.mark.torch
def test_torch_is_kept_quiet_without_a_change_of_standard_error() -> None:
    """Whatever other threads print meanwhile arrives, and what they start prints there later."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    library = ctypes.CDLL(str(Path(spec.origin).with_name("lib") / "libc10.so"))
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before, there = level.value, os.fstat(2)
    with _Quiet(SimpleNamespace(__file__=spec.origin)):
        assert level.value == ERRORS > WARNINGS
        assert os.path.samestat(os.fstat(2), there)
    assert level.value == before


def test_another_build_of_torch_is_not_kept_quiet(tmp_path: Path) -> None:
    with _Quiet(SimpleNamespace(__file__=str(tmp_path / "__init__.py"))):
        pass


def told(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "spare"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/job/pids.max": "max\n",
                "sys/fs/cgroup/pod/job/pids.current": "9\n",
                "sys/fs/cgroup/pod/pids.max": "100\n",
                "sys/fs/cgroup/pod/pids.current": "70\n",
            },
            30,
        ),
        (
            {
                "proc/self/cgroup": "8:pids:/docker/1f\n4:memory:/a:b\n",
                "sys/fs/cgroup/pids/pids.max": "50\n",
                "sys/fs/cgroup/pids/pids.current": "60\n",
            },
            -10,
        ),
    ],
    ids=["nothing seen", "no bound", "a bound of the group around", "a container, version 1"],
)
def test_the_room_for_threads_is_known(
    tmp_path: Path, files: dict[str, str], spare: int | None
) -> None:
    assert spare_threads(told(tmp_path, files)) == spare


def test_an_ordinary_user_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("resource.getrlimit", lambda _: (4096, 4096))
    assert spare_threads(told(tmp_path, {"proc/loadavg": "1.0 1.0 1.0 3/4000 77\n"})) == 96


def test_a_server_that_might_not_get_its_threads_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For want of one, torch would end the rank."""
    monkeypatch.setattr("os.cpu_count", lambda: 192)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(recording, "spare_threads", lambda: 2 * 8 * 192)
    recording._refuse_without_room()
    monkeypatch.setattr(recording, "spare_threads", lambda: 2 * 8 * 192 - 1)
    with pytest.raises(NoRoom, match=r"192 threads in each rank here, .* leave room for 3071"):
        recording._refuse_without_room()
