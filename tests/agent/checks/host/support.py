"""Real things for the tests of host checks, all gone afterwards; and histories made by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from everstep.agent.checks.check import AnyCheck, Here, History, Stamped
from everstep.diagnosis.words import Verdict
from everstep.health import Result
from everstep.model import Value

T = TypeVar("T")
HERE = Here()
NOBODY = 65534


def until(look: Callable[[], T | None], at_most_s: float = 20.0) -> T:
    """What it gives as soon as that is true."""
    deadline = time.monotonic() + at_most_s
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)
    return found


def check_of(kind: type[AnyCheck], **limits: Any) -> AnyCheck:
    return kind(kind.limits_type(**limits))


def history(samples: Sequence[Value], every_s: float = 1.0) -> History[Any]:
    """The first of them is the baseline, the last one is now."""
    stamped = tuple(
        Stamped(at=1000 + every_s * number, sample=sample) for number, sample in enumerate(samples)
    )
    return History(first=stamped[0], past=stamped[:-1], now=stamped[-1])


def judged(
    check: AnyCheck, samples: Sequence[Value], here: Here = HERE, **more: Any
) -> list[Result]:
    """What it says of the last one. Every fail must say what to do, and with what reason."""
    results = list(check.judge(here, history(samples, **more)))
    assert len({each.key for each in results}) == len(results), "one result for each item"
    for result in results:
        assert result.why
        assert bool(result.do) == result.failed or result.verdict is Verdict.ERROR
    return results


def verdicts(
    check: AnyCheck, samples: Sequence[Value], here: Here = HERE, **more: Any
) -> dict[str, str]:
    return {each.item: each.verdict.value for each in judged(check, samples, here, **more)}


def verdict(check: AnyCheck, samples: Sequence[Value], here: Here = HERE, **more: Any) -> str:
    """Of a check that has one item."""
    (only,) = judged(check, samples, here, **more)
    return only.verdict.value


def fake_root(root: Path, files: dict[str, str]) -> Here:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Here(root=str(root))


@contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", *arguments, str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=False)


@contextmanager
def cgroup(controller: str) -> Iterator[Path]:
    """A group of cgroup v1. Whoever is in it at the end is killed."""
    group = Path(f"/sys/fs/cgroup/{controller}/everstep-test-{os.getpid()}")
    group.mkdir()
    try:
        yield group
    finally:
        if controller == "freezer":
            (group / "freezer.state").write_text("THAWED")
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        until(lambda: _removed(group))


def _removed(group: Path) -> bool:
    """A group can be removed when its last process is buried."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@contextmanager
def process(*argv: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()
            started.send_signal(signal.SIGCONT)


@contextmanager
def fuse(point: Path) -> Iterator[subprocess.Popen[str]]:
    """The server of a file system that is mounted there."""
    point.mkdir()
    server = str(Path(__file__).with_name("fuse_server.py"))
    with process(sys.executable, "-S", "-E", server, str(point)) as serving:
        try:
            until(lambda: f" {point} " in Path("/proc/self/mountinfo").read_text())
            yield serving
        finally:
            serving.kill()  # first: its end ends whoever waits for it
            serving.wait()
            subprocess.run(["umount", "--lazy", str(point)], check=False)


@contextmanager
def as_nobody() -> Iterator[None]:
    """This process has no rights; its files and modules are open already."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
