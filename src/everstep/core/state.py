"""What the controller's core knows: plain data, changed only by observe.py and commit.py.

Everything is a msgspec Struct of plain values, so a snapshot is one encode and a comparison of two
states is a comparison of bytes. Dictionaries are used as ordered sets: iteration order is the order
of facts, never of hashes. Nothing outside core/ may change it; views read it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.actions import ControllerAction, FinishJob, Rung
from everstep.core.ettr import TimeAccount
from everstep.core.history import Eviction, Sized, VersionBook
from everstep.core.look_state import Look, Patience, Straggler, Watching
from everstep.diagnosis.findings import Finding
from everstep.events import FaultRequested, MetricAbnormal, RollbackRequested
from everstep.health import Alert
from everstep.model import (
    NO_GENERATION,
    NO_STEP,
    NO_VERSION,
    Copy,
    ExitStatus,
    Generation,
    JobSpec,
    MachineId,
    NodeRank,
    Published,
    Rank,
    RankError,
    Replicated,
    Seconds,
    SeenGroups,
    Step,
    Term,
    VersionId,
)

BACKUP_LEAD_S: Seconds = 0.25
"""A backup step lies this far ahead of the steps that should be finished when it is chosen: the
time until an order is journalled and has come to every rank, with room to spare. One that comes too
late fails, which costs nothing but the attempt; then it doubles, and shrinks again by a tenth with
every backup that succeeds."""
BACKUP_LEAD_MAX_S: Seconds = 4.0


class Phase(StrEnum):
    """Where the job is between two generations. The order is the order of a restart."""

    GATHERING = "gathering"
    """Before the first generation: machines join and get their positions."""
    STOPPING = "stopping"
    """A generation began: old ranks are being proven gone on every machine."""
    STARTING = "starting"
    """Ranks are being forked."""
    RUNNING = "running"
    """Every machine reported its ranks running."""
    ENDING = "ending"
    """FinishJob was decided: stop, last disk copy, release."""
    ENDED = "ended"
    """Nothing is left to do: the shell may go."""


class Noted(msgspec.Struct, kw_only=True):
    """An alert of a machine: kept while it holds, and for a while after."""

    alert: Alert
    """As it was told last."""
    event: int
    """Number of the event that told it last."""
    since: Seconds
    """When it occurred first since it was last over."""
    at: Seconds
    """When it occurred last."""
    cleared_at: Seconds | None = None
    """None: it holds."""
    told: bool = False
    """People were told, if it concerns the whole job."""
    acquitted: bool = False
    """Its machine was evicted and acquitted while it held: until it is over, it is no strike."""


class Strike(msgspec.Struct, kw_only=True, frozen=True):
    """One occurrence of something that is tolerated once."""

    at: Seconds
    event: int
    alert: Alert


class Machine(msgspec.Struct, kw_only=True):
    """One machine that ever joined."""

    machine: MachineId
    agent: str
    address: str
    host: str
    ordered_at: Seconds = 0.0
    """When the order in `awaiting` was given, or given again by a new controller."""
    asked: NodeRank | None = None
    node_rank: NodeRank | None = None
    """Its position; None while it is a standby, and after its eviction."""
    was: NodeRank | None = None
    """The position that it had when it was evicted: its memory may hold those ranks' shards."""
    connected: bool = True
    silent_since: Seconds = 0.0
    """Meaningful while not connected."""
    lost: str = ""
    """Why its owner says that it is gone; empty if it does not."""
    evicted: str = ""
    """Why it was evicted; empty if it was not."""
    start_ordered: Generation = NO_GENERATION
    """Newest generation whose ranks it was ordered to start: they may run until proven gone."""
    stopped_for: Generation = NO_GENERATION
    """Newest generation for which it proved its older ranks gone."""
    started_for: Generation = NO_GENERATION
    store_port: int = 0
    copies: tuple[Copy, ...] = ()
    backups: tuple[Copy, ...] = ()
    local_disk: tuple[Copy, ...] = ()
    shard_port: int = 0
    shard_address: str = ""
    finished: Step = NO_STEP
    """Newest step that all its ranks had finished when they were last stopped."""
    finished_at: Seconds = 0.0
    released: bool = False
    survived: tuple[int, ...] = ()
    """Pids that would not die for the newest StopRanks."""
    not_freed: str = ""
    """What ranks that died for it still keep, as a clause."""
    boot_id: str = ""
    """Of its kernel: stand-ins share one. Empty: unknown."""
    units: tuple[str, ...] = ()
    """What it shares with others and may lose with them: "switch:leaf7"."""
    alerts: list[Noted] = []
    """What checks and monitors say of it: one entry for each source, check and item."""
    strikes: list[Strike] = []
    """Of the last minutes, in the order in which they were told."""
    versions: dict[VersionId, None] | None = {}
    """Code versions that its ranks could run now. None: its agent is of an everstep that has none.
    """
    ready: bool = False
    """Its launcher is warm, and its checks have looked at everything once."""

    @property
    def left_behind(self) -> str:
        """What is left of its old ranks, as a clause; empty if nothing is known to be."""
        if self.not_freed:
            return f"its old ranks are not proven gone: {self.not_freed}"
        pids = ", ".join(map(str, self.survived))
        return f"its old ranks could not be killed (pids {pids})" if pids else ""


class FailureKind(StrEnum):
    """What happened, apart from why."""

    EXITED = "exited"
    """A rank ended."""
    LOST = "lost"
    """A machine is gone."""
    NOT_STARTED = "not started"
    """A machine could not start its ranks."""
    NUMBERS = "numbers"
    """Training's numbers are worth nothing."""
    HANG = "hang"
    """Nothing advances, or everything does so slowly."""


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """One reason why the current generation is broken."""

    event: int
    """Journal number of the fact."""
    at: Seconds
    """When it happened, by the controller's clock."""
    text: str
    kind: FailureKind
    machine: MachineId | None = None
    rank: Rank | None = None
    exit: ExitStatus | None = None
    error: RankError | None = None
    last_lines: str = ""


class RungTaken(msgspec.Struct, kw_only=True, frozen=True):
    """One step of the ladder: what one recovery did."""

    rung: Rung
    generation: Generation
    """The one that it led to."""
    failure: str
    """Class of the failure that it answers."""
    version: VersionId = NO_VERSION
    """The code that ran when it failed."""
    at: Seconds
    action: str
    why: str


class Incident(msgspec.Struct, kw_only=True):
    """From the first symptom to proven recovery."""

    incident: str
    symptom: str
    opened_at: Seconds
    opened_by: str
    """Id of the OpenIncident action."""
    generation: Generation
    """The generation that broke first."""
    furthest: Step
    """Newest step finished by all ranks before it."""
    failures: list[Failure] = []
    cause: str = ""
    """What the evidence says, as a sentence; empty if there is none."""
    rule: str = ""
    """The rule that this sentence comes from: the same one again is the same failure."""
    planned: bool = False
    """Nothing failed: people or machines that came are its cause."""
    version: VersionId = NO_VERSION
    """The code that ran when it began."""
    rungs: list[RungTaken] = []
    recoveries: int = 0
    restored: Step | None = None
    evicted: list[MachineId] = []
    closed_at: Seconds | None = None
    outcome: str = ""

    @property
    def starts(self) -> list[RungTaken]:
        """The rungs that ranks were started with; stacks are compared while they run."""
        return [taken for taken in self.rungs if taken.rung is not Rung.AGGREGATE]


class Persist(msgspec.Struct, kw_only=True):
    """The one step that is on its way to a disk."""

    step: Step
    generation: Generation
    """The generation that computed it."""
    awaiting: dict[MachineId, str]
    """Machine -> id of its PersistStep."""
    failed: str = ""
    publishing: str = ""
    """Id of the PublishStep once every machine has persisted."""


class TierBooks(msgspec.Struct, kw_only=True):
    """The books of one place outside of memory: what is on its way there, when the next is due."""

    persist: Persist | None = None
    after: Step = NO_STEP
    """The newest step that is complete there: the next one is a newer one."""
    begun: Step = NO_STEP
    """The newest step that was ordered there, whatever became of it."""
    begun_at: Seconds = 0.0
    """When that was."""
    not_before: Seconds = 0.0
    """After a copy that failed, when to try again."""
    failed: str = ""
    """Why the newest copy failed; empty if it did not."""


class Backup(msgspec.Struct, kw_only=True):
    """The one backup step that is on its way to the peers."""

    step: Step
    generation: Generation
    awaiting: dict[MachineId, str]
    """Machine -> id of its BackUpStep."""
    begun_at: Seconds
    failed: str = ""
    late: bool = False
    """All that failed so far did because the order came too late."""
    replicated: list[Replicated] = []
    """What the machines that have answered say of the tensors they sent slices of."""


class Spoiled(msgspec.Struct, kw_only=True, frozen=True):
    """Copies that must not be restored."""

    through: Generation
    """Of this generation and older ones,"""
    step: Step
    """this step and newer ones."""


class Numeric(msgspec.Struct, kw_only=True, frozen=True):
    """Training's numbers went bad, and no generation since has proven that it got past that."""

    first_bad: Step
    generation: Generation
    """The last one that showed it."""
    times: int


class Evidence(msgspec.Struct, kw_only=True, frozen=True):
    """One fact that speaks about a cause."""

    event: int
    """Number of the event that told it."""
    generation: Generation
    at: Seconds
    finding: Finding


class Expelled(msgspec.Struct, kw_only=True, frozen=True):
    """A machine that was evicted because something spoke against it."""

    machine: MachineId
    at: Seconds
    unit: str
    """What it went as a part of; empty: by itself."""


class Flood(msgspec.Struct, kw_only=True, frozen=True):
    """How much is being said."""

    second: int = 0
    """The newest in which anything was."""
    events: int = 0
    """In it."""


class Probe(msgspec.Struct, kw_only=True):
    """What others say of reaching a machine that is silent."""

    attempt: int
    asked_at: Seconds
    awaiting: dict[str, None] = {}
    """Ids of this attempt's orders that have no answer yet."""
    unreached: list[MachineId] = []
    """Who could not reach it, in this attempt."""
    in_vain: int = 0
    """Attempts, one after the other, in which nobody could."""
    given_up_at: Seconds | None = None
    """When that was often enough: the machine counts as lost."""


class Pace(msgspec.Struct, kw_only=True):
    """How long steps take, and took: what tells a slow-down (slowdown.py)."""

    usual: list[Seconds] = []
    newest: list[Seconds] = []
    settling: int = 0
    """So many reports after a restart say nothing: compilation, cold caches."""
    slow_since: Seconds | None = None
    """None: it is not slow."""
    why: str = ""
    told_at: Seconds | None = None
    """When the judge of training's own numbers told of a decline."""
    told: str = ""
    fast_again_at: Seconds | None = None
    """When the newest slow-down by the time per step was over."""
    looked_at: Seconds = float("-inf")
    """What was told by then was looked into (slowness.py)."""


class State(msgspec.Struct, kw_only=True):
    """All of it."""

    seq: int = 0
    """Number of events handled: the journal number of the newest one, counted from 1."""
    spec: JobSpec | None = None
    term: Term = Term(0)
    generation: Generation = NO_GENERATION
    phase: Phase = Phase.GATHERING
    phase_since: Seconds = 0.0
    machines: dict[MachineId, Machine] = {}
    positions: dict[NodeRank, MachineId] = {}
    awaiting: dict[MachineId, str] = {}
    """Machines that still owe the answer this phase waits for -> id of the order."""
    silent: dict[MachineId, None] = {}
    """Not connected, not evicted, not released."""
    outstanding: dict[str, ControllerAction] = {}
    """Actions without an answer yet, by id; sent again after a reconnect or a restart."""
    requested: int = 0
    """Machines asked for (or started with the job) that have not joined yet."""
    last_started: Generation = NO_GENERATION
    """Newest generation that any machine was ordered to start."""
    dead_through: Generation = NO_GENERATION
    """Newest generation of which a rank is known to be gone: it and all older ones cannot advance,
    since no step is done without every rank."""
    resized: JobSpec | None = None
    """The job as it is for now, with fewer machines than it was submitted for; None: it has all."""
    sizes: list[Sized] = []
    """Every change of that, oldest first."""
    restores: dict[Rank, Rank] = {}
    """Ranks of the newest start that went on with another rank's shard, and which."""
    stored_bytes: int = 0
    """Of the newest published step; 0: not known."""
    refused: str = ""
    """Why the newest request for machines was refused, if it was."""
    short_since: Seconds | None = None
    """Since when positions are free that no machine is there for."""
    versions: dict[VersionId, VersionBook] = {}
    """In the order in which they came."""
    version: VersionId = NO_VERSION
    """The code of the newest generation, or of the next one once that is decided."""
    rollback: RollbackRequested | None = None
    """Requested and not done yet."""
    rollback_event: int = 0
    rollback_at: Seconds = 0.0
    planned: Rung | None = None
    """What the ranks of the generation before were stopped for, although they were well."""
    compare_through: Step = NO_STEP
    """The newest generation compares the losses of steps up to this one."""
    overlap_to: Step | None = None
    """The generation that is about to start restores this step or an older one; None: any."""
    evictions: list[Eviction] = []
    """All of them, oldest first."""
    heard_since: Seconds = 0.0
    """When a machine with a position was heard of again after none was: before that, silence of
    the others and the lack of progress said nothing."""
    gather_from: Seconds | None = None
    """When the last machine needed to start had joined."""

    failures: list[Failure] = []
    """Why the current generation is broken; empty while it is whole."""
    exits: dict[Rank, ExitStatus] = {}
    """Ranks of the current generation that ended."""
    early_exits: list[Rank] = []
    """Ranks that exited 0 in the last generation that then broke."""
    running_since: Seconds | None = None
    """When every machine of the current generation had started."""
    first_exit_at: Seconds | None = None
    """When the first rank of the current generation exited with 0."""

    finished_by_all: Step = NO_STEP
    """Of the current generation."""
    finished_by_one: Step = NO_STEP
    step_s: Seconds | None = None
    progress_at: Seconds = 0.0
    """When `finished_by_all` was reached, or the generation began."""
    advanced_at: Seconds = 0.0
    """When `finished_by_one` grew: that training advances shows also while the machine is silent
    that would have to say so of its ranks."""
    furthest: Step = NO_STEP
    """Newest step that every rank finished in any generation that is still part of the history."""
    loss: float | None = None
    restored: Step = NO_STEP
    restored_generation: Generation = NO_GENERATION
    bad_copies: list[Copy] = []
    """Shards that a peer keeps, or the rank's machine on its disk, and that were no use to their
    rank: its owner's memory had damaged them before they were copied, say."""
    evidence: list[Evidence] = []
    """What the output of ranks says about causes, since the last start."""
    spoiled: list[Spoiled] = []
    left: list[Spoiled] = []
    """Copies that are none of the history any more: training went on from an older step. Members
    drop theirs; a machine that returns may still have them."""
    numeric: Numeric | None = None
    abnormal: list[MetricAbnormal] = []
    """Numbers that people are to be told of."""
    alerted: dict[MachineId, None] = {}
    """Machines in or for the job that have alerts or strikes: most have none."""
    flood: Flood = Flood()
    expelled: list[Expelled] = []
    """In the last minutes, for the guards."""
    bad_units: dict[str, None] = {}
    """Units that were evicted as one: standbys in them are the last to be woken."""
    pace: Pace = msgspec.field(default_factory=Pace)
    probes: dict[MachineId, Probe] = {}
    """Of machines that are silent while nothing advances."""
    recoveries: list[Seconds] = []
    """Times of the recoveries since the last progress: what the guard counts."""
    stops: list[Seconds] = []
    """Times of stops for machines that were accused while nothing failed, since the same."""
    proven: bool = False
    """Some generation of this job has trained for real."""

    published: list[Published] = []
    inherited: list[Published] = []
    """Those that were there before the job."""
    disk: TierBooks = msgspec.field(default_factory=TierBooks)
    """The directory or store that all machines share."""
    local_disk: TierBooks = msgspec.field(default_factory=TierBooks)
    """The machines' own disks, all together."""

    backup: Backup | None = None
    safe: Published | None = None
    """The machine-safe step: every rank's shard of it lies in the memory of two machines."""
    compared: list[Published] = []
    """The newest two that were machine-safe: backups of them may be joined from replicas' slices,
    which were compared."""
    unequal: str = ""
    """Why backups are whole from now on: replicas turned out to be none. Empty: they may be."""
    single: bool = False
    """A machine was lost since: some shards of the machine-safe step lie in one memory only."""
    backups_failed: int = 0
    """How many of the newest finished backups failed, one after the other: while that is so, the
    disk tier does not wait for machine-safe steps."""
    backup_lead_s: Seconds = BACKUP_LEAD_S
    """How far ahead of the newest step a backup step is chosen now."""
    backup_after: Step = NO_STEP
    """The next backup step is a newer one than this."""
    backup_not_before: Seconds = 0.0
    """After a failed backup, when to try again."""

    seen: SeenGroups | None = None
    """The parallel groups that the ranks had when they last told of them."""
    told_of_layout: str = ""
    """What people were told last of sources of the layout that disagree."""

    patience: Patience = msgspec.field(default_factory=Patience)
    watching: Watching | None = None
    """The stall or slow-down that is looked into now."""
    judged: Look | None = None
    """The look for which the current generation was given up, until the next one starts."""
    looks: list[Look] = []
    """The newest ones that are over, oldest first, for people."""
    looked: int = 0
    """Number of the newest look."""
    stacks_wanted_by: str = ""
    """A person wants to see the stacks; empty: nobody does."""
    straggler: Straggler | None = None

    incidents: list[Incident] = []
    faults: list[FaultRequested] = []
    """Requested and not yet ordered."""
    fault_events: list[int] = []
    """Journal numbers of `faults`."""
    stop_by: str = ""
    """Who asked for the end of the job; empty if nobody did."""
    paged: dict[str, str] = {}
    """Matters of which a human was told in this generation -> what was said."""
    finish: FinishJob | None = None
    ending_stopped: bool = False
    """The ranks were ordered to stop for the job's end."""
    ending_ready: bool = False
    """The last disk copy is made or given up: machines may be released."""
    account: TimeAccount = msgspec.field(default_factory=TimeAccount)

    @property
    def broken(self) -> bool:
        """The current generation cannot go on: something failed, or a position is empty."""
        running = self.phase in (Phase.STARTING, Phase.RUNNING)
        return running and (bool(self.failures) or not self.full)

    def tier(self, *, local_disk: bool) -> TierBooks:
        return self.local_disk if local_disk else self.disk

    @property
    def persisting(self) -> bool:
        """Some step is on its way to a disk, and kept in memory until it is there."""
        return self.disk.persist is not None or self.local_disk.persist is not None

    @property
    def full(self) -> bool:
        """Every position is taken."""
        return len(self.positions) == self.job.nnodes

    @property
    def job(self) -> JobSpec:
        """As it is now: maybe with fewer machines than it was submitted for."""
        assert self.spec is not None, "the journal's first record must be JobSubmitted"
        return self.resized or self.spec

    def job_of(self, copy: Copy | Published) -> JobSpec:
        """As it was when this was computed: of how many ranks' shards it is one."""
        if not self.sizes or copy in self.inherited:
            return self.spec or self.job
        return self.job_at(copy.generation)

    def job_at(self, generation: Generation) -> JobSpec:
        """As it was in this generation: how many ranks there are shards of."""
        assert self.spec is not None, "the journal's first record must be JobSubmitted"
        for sized in reversed(self.sizes):
            if sized.since <= generation:
                return self.spec.resized(sized.nnodes, sized.dp)
        return self.spec

    @property
    def incident(self) -> Incident | None:
        """The open incident, if any: there is at most one."""
        last = self.incidents[-1] if self.incidents else None
        return last if last is not None and last.closed_at is None else None

    def members(self) -> list[Machine]:
        """Machines with a position, in order of position."""
        return [self.machines[self.positions[n]] for n in sorted(self.positions)]

    def standbys(self) -> list[Machine]:
        """Machines that could take a position now, in the order in which they joined."""
        return [
            m
            for m in self.machines.values()
            if m.node_rank is None and m.connected and not m.evicted and not m.lost
        ]
