"""Small journals for tests: real events, decided by the real core."""

from __future__ import annotations

from pathlib import Path

from everstep.actions import ControllerAction
from everstep.core.controller import ControllerCore
from everstep.core.state import State
from everstep.events import (
    ControllerEvent,
    ControllerStarted,
    JobSubmitted,
    MachineJoined,
    RankExited,
    RanksStarted,
    RanksStopped,
    StepProgress,
    TimerFired,
)
from everstep.journal import Journal, Origin, Record, take_term
from everstep.journal.records import Reader
from everstep.model import (
    CheckpointSpec,
    Copy,
    Every,
    ExitStatus,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    Rank,
    Step,
    Term,
)

VERSION = "0.1.0"
SPEC = JobSpec(
    job=JobId("job"),
    uid="00000000",
    command=("train.py",),
    working_dir="/",
    nnodes=2,
    nproc_per_node=1,
    checkpoint=CheckpointSpec(directory="/checkpoints", disk_every=Every()),
)


def open_journal(directory: Path, *, version: str = VERSION) -> Journal:
    """The next term's journal."""
    return Journal(directory, take_term(directory), version=version)


class Run:
    """A core and its journal, as a controller has them."""

    def __init__(self, journal: Journal, core: ControllerCore | None = None) -> None:
        self.journal = journal
        self.core = ControllerCore() if core is None else core
        self.now = journal.last_time

    @property
    def state(self) -> State:
        return self.core.state

    def tell(self, event: ControllerEvent, origin: Origin | None = None) -> int:
        """One turn of the controller's loop."""
        self.now += 1.0
        actions = self.core.handle(event, self.now)
        return self.journal.append(event, self.now, origin=origin, actions=actions)

    def start(self) -> None:
        """From the submission to training at step 5."""
        self.tell(JobSubmitted(spec=SPEC))
        self.tell(ControllerStarted(term=Term(1), version=VERSION))
        for name in ("m0", "m1"):
            self.tell(joined(name), Origin(machine=MachineId(name), agent="a", seq=1))
        self.restart()

    def restart(self, *, copies: int = -1) -> None:
        """Answer the outstanding stops and starts."""
        generation = self.state.generation
        for rank, name in enumerate((MachineId("m0"), MachineId("m1"))):
            held = Copy(rank=Rank(rank), step=Step(copies), generation=Generation(generation - 1))
            for order in self.core.outstanding(name):
                self.tell(
                    RanksStopped(
                        machine=name,
                        action=order.id,
                        generation=generation,
                        store_port=29500,
                        copies=(held,) if copies >= 0 else (),
                    )
                )
        for name in (MachineId("m0"), MachineId("m1")):
            for order in self.core.outstanding(name):
                self.tell(RanksStarted(machine=name, action=order.id, generation=generation))

    def train(self, step: int) -> None:
        progress = StepProgress(
            generation=self.state.generation,
            finished_by_all=Step(step),
            finished_by_one=Step(step + 1),
        )
        self.tell(progress)

    def record(self, event: ControllerEvent, *actions: ControllerAction) -> int:
        """As if a core had decided this; this one is not asked."""
        self.now += 1.0
        return self.journal.append(event, self.now, origin=None, actions=list(actions))

    def kill_a_rank(self, *, proven: bool = True) -> None:
        """An incident: rank 1 dies, everybody restarts, the restart is proven."""
        self.tell(
            RankExited(
                machine=MachineId("m1"),
                generation=self.state.generation,
                rank=Rank(1),
                exit=ExitStatus(signal=9),
            )
        )
        self.restart(copies=5)
        if proven:
            self.train(6)
            self.train(30)


def joined(name: str) -> MachineJoined:
    return MachineJoined(
        machine=MachineId(name),
        agent="a",
        address=f"addr-{name}",
        host="host",
        version=VERSION,
        generation=Generation(0),
    )


def fill(journal: Journal, count: int) -> None:
    """Records that nothing is decided at."""
    for _ in range(count):
        journal.append(TimerFired(), journal.last_time + 1.0)


def records_of(directory: Path) -> list[Record]:
    return [entry.record for entry in Reader(directory / "records")]
