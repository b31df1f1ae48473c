"""Hangs that take longer to show than `make test` has time for: `make soak` runs them.

And that training which is well is left alone, for EVERSTEP_SOAK_MINUTES.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.looks import LookResult
from everstep.processes import Process, alive, identify
from tests.agent.checks.host.support import cgroup
from tests.integration.hung import POLICY, Hung, hung, machine_of, process_of
from tests.integration.support import wait_for
from tests.integration.wedged import Trouble

pytestmark = [pytest.mark.torch, pytest.mark.timeout(0)]
MINUTES = float(os.environ.get("EVERSTEP_SOAK_MINUTES", "5"))
PERIOD_US = 100_000
"""Of the processor quota: the kernel's own."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Hung]:
    with hung(tmp_path) as running:
        yield running
        running.finish()
    running.is_as_undisturbed()


def test_half_of_the_ranks_that_leave_out_a_collective_are_nobodys_machines(job: Hung) -> None:
    job.ask(Trouble.SKIP, 2, 3, 6, 7)
    job.trains_on(20)
    answer = job.answer()
    assert answer.verdict.result in (LookResult.CODE, LookResult.NOTHING)
    assert answer.machines == set()


def test_a_hang_within_a_checkpoint_is_found_although_those_take_long(job: Hung) -> None:
    """A save that ends well; then one that does not, and that is looked at when it takes longer."""
    job.ask(Trouble.SAVE, *range(8), number=POLICY.stall_min_s + 1.0)
    job.trains_on()
    job.nobody_was_stopped()
    job.ask(Trouble.SAVE, 4)
    job.trains_on()
    answer = job.answer()
    assert answer.verdict.result is LookResult.CODE
    assert answer.verdict.ranks == (4,)
    assert answer.machines == set()


def test_a_rank_that_is_stopped_while_all_evaluate_costs_its_machine(job: Hung) -> None:
    """What ranks say that they do makes others patient, and does not hide a process that hangs."""
    victim = machine_of(job, 7)
    job.ask(Trouble.EVALUATE, *range(8), number=POLICY.stall_min_s)
    job.trains_on()
    job.nobody_was_stopped()
    job.reaches(job.ask(Trouble.EVALUATE, *range(8), number=3600.0))
    stopped = job.freeze(7)
    job.trains_on()
    answer = job.answer()
    assert answer.verdict.result is LookResult.MACHINES
    assert answer.verdict.ranks == (7,)
    assert answer.machines == {victim}
    assert not alive(stopped)


def test_a_rank_that_gets_less_processor_time_costs_its_machine(job: Hung) -> None:
    """70 % of what it used: all others wait for it in every step. A vote of stacks that is done
    before its work is known may take its whole group, which is what over-eviction is.
    """
    victim, slowed = machine_of(job, 1), process_of(job, 1)
    job.trains_on(200)  # what it computes is known by then
    with less_processor_time(slowed, 0.7):
        wait_for(f"the end of rank 1; {job.logs()}", lambda: not alive(slowed))
    job.trains_on()
    assert victim in job.answer().machines


def test_a_rank_that_gets_a_little_less_processor_time_is_told_of_at_most(job: Hung) -> None:
    """95 %: nobody is stopped for what costs less than a restart. It is a share of what the rank
    used before: if the whole machine has less to do soon after, it is much less of what it would
    use, and then it goes for what it really costs.
    """
    slowed = process_of(job, 1)
    job.trains_on(200)
    with less_processor_time(slowed, 0.95):
        job.trains_on(300)
        slow_enough = not alive(slowed)
    if slow_enough:
        verdict = job.answer().verdict
        costs = re.search(r"wait for it (\d+)%", verdict.why)
        assert verdict.ranks == (1,), verdict
        assert costs is not None, verdict
        assert int(costs.group(1)) >= 10, verdict
    else:
        job.nobody_was_stopped()


def test_training_that_is_well_is_left_alone(job: Hung) -> None:
    """With pauses as training has them, longer than the patience with a step."""
    until, pause_s = time.monotonic() + 60.0 * MINUTES, POLICY.stall_min_s + 1.0
    generation = job.generation()
    while time.monotonic() < until:
        for trouble in (Trouble.EVALUATE, Trouble.SAVE, Trouble.COMPILE, Trouble.PAUSE):
            job.ask(trouble, *range(8), number=pause_s)
            job.trains_on(100)
    job.nobody_was_stopped()
    assert job.generation() == generation


@contextmanager
def less_processor_time(process: Process, share: float) -> Iterator[None]:
    """So much of what it used, by a quota of the kernel that is gone afterwards."""
    with cgroup("cpu") as group:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        quota_us = int(share * PERIOD_US * usage(process))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
        (group / "cpu.cfs_quota_us").write_text("-1")
        if alive(process):  # whoever is in the group at its end is killed
            (group.parent / "cgroup.procs").write_text(str(process.pid))


def usage(process: Process, seconds: float = 2.0) -> float:
    """Processor time per time, in the next seconds."""
    before, since = _worked_ns(process), time.monotonic()
    time.sleep(seconds)
    return (_worked_ns(process) - before) * 1e-9 / (time.monotonic() - since)


def _worked_ns(process: Process) -> int:
    """Time on a processor, of all threads. Ticks are too coarse for what computes so little."""
    assert identify(process.pid) == process
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
