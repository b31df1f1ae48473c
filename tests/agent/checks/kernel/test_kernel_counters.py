"""Counts of the kernel: its own accidents, Lustre's health, requests of FUSE."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.agent.checks.check import Here, History, Stamped
from everstep.agent.checks.kernel.clients import FUSE, LUSTRE, Clients, ClientsSource
from everstep.agent.checks.kernel.state import KernelState, KernelStateSource
from everstep.diagnosis.words import Verdict
from everstep.model import Value
from tests.agent.checks.kernel.kernel_logs import check


def verdicts(name: str, *samples: Value) -> list[Verdict]:
    """From the first sample on, the last being the newest."""
    stamped = [Stamped(at=float(at), sample=sample) for at, sample in enumerate(samples)]
    seen = History(first=stamped[0], past=tuple(stamped[:-1]), now=stamped[-1])
    return [result.verdict for result in check(name).judge(Here(), seen)]


def state(oopses: int | None, tainted: int) -> KernelState:
    return KernelState(boot_id="b", oopses=oopses, tainted=tainted)


def test_only_what_is_new_counts() -> None:
    def verdict(first: KernelState, now: KernelState) -> Verdict:
        (found,) = verdicts("kernel.state", first, now)
        return found

    assert verdict(state(3, 1 << 7), state(3, 1 << 7)) is Verdict.INFO
    assert verdict(state(3, 0), state(4, 0)) is Verdict.SUSPECT
    assert verdict(state(None, 0), state(None, 1 << 14)) is Verdict.SUSPECT
    assert verdict(state(0, 0), state(0, 1 << 4)) is Verdict.SUSPECT
    assert verdict(state(0, 0), state(0, 1 << 12)) is Verdict.INFO
    assert verdict(state(None, 0), state(4, 0)) is Verdict.INFO
    assert verdict(state(9, 0), state(1, 0)) is Verdict.INFO


def test_this_kernel_says_how_it_is() -> None:
    assert KernelStateSource().absent(Here()) == ""
    sample = KernelStateSource().sample(Here())
    assert sample.boot_id
    assert sample.tainted >= 0


def test_a_kernel_without_counts_and_with_garbage(tmp_path: Path) -> None:
    here = Here(root=str(tmp_path))
    assert KernelStateSource().absent(here)
    tainted = tmp_path / "proc/sys/kernel/tainted"
    tainted.parent.mkdir(parents=True)
    tainted.write_text("4609\n")
    assert KernelStateSource().sample(here) == KernelState(boot_id="", oopses=None, tainted=4609)
    tainted.write_text("soon\n")
    with pytest.raises(ValueError, match="soon"):
        KernelStateSource().sample(here)
    tainted.unlink()
    with pytest.raises(OSError, match="tainted"):
        KernelStateSource().sample(here)


def test_lustre_is_well_or_not() -> None:
    assert verdicts("storage.lustre", Clients(lustre="healthy")) == [Verdict.INFO]
    assert verdicts("storage.lustre", Clients(lustre="NOT HEALTHY")) == [Verdict.SUSPECT]
    assert verdicts("storage.lustre", Clients()) == []


@pytest.mark.parametrize(
    ("waiting", "verdict"),
    [
        ((5, 5, 5, 5), Verdict.INFO),
        ((1, 2, 3, 4), Verdict.WARN),
        ((0, 1, 2, 3), Verdict.INFO),
        ((2, 3, 4), Verdict.INFO),
        ((9, 10, 2, 11), Verdict.INFO),
        ((0, 90, 91, 92, 93), Verdict.WARN),
        ((7, 8, 9, 10, 0), Verdict.INFO),
    ],
)
def test_fuse_is_stuck_when_ever_more_requests_wait(
    waiting: tuple[int, ...], verdict: Verdict
) -> None:
    samples = [Clients(waiting={"/bucket": each}) for each in waiting]
    assert verdicts("storage.fuse", *samples) == [verdict]


def test_what_only_root_sees_could_not_run() -> None:
    assert verdicts("storage.fuse", Clients(unseen=("/bucket",))) == [Verdict.ERROR]


def test_both_are_read_from_sys(tmp_path: Path) -> None:
    here = Here(root=str(tmp_path), paths=("/bucket",))
    assert ClientsSource().absent(here)
    for path, text in (
        (LUSTRE, "healthy\n"),
        ("/proc/self/mountinfo", "33 1 0:52 / /bucket rw - fuse.x x rw\n"),
        (f"{FUSE}/52/waiting", "3\n"),
    ):
        here.path(path).parent.mkdir(parents=True, exist_ok=True)
        here.path(path).write_text(text)
    assert ClientsSource().absent(here) == ""
    assert ClientsSource().sample(here) == Clients(lustre="healthy", waiting={"/bucket": 3})
    here.path(f"{FUSE}/52/waiting").unlink()
    assert ClientsSource().sample(here) == Clients(lustre="healthy", unseen=("/bucket",))
