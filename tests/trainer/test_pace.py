"""Phases and work of a rank, as its agent reads them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from everstep.model import NO_GENERATION, Rank, RankPhase
from everstep.trainer.compute import Compute
from everstep.trainer.context import VARIABLE
from everstep.trainer.notices import NoticeKind, Notices
from everstep.trainer.pace import FILE, PACE_BYTES, Pace, PaceReader, PaceWriter
from everstep.trainer.run import Run
from tests.checkpoint.objects import Box
from tests.trainer.surroundings import Surroundings

DEADLINE_S = 90.0


def pace_of(here: Surroundings) -> Pace:
    reader = PaceReader(here.shm / FILE, 1)
    (pace,) = reader.read()
    reader.close()
    assert pace is not None
    return pace


def phase_of(here: Surroundings) -> RankPhase:
    return pace_of(here).phase


# --- the file ------------------------------------------------------------------------------------


def test_what_is_written_is_read_and_what_is_torn_reads_as_before(tmp_path: Path) -> None:
    reader = PaceReader(tmp_path / FILE, 2)
    assert reader.read() == [None, None]
    writer = PaceWriter(tmp_path / FILE, 1)
    first = Pace(generation=3, phase=RankPhase.SAVING, since_ns=5, step=7, compute_s=1.5, wall_s=2)
    writer.write(first)
    assert reader.read() == [None, first]

    with (tmp_path / FILE).open("r+b") as file:  # killed between its two numbers
        file.seek(PACE_BYTES)
        file.write((99).to_bytes(8, sys.byteorder))
    assert reader.read() == [None, first]
    again = PaceWriter(tmp_path / FILE, 1)
    again.write(msgspec.structs.replace(first, step=8))
    assert [pace and pace.step for pace in reader.read()] == [None, 8]


def test_every_phase_survives_the_way_and_one_of_a_later_version_is_training(
    tmp_path: Path,
) -> None:
    reader, writer = PaceReader(tmp_path / FILE, 1), PaceWriter(tmp_path / FILE, 0)
    for phase in RankPhase:
        writer.write(Pace(generation=1, phase=phase))
        assert [pace and pace.phase for pace in reader.read()] == [phase]
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(12)
        file.write((77).to_bytes(4, "little"))
    assert [pace and pace.phase for pace in reader.read()] == [RankPhase.TRAINING]


# --- phases --------------------------------------------------------------------------------------


def test_phases_follow_what_the_script_says(here: Surroundings) -> None:
    before_ns = time.monotonic_ns()
    run = here.run(generation=4)
    pace = pace_of(here)
    assert (pace.generation, pace.phase, pace.step) == (4, RankPhase.STARTING, -1)
    assert before_ns <= pace.since_ns <= time.monotonic_ns()
    steps = run.steps(stop=3)
    next(steps)
    with run.compiling():
        assert phase_of(here) is RankPhase.COMPILING
    assert phase_of(here) is RankPhase.STARTING, "until a step is finished"
    next(steps)
    assert (phase_of(here), pace_of(here).step) == (RankPhase.TRAINING, 0)
    with run.saving():
        assert phase_of(here) is RankPhase.SAVING
    with pytest.raises(ValueError, match="of the script"), run.evaluating():
        raise ValueError("of the script")
    assert phase_of(here) is RankPhase.TRAINING
    list(steps)
    assert phase_of(here) is RankPhase.ENDED


def test_of_blocks_within_each_other_the_outer_one_counts(here: Surroundings) -> None:
    run = here.run()
    with run.evaluating():
        since_ns = pace_of(here).since_ns
        with run.compiling(), run.evaluating():
            assert (phase_of(here), pace_of(here).since_ns) == (RankPhase.EVALUATING, since_ns)
        assert phase_of(here) is RankPhase.EVALUATING
    assert phase_of(here) is RankPhase.STARTING


def test_blocks_of_several_threads_may_overlap(here: Surroundings) -> None:
    run = here.run()
    for step in run.steps(stop=2):
        if step:
            break
    entered, leave = threading.Event(), threading.Event()

    def save() -> None:
        with run.saving():
            entered.set()
            assert leave.wait(DEADLINE_S)

    thread = threading.Thread(target=save)
    with run.evaluating():
        thread.start()
        assert entered.wait(DEADLINE_S)
    assert phase_of(here) is RankPhase.SAVING
    leave.set()
    thread.join(DEADLINE_S)
    assert phase_of(here) is RankPhase.TRAINING


def test_a_rank_says_that_it_restores_for_as_long_as_it_does(here: Surroundings) -> None:
    seen: list[RankPhase] = []

    class Watched(Box):
        def load_state_dict(self, state: object) -> None:
            seen.append(phase_of(here))

    run = here.run()
    first = run.checkpoint({"box": Box([1])})
    for step in run.steps(stop=2):
        first.save(step)
    again = here.run(generation=2, restore=1).checkpoint({"box": Watched([1])})
    assert again.restore() == 2
    assert seen == [RankPhase.RESTORING]
    assert phase_of(here) is RankPhase.STARTING


def test_outside_everstep_blocks_do_nothing() -> None:
    run = Run(None, Notices(None, Rank(-1), NO_GENERATION), None)
    with run.evaluating(), run.saving(), run.compiling(), run.communicating():
        assert list(run.steps(stop=2)) == [0, 1]


def test_a_file_that_cannot_be_written_costs_neither_steps_nor_training(
    here: Surroundings,
) -> None:
    (here.shm / FILE).mkdir()
    run = here.run()
    with run.evaluating():
        assert list(run.steps(stop=3)) == [0, 1, 2]
    assert here.kinds() == [NoticeKind.ADVICE]
    assert here.beat().step == 2


def test_a_forked_child_is_no_rank(here: Surroundings) -> None:
    run = here.run()
    pid = os.fork()
    if pid == 0:
        run.forget()
        with run.evaluating():
            os._exit(0 if phase_of(here) is RankPhase.STARTING else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- work ----------------------------------------------------------------------------------------

SCRIPT = """
import sys
import everstep
run = everstep.attach()
for step in run.steps(stop=int(sys.argv[1])):
    total = 0
    for number in range(60_000):
        total += number
    print("done", flush=True)
    sys.stdin.readline()  # as in a collective: until all others are done
"""
STEPS = 8


@contextmanager
def rank(here: Surroundings, local_rank: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real one, that computes for some milliseconds and then waits for the others."""
    context = msgspec.structs.replace(
        here.context(), rank=Rank(local_rank), local_rank=local_rank, notice_socket=""
    )
    text = msgspec.json.encode(context).decode()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(STEPS)],
        env={**os.environ, VARIABLE: text},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """The last in the queue of a processor that has enough to do: what a quota does to it too."""
    core = {min(os.sched_getaffinity(pid))}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            for each in (pid, busy.pid):
                os.sched_setaffinity(each, core)
            os.setpriority(os.PRIO_PROCESS, pid, 15)
            yield
        finally:
            busy.kill()


@contextmanager
def throttled(pid: int) -> Iterator[None]:
    """A quota of a cgroup of version 1: 2 ms of 100."""
    group = Path(f"/sys/fs/cgroup/cpu/everstep-test-{pid}")
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("2000")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def may_throttle() -> bool:
    quota = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    return quota.exists() and os.access(quota.parent, os.W_OK) and os.geteuid() == 0


WAYS: list[Callable[[int], AbstractContextManager[None]]] = [starved]
if may_throttle():
    WAYS.append(throttled)


@pytest.mark.parametrize("hold_back", WAYS)
def test_a_rank_that_is_held_back_computes_longer_than_the_one_that_waits_for_it(
    here: Surroundings, hold_back: Callable[[int], AbstractContextManager[None]]
) -> None:
    found: list[list[Pace]] = [[], []]
    reader = PaceReader(here.shm / FILE, 2)
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank(here, local)) for local in (0, 1)]
        for step in range(STEPS):
            for each in ranks:
                assert each.stdout is not None
                assert each.stdout.readline() == b"done\n"
            for local, pace in enumerate(reader.read()):
                if pace is not None and 2 <= pace.step == step - 1:
                    found[local].append(pace)
            if step == 1:
                stack.enter_context(hold_back(ranks[1].pid))
            for each in ranks:
                assert each.stdin is not None
                each.stdin.write(b"\n")
                each.stdin.flush()
    peer, slow = ([pace.compute_s for pace in paces] for paces in found)
    assert len(slow) == len(peer) == STEPS - 3
    assert statistics.median(slow) > statistics.median(peer)
    steps = statistics.median(pace.wall_s for pace in found[0])
    assert statistics.median(peer) < steps, "what it waits is not its own"


def finished(compute: Compute) -> tuple[float, float]:
    return compute.finish_step(time.monotonic_ns())


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_lies_in_blocks_is_no_work_of_the_rank() -> None:
    compute = Compute()
    assert str(finished(compute)) == "(nan, nan)"
    spin(0.02)
    all_s, _ = finished(compute)
    assert all_s >= 0.02
    before = time.monotonic()
    compute.leave(communicates=True)
    compute.leave(communicates=False)
    spin(0.02)
    compute.come_back()
    compute.come_back()
    aside_s, wall_s = finished(compute)
    assert aside_s <= time.monotonic() - before - 0.02
    assert wall_s >= 0.02, "waits for others are a part of the step"
    compute.leave(communicates=False)
    spin(0.02)
    assert finished(compute)[0] < 0.02, "also of a block that outlasts the step"
    compute.come_back()
    compute.close()


def test_on_cuda_only_a_script_that_says_when_it_communicates_has_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    compute = Compute()
    finished(compute)
    unknown, wall_s = finished(compute)
    assert unknown != unknown
    assert wall_s >= 0
    compute.leave(communicates=True)
    spin(0.01)
    compute.come_back()
    known, wall_s = finished(compute)
    assert 0 <= known <= wall_s - 0.01


def test_another_thread_that_ends_steps_is_measured_from_then_on() -> None:
    compute = Compute()
    finished(compute)
    found: list[tuple[float, float]] = []

    def work() -> None:
        found.append(finished(compute))
        spin(0.01)
        found.append(finished(compute))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE_S)
    assert str(found[0]) == "(nan, nan)"
    assert found[1][0] >= 0.01
    compute.close()
