"""What must hold of every decision of the controller's core, whatever happened before it.

Called by the property tests and the simulator. `Watch` judges the sequence of events and decisions
by themselves and knows nothing of the core's state, so that an error in the state cannot hide; it
must see a journal from its first record on. It raises InvariantBroken with the facts. Whether a
decision was clever is not asked here. The state alone is judged by state_check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from everstep.actions import (
    BackUpStep,
    BeginGeneration,
    CloseIncident,
    ControllerAction,
    EndController,
    EvictMachine,
    FinishJob,
    InjectFault,
    OpenIncident,
    Order,
    Outcome,
    PersistStep,
    ProbeMachine,
    ReleaseMachine,
    ResizeJob,
    StartRanks,
    StopRanks,
    TestMachine,
    WakeStandby,
)
from everstep.core.code_watch import CodeWatch
from everstep.core.hang_watch import HangWatch
from everstep.core.ladder_watch import LadderWatch
from everstep.core.look_watch import LookWatch
from everstep.core.must import must
from everstep.core.outcasts import Outcasts
from everstep.core.sizes import alike
from everstep.core.witnesses import Witnesses
from everstep.events import (
    ControllerEvent,
    ControllerStarted,
    JobSubmitted,
    MachineJoined,
    RankExited,
    RanksStopped,
    StepPublished,
)
from everstep.model import (
    NO_GENERATION,
    NO_STEP,
    Copy,
    ExitStatus,
    Generation,
    JobSpec,
    MachineId,
    NodeRank,
    Published,
    Rank,
    Seconds,
    Term,
    ranks_in,
)


class Watch:
    """Judges every event and what was decided at it, in the order of the journal."""

    def __init__(self) -> None:
        self.spec: JobSpec | None = None
        self.job: JobSpec | None = None
        """As it is now: maybe with fewer machines."""
        self.seq = 0
        self.time: Seconds = float("-inf")
        self.term = Term(0)
        self.generation: Generation = NO_GENERATION
        self.finish: FinishJob | None = None
        self.ended = False
        self.incident = ""
        """The open one."""
        self.positions: dict[NodeRank, MachineId] = {}
        self.outcasts = Outcasts()
        """Who was evicted, and what became of them."""
        self.stopped: dict[MachineId, RanksStopped] = {}
        """Of the current generation."""
        self.started: dict[NodeRank, StartRanks] = {}
        """Of the current generation."""
        self._ended_well: dict[Rank, None] = {}
        """Ranks of the current generation of which their own machine said so."""
        self._published: dict[Published, None] = {}
        self._backups: dict[MachineId, tuple[Copy, ...]] = {}
        """What each machine said last that it keeps for others."""
        self._own: dict[MachineId, tuple[Copy, ...]] = {}
        """And what its ranks have saved."""
        self._sizes: list[tuple[Generation, JobSpec]] = []
        """From when on the job was as it was."""
        self._actions: dict[str, ControllerAction] = {}
        self._witnesses = Witnesses()
        self.ladder = LadderWatch()
        self.code = CodeWatch()
        self.hangs = HangWatch()
        self.looks = LookWatch()
        self._expelled: list[tuple[Seconds, str]] = []
        """When what was evicted because something spoke against it: machines, or units as one."""

    @property
    def evicted(self) -> dict[MachineId, str]:
        """Those that are, and why."""
        return self.outcasts.why

    def see(
        self, event: ControllerEvent, actions: Sequence[ControllerAction], now: Seconds
    ) -> None:
        """Take the next record. Raises InvariantBroken."""
        self.seq += 1
        must(now >= self.time, f"event {self.seq} is of {now}, the one before of {self.time}")
        self.time = now
        self.outcasts.hear(event, now)
        self._take(event)
        self._witnesses.hear(event, now)
        self.hangs.hear(event)
        for wrong in self.code.hear(event, now):
            must(False, wrong)
        for number, action in enumerate(actions):
            self._check_action(action, number)
            for wrong in self.code.see(action, now):
                must(False, wrong)
            for wrong in self.looks.see(action, self.positions.values()):
                must(False, wrong)
            wrong = self.outcasts.problem(action)
            must(not wrong, wrong)
            check = _CHECKS.get(type(action))
            if check is not None:
                check(self, action)
        if self.spec is not None:
            policy = self.spec.policy
            hangs = (wrong for action in actions for wrong in self.hangs.see(action, policy))
            for wrong in (*self.ladder.see(actions, policy), *hangs):
                must(False, wrong)

    def _take(self, event: ControllerEvent) -> None:
        if isinstance(event, JobSubmitted):
            self.spec = self.job = event.spec
            self._published = dict.fromkeys(event.published)
        elif isinstance(event, ControllerStarted):
            must(event.term > self.term, f"term {event.term} came after term {self.term}")
            self.term = event.term
        elif isinstance(event, RanksStopped) and self._is_answer(event):
            self.stopped[event.machine] = event
            self._backups[event.machine] = event.backups
            self._own[event.machine] = event.copies
        elif isinstance(event, RankExited):
            self._take_exit(event.machine, event.rank, event.generation, event.exit)
        elif isinstance(event, MachineJoined):
            self._backups[event.machine] = event.backups
            self._own[event.machine] = event.copies
            for status in event.ranks:
                self._take_exit(event.machine, status.rank, status.generation, status.exit)
        elif isinstance(event, StepPublished) and not event.reason:
            entry = Published(step=event.step, generation=event.generation)
            self._published[entry] = None

    def _take_exit(
        self, machine: MachineId, rank: Rank, generation: Generation, status: ExitStatus | None
    ) -> None:
        if status is None or not status.ok or generation != self.generation:
            return
        for node_rank, order in self.started.items():
            if order.machine == machine and rank in self._ranks_of(node_rank):
                self._ended_well[rank] = None

    def _ranks_of(self, node_rank: NodeRank) -> range:
        assert self.spec is not None
        return self.spec.ranks_of(node_rank)

    def _is_answer(self, event: RanksStopped) -> bool:
        """The first one: what is told again tells of what was."""
        order = self._actions.get(event.action)
        again = event.machine in self.stopped and self.stopped[event.machine].action == event.action
        return isinstance(order, StopRanks) and order.generation == self.generation and not again

    def _check_action(self, action: ControllerAction, number: int) -> None:
        name = f"{type(action).__name__} {action.id}"
        must(self.spec is not None, f"{name} was decided before a job was submitted")
        must(action.id == f"{self.seq}.{number}", f"{name} is number {number} of {self.seq}")
        must(action.why.strip(), f"{name} does not say why")
        known = action.cause in self._actions or (
            action.cause.isdigit() and 0 < int(action.cause) <= self.seq
        )
        must(known, f'{name} has the cause "{action.cause}", which is nothing that happened')
        must(not self.ended, f"{name} came after the end")
        if isinstance(action, Order) and action.machine is not None:
            why = self.evicted.get(action.machine)
            allowed = why is None or isinstance(action, StopRanks | TestMachine | ReleaseMachine)
            must(allowed, f"{name} goes to {action.machine}, which was evicted: {why}")
        self._actions[action.id] = action

    # --- one kind of action each ---

    def begin_generation(self, action: BeginGeneration) -> None:
        must(
            action.generation == self.generation + 1,
            f"generation {action.generation} came after generation {self.generation}",
        )
        self.generation = action.generation
        self.stopped.clear()
        self.started.clear()
        self._ended_well.clear()

    def stop_ranks(self, action: StopRanks) -> None:
        must(
            action.generation == self.generation,
            f"StopRanks {action.id} is of generation {action.generation}, not {self.generation}",
        )

    def wake_standby(self, action: WakeStandby) -> None:
        taken = self.positions.get(action.node_rank)
        must(taken is None, f"position {action.node_rank} of {action.machine} is {taken}'s")
        must(
            action.machine not in self.positions.values() and action.machine not in self.evicted,
            f"{action.machine} has a position or was evicted",
        )
        must(not self.started, f"{action.machine} got a position while ranks were starting")
        self.positions[action.node_rank] = action.machine

    def resize_job(self, action: ResizeJob) -> None:
        """Only of an elastic job, between two generations, and with machines that it has."""
        assert self.spec is not None
        name, elastic = f"ResizeJob {action.id}", self.spec.elastic
        must(elastic is not None and action.dp >= elastic.dp_min, f"{name} is not allowed")
        must(not self.started, f"{name} came while ranks were starting")
        must(action.dp <= self.spec.dp, f"{name} is larger than the job")
        positions = dict(action.positions)
        known = set(self.positions.values())
        must(set(positions.values()) <= known, f"{name} gives a position to a newcomer")
        must(len(set(positions.values())) == len(positions), f"{name} gives two to one machine")
        must(all(0 <= at < action.nnodes for at in positions), f"{name} has no such position")
        self.positions = positions
        self.job = self.spec.resized(action.nnodes, action.dp)
        self._sizes.append((self.generation, self.job))

    def evict_machine(self, action: EvictMachine) -> None:
        for node_rank, machine in list(self.positions.items()):
            if machine == action.machine:
                del self.positions[node_rank]
        if action.accused:
            self._expel(action)

    def _expel(self, action: EvictMachine) -> None:
        """Few at once, and nobody on a warning alone."""
        assert self.spec is not None
        policy, name = self.spec.policy, f"{action.id} evicts {action.machine}"
        spoke = self._witnesses.spoke_against
        shown = self.hangs.names(action.machine)
        for wrong in self.hangs.evict(action, self._taken()) if shown else ():
            must(False, wrong)
        said = any(map(spoke, self._witnesses.machines)) if action.unit else spoke(action.machine)
        must(
            said or shown,
            f"{name}, and nobody said anything of it that is enough",
        )
        self._expelled.append((self.time, action.unit or action.machine))
        lately = {who for at, who in self._expelled if at > self.time - policy.accusers_within_s}
        most = max(policy.accused_max, policy.accused_share * self.spec.nnodes)
        must(len(lately) <= most, f"{name} after {len(lately) - 1} others within minutes")

    def _taken(self) -> list[MachineId]:
        return [*self.positions.values(), *self.evicted]

    def probe_machine(self, action: ProbeMachine) -> None:
        must(action.machine != action.target, f"{action.id} has {action.target} reach itself")
        must(
            action.target in self.positions.values(),
            f"{action.id} asks for {action.target}, which has no position",
        )

    def start_ranks(self, action: StartRanks) -> None:
        """Ranks start only after all older ones on all assigned machines are proven gone."""
        assert self.spec is not None
        name = f"StartRanks {action.id}"
        must(self.finish is None, f"{name} came after the job was finished")
        must(action.generation == self.generation, f"{name} is not of {self.generation}")
        must(
            self.positions.get(action.node_rank) == action.machine,
            f"{name}: {action.machine} does not have position {action.node_rank}",
        )
        must(action.node_rank not in self.started, f"{name} starts {action.machine} twice")
        assert self.job is not None
        must(len(self.positions) == self.job.nnodes, f"{name} before all positions are filled")
        told = (action.nnodes or self.spec.nnodes, action.dp or self.spec.dp)
        must(told == (self.job.nnodes, self.job.dp), f"{name} is of another size")
        for machine in self.positions.values():
            must(machine in self.stopped, f"{name} before {machine} proved its old ranks gone")
        for other in self.started.values():
            must(_same_start(action, other), f"{name} and {other.id} start different generations")
        self._check_restore(action)
        self.started[action.node_rank] = action

    def _check_restore(self, action: StartRanks) -> None:
        """Every rank has the step, computed by the same generation, here, at a peer or on disk."""
        if action.restore_nnodes:
            self._check_regrown(action)
            return
        must(not action.restores, f"StartRanks {action.id} mixes up the ranks of one size")
        wanted = Published(step=action.restore, generation=action.restore_generation)
        sources = {peer.rank: peer.machine for peer in action.fetch}
        for rank in map(Rank, self._ranks_of(action.node_rank)):
            copy = Copy(rank=rank, step=wanted.step, generation=wanted.generation)
            source = sources.pop(rank, None)
            if source is not None:
                backup = self._kept(source, copy)
                must(
                    backup is not None,
                    f"StartRanks {action.id} has rank {rank} fetch step {wanted.step} of generation"
                    f" {wanted.generation} from {source}, which does not keep it",
                )
                assert backup is not None
                self._check_join(action, backup)
            elif wanted not in self._published and wanted.step != NO_STEP:
                stopped = self.stopped[action.machine]
                must(
                    copy in (*stopped.copies, *stopped.local_disk),
                    f"StartRanks {action.id} restores step {wanted.step} of generation "
                    f"{wanted.generation}, which rank {rank} on {action.machine} does not have",
                )
        must(not sources, f"StartRanks {action.id} fetches shards for ranks of other machines")

    def _check_regrown(self, action: StartRanks) -> None:
        """Every rank goes on with the shard of one that was alike, or all load from disk."""
        assert self.job is not None
        name = f"StartRanks {action.id}"
        old = self._job_at(action.restore_generation)
        must(action.restore_nnodes == old.nnodes, f"{name} is wrong about who saved its step")
        wanted = Published(step=action.restore, generation=action.restore_generation)
        elastic = self.job.elastic
        if elastic is None or elastic.sharded:
            must(not action.restores and wanted in self._published, f"{name} has no step to load")
            return
        ranks = list(map(Rank, self._ranks_of(action.node_rank)))
        must([new for new, _ in action.restores] == ranks, f"{name} says nothing of some ranks")
        others = alike(self.job, old)
        sources = {peer.rank: peer.machine for peer in action.fetch}
        for new, rank in action.restores:
            must(rank in others[new], f"{name} gives rank {new} the shard of rank {rank}")
            copy = Copy(rank=rank, step=wanted.step, generation=wanted.generation)
            source = sources.get(rank, action.machine)
            kept = self._kept(source, copy) if rank in sources else None
            held = copy in self._own.get(source, ()) or kept is not None
            must(held or wanted in self._published, f"{name}: nobody has rank {rank}'s shard")
            if kept is not None and copy not in self._own.get(source, ()):
                self._check_join(action, kept)

    def _job_at(self, generation: Generation) -> JobSpec:
        assert self.spec is not None
        known = [job for since, job in self._sizes if since <= generation]
        return known[-1] if known else self.spec

    def _kept(self, machine: MachineId, wanted: Copy) -> Copy | None:
        """The backup of this rank, step and generation that a machine keeps, whole or a part.

        One that was evicted after its ranks were proven gone gives what these had saved.
        """
        if machine in self.evicted:
            stopped = self.stopped.get(machine)
            return wanted if stopped is not None and wanted in stopped.copies else None
        kept = self._backups.get(machine, ())
        return next((copy for copy in kept if replace(copy, replicas=()) == wanted), None)

    def _check_join(self, action: StartRanks, part: Copy) -> None:
        """Who has slices that the part lacks is named, and has them, all of the same step."""
        sources = {peer.rank: peer.machine for peer in action.slices}
        for rank in ranks_in(part.replicas):
            wanted = replace(part, rank=rank, replicas=())
            source = sources.get(rank)
            held = source is not None and (
                (source in self.positions.values() and wanted in self.stopped[source].copies)
                or (bool(action.restores) and wanted in self._own.get(source, ()))
                or self._kept(source, wanted) is not None
            )
            must(
                held,
                f"StartRanks {action.id} has rank {part.rank} joined of step {part.step} with the"
                f" slices of rank {rank} from {source}, which does not hold them",
            )

    def persist_step(self, action: PersistStep) -> None:
        must(
            action.generation <= self.generation,
            f"PersistStep {action.id} is of a generation that does not exist",
        )

    def back_up_step(self, action: BackUpStep) -> None:
        """Every rank of the machine has its own peer, on another machine of the job."""
        assert self.spec is not None
        name = f"BackUpStep {action.id}"
        must(action.generation == self.generation, f"{name} is not of {self.generation}")
        must(action.step > action.safe, f"{name}: step {action.safe} is safe already")
        here = [n for n, machine in self.positions.items() if machine == action.machine]
        must(here, f"{name} goes to {action.machine}, which has no position")
        owners = [peer.rank for peer in action.peers]
        must(owners == list(self._ranks_of(here[0])), f"{name} has peers for {owners}")
        for peer in action.peers:
            away = peer.machine != action.machine and peer.machine in self.positions.values()
            must(away and peer.port, f"{name} keeps rank {peer.rank}'s backup on {peer.machine}")

    def inject_fault(self, action: InjectFault) -> None:
        must(self.finish is None, f"{action.id} breaks something after the end")

    def open_incident(self, action: OpenIncident) -> None:
        must(not self.incident, f"{action.incident} opened while {self.incident} is open")
        self.incident = action.incident

    def close_incident(self, action: CloseIncident) -> None:
        must(self.incident == action.incident, f"{action.incident} closed, but is not open")
        self.incident = ""

    def finish_job(self, action: FinishJob) -> None:
        must(self.finish is None, f"the job was finished twice, by {action.id} again")
        if action.outcome is Outcome.FINISHED:
            assert self.job is not None
            for rank in range(self.job.world_size):
                must(rank in self._ended_well, f"the job finished without an exit 0 of rank {rank}")
        self.finish = action

    def end_controller(self, action: EndController) -> None:
        must(self.finish is not None, f"{action.id} ends a controller whose job goes on")
        must(not self.incident, f"{self.incident} is open at the end")
        self.ended = True


_SAME = (
    "master_addr",
    "master_port",
    "restore",
    "restore_generation",
    "restore_nnodes",
    "restarts",
    "nnodes",
    "dp",
)


def _same_start(one: StartRanks, other: StartRanks) -> bool:
    return all(getattr(one, field) == getattr(other, field) for field in _SAME)


_CHECKS: dict[type[ControllerAction], Callable[[Watch, Any], None]] = {
    BeginGeneration: Watch.begin_generation,
    StopRanks: Watch.stop_ranks,
    WakeStandby: Watch.wake_standby,
    ResizeJob: Watch.resize_job,
    EvictMachine: Watch.evict_machine,
    StartRanks: Watch.start_ranks,
    PersistStep: Watch.persist_step,
    ProbeMachine: Watch.probe_machine,
    BackUpStep: Watch.back_up_step,
    InjectFault: Watch.inject_fault,
    OpenIncident: Watch.open_incident,
    CloseIncident: Watch.close_incident,
    FinishJob: Watch.finish_job,
    EndController: Watch.end_controller,
}
