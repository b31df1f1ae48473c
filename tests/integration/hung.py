"""A job of eight ranks that hangs on request: what test_hangs.py breaks, and how it looks.

Four stand-in machines of two ranks, tensor, data and pipeline parallel, and what its user sees of
each matter: who was evicted, what was concluded, where training went on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

from everstep.actions import BeginGeneration, CollectStacks, JudgeStacks
from everstep.cluster.cleanup import clean_job, job_scope
from everstep.commands.jobs import result_of
from everstep.controller.views import IncidentView
from everstep.core.state import Phase
from everstep.events import ControllerEvent
from everstep.files import write_atomically
from everstep.journal.records import Reader, Record
from everstep.journal.snapshots import RECORDS
from everstep.looks import LookResult
from everstep.model import (
    CheckpointSpec,
    Every,
    JobId,
    JobSpec,
    LayoutSpec,
    MachineId,
    PolicySpec,
)
from everstep.paths import JobPaths, shm_dir
from everstep.processes import Process, descendants, send_signal
from everstep.sightings import StacksTaken
from everstep.trainer.heartbeat import SlotReader
from tests.checkpoint.lockstep import fork
from tests.integration import parallel, wedged
from tests.integration.support import Job, wait_for
from tests.trainer.test_kills_in_training import warm_up

ROOT = Path(__file__).parents[2]
RANKS_PER_MACHINE = 2
MACHINES = parallel.RANKS // RANKS_PER_MACHINE
POLICY = PolicySpec(
    stall_min_s=2.0,
    stall_max_s=8.0,
    look_within_s=10.0,
    look_again_s=1.0,
    look_retry_s=2.0,
    slow_every_s=8.0,
    fails_again_s=1.0,
    proven_after_steps=3,
    recoveries_max=100,
    accusers_within_s=1.0,
    retest_after_s=1.0,
)
FINAL = (LookResult.MACHINES, LookResult.CODE, LookResult.NOTHING)
_Event = TypeVar("_Event", bound=ControllerEvent)


class Answer(NamedTuple):
    """What became of one matter."""

    incident: IncidentView
    verdict: JudgeStacks

    @property
    def machines(self) -> set[MachineId]:
        return set(self.incident.evicted)


def machine_of(job: Job, rank: int) -> MachineId:
    """Who has this rank now."""
    status = job.wait(lambda s: s.phase is Phase.RUNNING, "a generation")
    return next(view.machine for view in status.machines if rank in view.ranks)


def process_of(job: Job, rank: int) -> Process:
    """Of a rank that runs now, as its heartbeat says."""
    count = job.spec.nproc_per_node
    shm = shm_dir(job.spec.job, job.spec.uid, machine_of(job, rank))
    slots = SlotReader(shm / "heartbeat", count)
    beat = slots.read()[rank % count]
    slots.close()
    assert beat is not None
    assert beat.rank == rank
    return Process(beat.pid, beat.start_ticks)


class Hung(Job):
    """The job, what is asked of it and what it answers."""

    def __init__(self, spec: JobSpec, paths: JobPaths, asked: Path) -> None:
        super().__init__(spec, paths)
        self.asked = asked
        self.log = paths.root.parent / "losses"
        self.stop = paths.root.parent / "stop"
        self._told = 0
        """Incidents that a test has asked for."""

    # --- what is done to it ---

    def ask(self, trouble: wedged.Trouble, *ranks: int, number: float = 0.0) -> int:
        """These ranks do it in one and the same step, soon; which one."""
        step = self.furthest() + 8
        wedged.ask(self.asked, trouble, dict.fromkeys(ranks, step), number)
        return step

    def freeze(self, rank: int) -> Process:
        """SIGSTOP, as by a debugger, or a job control that went wrong.

        Not while agents look at stacks: whom py-spy was just attached to, they let go on again.
        """
        wait_for("an end of looks", self._nobody_looks)
        process = process_of(self, rank)
        assert send_signal(process, signal.SIGSTOP)
        return process

    def freeze_loader(self, rank: int) -> Process:
        (worker,) = descendants([process_of(self, rank)])
        assert send_signal(worker, signal.SIGSTOP)
        return worker

    def kill_controller(self) -> None:
        controller = self.controller()
        assert controller is not None
        assert send_signal(controller, signal.SIGKILL)

    # --- what is seen of it ---

    def reaches(self, step: int) -> None:
        """Until every rank has written this step down: what it was asked for comes next."""
        ranks = range(parallel.RANKS)
        wait_for(f"step {step}", lambda: all(self.lines(r)[-1][0] >= step for r in ranks))

    def lines(self, rank: int = 0) -> list[tuple[int, str]]:
        """Step and digest, as often as it was done."""
        path = parallel.log_of(self.log, rank)
        text = path.read_text() if path.exists() else ""
        pairs = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
        return [(int(step), outcome) for step, outcome in pairs]

    def furthest(self) -> int:
        return max((step for step, _ in self.lines()), default=-1)

    def trains_on(self, steps: int = 8) -> None:
        """So many steps that were never done before."""
        goal = self.furthest() + steps
        wait_for(f"step {goal}; {self.logs()}", lambda: self.furthest() >= goal)

    def records(self) -> list[Record]:
        return [entry.record for entry in Reader(self.paths.journal / RECORDS)]

    def events(self, kind: type[_Event]) -> list[_Event]:
        return [record.event for record in self.records() if isinstance(record.event, kind)]

    def verdicts(self) -> list[JudgeStacks]:
        decided = (action for record in self.records() for action in record.actions)
        return [action for action in decided if isinstance(action, JudgeStacks)]

    def looks(self) -> int:
        """Orders to take stacks."""
        decided = (action for record in self.records() for action in record.actions)
        return sum(isinstance(action, CollectStacks) for action in decided)

    def _nobody_looks(self) -> bool:
        """Whether every machine that runs these ranks has answered."""
        asked: set[tuple[MachineId, int]] = set()
        answered: set[tuple[MachineId, int]] = set()
        for record in self.records():
            for action in record.actions:
                if isinstance(action, BeginGeneration):
                    asked.clear()
                elif isinstance(action, CollectStacks):
                    asked.add((action.machine, action.look))
            if isinstance(record.event, StacksTaken):
                answered.update((machine, record.event.look) for machine in record.event.machines)
        return asked <= answered

    def answer(self) -> Answer:
        """What became of the newest matter, once training goes on after it.

        On a busy machine there may have been pauses that were looked at, too.
        """

        def closed() -> tuple[IncidentView, ...]:
            told = self.incidents().incidents[self._told :]
            broke = any(incident.recoveries for incident in told)
            return told if broke and all(i.closed_at is not None for i in told) else ()

        told = wait_for(f"recovery; {self.logs()}", closed)
        self._told += len(told)
        (incident,) = (each for each in told if each.recoveries)
        assert incident.recoveries == 1
        assert incident.restored is not None
        assert incident.restored >= incident.furthest - 1, "it went on where it stood"
        decided = [each for each in self.verdicts() if each.result in FINAL]
        return Answer(incident, decided[-1])

    def nobody_was_stopped(self) -> None:
        """Since the newest answer; incidents may have been opened, and closed again."""
        told = self.incidents().incidents[self._told :]
        assert [i for i in told if i.recoveries or i.evicted] == []
        self._told += len(told)

    def generation(self) -> int:
        return self.wait(lambda s: s.phase is Phase.RUNNING, "a generation").generation

    # --- its end ---

    def finish(self) -> None:
        """All ranks end after the same step, and nothing of the job is left."""
        self.stop.touch()
        result = wait_for(f"the end; {self.logs()}", lambda: result_of(self.paths))
        assert (result.outcome, result.exit_code) == ("finished", 0), result
        wait_for("the end of all", self.nothing_is_left)

    def is_as_undisturbed(self) -> None:
        """Every step of every rank, as often as it was done, has the bits of a calm run."""
        steps = self.furthest() + 1
        calm = self.log.with_name("calm")
        warm_up()
        pids = [
            fork(partial(parallel.undisturbed, calm, rank, steps)) for rank in range(parallel.RANKS)
        ]
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0 for _ in pids]
        for rank in range(parallel.RANKS):
            path = parallel.log_of(calm, rank)
            reference = dict(line.split() for line in path.read_text().splitlines())
            done = self.lines(rank)
            assert {step for step, _ in done} == set(range(steps))
            assert [line for line in done if reference[str(line[0])] != line[1]] == []


@contextmanager
def hung(directory: Path, *, standbys: int = 2, policy: PolicySpec = POLICY) -> Iterator[Hung]:
    """The job, under way; whatever the test did, nothing of it is left."""
    jobs, asked = directory / "jobs", directory / "asked"
    asked.mkdir()
    os.mkfifo(asked / wedged.FIFO)
    name = JobId(f"hung-{uuid4().hex[:8]}")
    places = ("--losses", jobs / "losses", "--stop", jobs / "stop", "--ask", asked)
    spec = JobSpec(
        job=name,
        uid=uuid4().hex[:8],
        command=(wedged.__name__, *map(str, places)),
        module=True,
        working_dir=str(ROOT),
        nnodes=MACHINES,
        nproc_per_node=RANKS_PER_MACHINE,
        standbys=standbys,
        local=True,
        env={"OMP_NUM_THREADS": "1"},
        checkpoint=CheckpointSpec(directory=str(directory / "checkpoints"), disk_every=Every()),
        layout=LayoutSpec(tp=parallel.TP, dp=parallel.DP, pp=parallel.PP),
        policy=policy,
    )
    paths = JobPaths(jobs, name)
    paths.root.mkdir(mode=0o700, parents=True)
    write_atomically(paths.spec, spec)
    write_atomically(paths.token, b"secret")
    made = Hung(spec, paths, asked)
    try:
        made.start()
        made.trains_on()
        yield made
    finally:
        clean_job(paths.root)
        assert not job_scope(paths.root, spec).shm
