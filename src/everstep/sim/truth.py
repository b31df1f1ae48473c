"""What really goes on in a simulated world, and whether it may.

core/invariants.py judges what the controller says; this judges what happened to machines because
of it. It sees every forked process and every step, which no controller does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from everstep.actions import ControllerAction, FinishJob, Outcome, StartRanks
from everstep.core.invariants import Watch
from everstep.core.must import must
from everstep.core.sizes import alike
from everstep.core.state import State
from everstep.core.state_check import check_state
from everstep.diagnosis.abnormal import Kind
from everstep.events import ControllerEvent, MetricAbnormal
from everstep.model import (
    NO_STEP,
    NO_VERSION,
    Copy,
    Generation,
    Published,
    Rank,
    Seconds,
    Step,
    VersionId,
)
from everstep.sim.code import Codes
from everstep.sim.disk import Disk
from everstep.sim.memory import RankMemory
from everstep.sim.records import Ledger
from everstep.sim.training import Gang, Process

HEARD_LATE = 15
"""Steps that a controller may not have heard of when ranks fail."""


class _Trained(NamedTuple):
    """A generation that really began."""

    gang: Gang
    memories: dict[Rank, RankMemory]
    """Where each rank's copies are."""

    def held(self, gang: Gang) -> dict[Rank, None]:
        """The ranks of which the memory is on a machine of this later generation."""
        return {
            rank: None
            for rank, memory in self.memories.items()
            if any(process.beside.get(rank) is memory for process in gang.processes.values())
        }


class _Safe(NamedTuple):
    """A step was declared machine-safe while this generation trained."""

    step: Step
    trained: _Trained


class Truth:
    """Judge of one run. Everything raises InvariantBroken."""

    def __init__(self, disk: Disk, *, attached: bool = True) -> None:
        """`attached`: the controller hears of steps."""
        self.watch = Watch()
        self._attached = attached
        self._disk = disk
        self._alive: dict[Process, None] = {}
        self._starts: dict[Generation, dict[str, StartRanks]] = {}
        """Orders that were carried out, by generation and id."""
        self._last: _Trained | None = None
        self._safe: _Safe | None = None
        self._declared: Published | None = None
        self._stepped: Generation = Generation(0)
        self._took: dict[Step, Seconds] = {}
        self._goes_back = False
        """Steps were to be done again, by people's wish, and nobody has gone on since."""
        self._bad: list[Published] = []
        """Of these generations, these steps and later ones are known to hold nan."""
        self.ran: dict[VersionId, int] = {}
        """Most steps that one generation did under each code version."""

    # --- the controller ---

    def decided(
        self, event: ControllerEvent, actions: list[ControllerAction], state: State, now: Seconds
    ) -> None:
        """A record is in the journal."""
        self.watch.see(event, actions, now)
        if isinstance(event, MetricAbnormal) and event.kind == Kind.NOT_FINITE:
            self._bad.append(Published(step=event.first_bad, generation=event.generation))
        check_state(state, now)
        self._see_safe(state)
        for action in actions:
            if isinstance(action, FinishJob) and action.outcome is Outcome.FINISHED:
                self._check_finished()

    def _see_safe(self, state: State) -> None:
        """What was safe is judged at the next start, whatever the controller says by then."""
        if state.safe is None or state.safe == self._declared:
            return
        self._declared, self._safe = state.safe, None
        if self._last is not None and self._last.gang.generation == state.generation:
            self._safe = _Safe(state.safe.step, self._last)

    def rewind(self, ledger: Ledger) -> None:
        """The journal lost its end: what it still says is judged anew, and nothing else counts."""
        self.watch = Watch()
        for record in ledger.records:
            self.watch.see(record.event, record.actions, record.time)

    def _check_finished(self) -> None:
        must(self._last is not None, "the job finished and no step was ever done")
        assert self._last is not None
        for rank, process in self._last.gang.processes.items():
            ok = process.exit is not None and process.exit.ok
            must(ok, f"the job finished, but rank {rank} ended with {process.exit}")

    # --- machines ---

    def forked(self, process: Process, order: StartRanks, held: Collection[VersionId]) -> None:
        """Ranks start only where and when all older ones are gone, and with code that is there."""
        there = order.version == NO_VERSION or order.version in held
        must(there, f"{order.id} runs {order.version} on {order.machine}, which does not hold it")
        starts = self._starts.setdefault(order.generation, {})
        starts[order.id] = order
        machines = {start.machine: None for start in starts.values()}
        for other in self._alive:
            older = other.generation < process.generation and other.machine in machines
            must(
                not older,
                f"rank {process.rank} of generation {process.generation} started on "
                f"{process.machine} while rank {other.rank} of generation {other.generation} was "
                f"alive on {other.machine}",
            )
            twin = (other.rank, other.generation) == (process.rank, process.generation)
            must(not twin, f"rank {other.rank} of generation {other.generation} started twice")
        self._alive[process] = None
        # Newer steps are dropped then, whatever comes of this generation.
        self._goes_back = self._goes_back or order.compare_through != NO_STEP

    def tested(self, running: Sequence[Process]) -> None:
        """Nothing runs where a test is."""
        must(not running, f"{[p.rank for p in running]} run on a machine that is tested")

    def ended(self, process: Process) -> None:
        self._alive.pop(process, None)

    # --- training ---

    def began(self, gang: Gang) -> None:
        """All ranks of a generation met: they must be able to restore what they were told."""
        starts = list(self._starts[gang.generation].values())
        wanted = Published(step=starts[0].restore, generation=starts[0].restore_generation)
        for start in starts:
            told = Published(step=start.restore, generation=start.restore_generation)
            must(told == wanted, f"{start.id} restores {told}, {starts[0].id} restores {wanted}")
        if wanted.step != NO_STEP and wanted not in self._disk.published():
            for rank, process in gang.processes.items():
                saver = process.restores
                copy = Copy(rank=saver, step=wanted.step, generation=wanted.generation)
                must(
                    copy in (*process.source.copies(), *process.local_disk.copies),
                    f"rank {rank} on {process.machine} restores step {wanted.step} of generation "
                    f"{wanted.generation}, which is neither in its memory nor on a disk",
                )
        self._check_version(gang, starts)
        self._check_known_bad(wanted)
        if not self._goes_back:
            self._check_loss(gang)
            self._check_safe(gang)
        elif not gang.goes_back:
            self._goes_back, self._safe = False, None
        memories = {rank: process.memory for rank, process in gang.processes.items()}
        self._last = _Trained(gang, memories)

    def _check_version(self, gang: Gang, starts: Sequence[StartRanks]) -> None:
        """All ranks of a generation run the same code: the one that was decided."""
        versions = {start.version for start in starts}
        versions |= {process.version for process in gang.processes.values()}
        must(len(versions) == 1, f"ranks of generation {gang.generation} run {sorted(versions)}")

    def _check_known_bad(self, restored: Published) -> None:
        """What is known to hold nan is not restored."""
        for bad in self._bad:
            must(
                restored.generation != bad.generation or restored.step < bad.step,
                f"step {restored.step} of generation {restored.generation} was restored, although"
                f" step {bad.step} of it was known to be no number",
            )

    def _check_loss(self, gang: Gang) -> None:
        """Restores s or s-1, s the newest step finished on every rank, if no memory was lost."""
        if self._last is None or not _goes_on(gang, self._last):
            return
        held = self._last.held(gang)
        wanted = alike(gang.job, self._last.gang.job)
        if gang.job == self._last.gang.job:
            wanted = {rank: (rank,) for rank in wanted}
        if any(held.keys().isdisjoint(others) for others in wanted.values()):
            return
        if self._last.gang.nan_from is not None:
            return  # what was good may be overwritten by what is not
        newest = self._last.gang.finished_by_all()
        must(
            gang.restore >= newest - 1,
            f"generation {gang.generation} restored step {gang.restore}, although every rank had "
            f"finished step {newest} in generation {self._last.gang.generation}",
        )

    def _check_safe(self, gang: Gang) -> None:
        """The loss of one machine costs no machine-safe step; until the next backup, two may."""
        if self._safe is None or self._bad or not _goes_on(gang, self._safe.trained):
            return
        held = self._safe.trained.held(gang)
        lost = {
            process.machine
            for rank, process in self._safe.trained.gang.processes.items()
            if rank not in held
        }
        must(
            len(lost) > 1 or gang.restore >= self._safe.step,
            f"generation {gang.generation} restored step {gang.restore}, although step "
            f"{self._safe.step} was in the memory of two machines each and only that of"
            f" {', '.join(lost) or 'none'} was lost",
        )
        if lost:
            self._safe = None

    @property
    def knows_of_nan(self) -> bool:
        """Somebody said that a loss is no number."""
        return bool(self._bad)

    def code_may_end_it(self, codes: Codes) -> bool:
        """Whether what ran last is bad, and nothing better can be gone back to any more."""
        ran = self.watch.code.runs
        if not codes.flaws(ran):
            return False
        assert self.watch.spec is not None
        if self.watch.ladder.rollbacks >= self.watch.spec.policy.rollbacks_max:
            return True
        good = [v for v in self.ran if v != ran and not codes.flaws(v)]
        return not self._attached or not any(map(self._ran_well, good))

    def _ran_well(self, version: VersionId) -> bool:
        """Whether the controller must know that it did, even if it heard of the last steps late."""
        assert self.watch.spec is not None
        spec = self.watch.spec
        enough = 1 if version == spec.code.version else spec.policy.ran_well_steps
        return self.ran[version] >= enough + HEARD_LATE

    @property
    def trained_s(self) -> Seconds:
        """Time that the steps took, each counted once."""
        return sum(self._took.values())

    def stepped(self, gang: Gang, took_s: Seconds) -> None:
        """One generation at a time makes progress."""
        self._took.setdefault(gang.newest, took_s)
        version, did = gang.start.version, gang.newest - gang.restore
        self.ran[version] = max(did, self.ran.get(version, 0))
        must(
            gang.generation >= self._stepped,
            f"generation {gang.generation} did step {gang.newest} after generation "
            f"{self._stepped} had begun to",
        )
        self._stepped = gang.generation

    def over(self) -> None:
        """The controller is done: the machines that it could reach are as it found them."""
        must(self.watch.ended, "the controller went before its end")
        must(not self.watch.incident, f"{self.watch.incident} never ended")


def _goes_on(gang: Gang, former: _Trained) -> bool:
    """Whether what was in memory is of use: not if the size changed and the state is sharded."""
    elastic = gang.job.elastic
    return gang.job == former.gang.job or (elastic is not None and not elastic.sharded)
