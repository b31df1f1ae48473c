"""Everything the core can be told: facts in the past tense, frozen, in one tagged union.

`ControllerEvent` is what the controller's core is told, and therefore exactly what its journal
holds. `Report` is what agents say; most reports are events as they are, the frequent ones are
folded by core/intake.py first. Shells create events; cores only read them. (What the agent's own
core is told, on its machine, is in core/agent_io.py.)

An event that is the result of an action names it in `action`; the core then forgets the action.
Durations travel, remote time stamps do not: `age_s` is measured on one clock at the place where
the fact was seen.
"""

from __future__ import annotations

from everstep.diagnosis.findings import Finding
from everstep.health import Alert
from everstep.model import (
    NO_STEP,
    CodeVersion,
    Copy,
    ExitStatus,
    Fact,
    Fault,
    Generation,
    JobSpec,
    MachineId,
    NodeRank,
    Published,
    Rank,
    RankError,
    RankPhase,
    RankStatus,
    Replicated,
    Seconds,
    SeenGroups,
    Step,
    Term,
    VersionId,
)
from everstep.sightings import (
    ActivitySeen,
    Computes,
    LossesCompared,
    MachineActivity,
    MachineNumbers,
    MachineStacks,
    StacksRequested,
    StacksSent,
    StacksTaken,
    StragglerSeen,
)

# --- the job and its controller ------------------------------------------------------------------


class JobSubmitted(Fact, frozen=True, kw_only=True):
    """First record of every journal."""

    spec: JobSpec
    published: tuple[Published, ...] = ()
    """Steps already complete in the checkpoint directory, oldest first."""


class ControllerStarted(Fact, frozen=True, kw_only=True):
    """A controller took the next term. From here on every older term is fenced off."""

    term: Term
    version: str


class StopRequested(Fact, frozen=True, kw_only=True):
    """A person asked for the end of the job (`everstep stop`, Ctrl-C in `everstep run`)."""

    by: str


class FaultRequested(Fact, frozen=True, kw_only=True):
    """A person asked to break something on purpose (`everstep inject`)."""

    fault: Fault
    rank: Rank | None = None
    machine: MachineId | None = None


class UpdateRequested(Fact, frozen=True, kw_only=True):
    """A person sent new code (`everstep update`); the controller holds the version."""

    code: CodeVersion
    by: str
    note: str = ""
    urgent: bool = True
    """False: it waits for the next restart, at most `within_s`."""
    within_s: Seconds = 0.0
    overlap: int = 0
    """Go so many steps back and compare their losses bit for bit."""
    untried: bool = False
    """It is put in place although nobody has imported it."""


class RollbackRequested(Fact, frozen=True, kw_only=True):
    """A person wants an earlier version back (`everstep rollback`)."""

    by: str
    note: str = ""
    version: VersionId | None = None
    """None: the last one that ran well."""


class TimerFired(Fact, frozen=True, kw_only=True):
    """The time that next_deadline() named has come."""


# --- machines ------------------------------------------------------------------------------------


class MachineJoined(Fact, frozen=True, kw_only=True):
    """An agent connected and said what its machine is and what runs on it.

    Sent on every new connection, so also after a lost connection, a restarted agent or a restarted
    controller: the core takes it as the whole truth about the machine's ranks.
    """

    machine: MachineId
    agent: str
    """Random id of this agent process: a restarted agent has another one."""
    address: str
    """Where other machines reach this one; MASTER_ADDR if it hosts rank 0."""
    host: str
    """Host name, for people; several stand-ins share one."""
    version: str
    generation: Generation
    """Newest generation the agent was ordered to know; 0 on a fresh machine."""
    ranks: tuple[RankStatus, ...] = ()
    copies: tuple[Copy, ...] = ()
    backups: tuple[Copy, ...] = ()
    """Complete shards of other machines' ranks that this machine keeps for them."""
    local_disk: tuple[Copy, ...] = ()
    """Complete shards on this machine's own disk, whoever ran here when they were written."""
    shard_port: int = 0
    """Where its agent takes and gives shards; 0: it does not."""
    shard_address: str = ""
    """At which address, if it is not `address`."""
    node_rank: NodeRank | None = None
    """The position asked for on the command line (torchrun's --node-rank), if any."""
    boot_id: str = ""
    """Of its kernel: stand-ins share one. Empty: unknown."""
    units: tuple[str, ...] = ()
    """What it shares with others and may lose with them: KIND:NAME, as in "switch:leaf7"."""
    versions: tuple[VersionId, ...] | None = None
    """Code versions that its ranks could run now. None: its agent is of an everstep that runs the
    code as it lies there."""
    ready: bool = False
    """Its launcher is warm, and its checks have looked at everything once."""


class MachineReady(Fact, frozen=True, kw_only=True):
    """The machine's launcher is warm, and its checks have looked at everything once."""

    machine: MachineId


class MachineTested(Fact, frozen=True, kw_only=True):
    """The machine was tested while it had no ranks. Answer to TestMachine."""

    machine: MachineId
    action: str
    passed: bool | None
    """None: it could not be told."""
    why: str
    """One clause: what failed, or what was looked at."""


class VersionHeld(Fact, frozen=True, kw_only=True):
    """The machine's ranks could run this code version now. Answer to HoldVersion."""

    machine: MachineId
    action: str
    version: VersionId


class VersionNotHeld(Fact, frozen=True, kw_only=True):
    """The machine could not get this code version. Answer to HoldVersion."""

    machine: MachineId
    action: str
    version: VersionId
    reason: str


class VersionTried(Fact, frozen=True, kw_only=True):
    """What came of importing a new version's modules on one machine. Answer to TryVersion."""

    machine: MachineId
    action: str
    version: VersionId
    problem: str = ""
    """One clause if it does not import: "ImportError: no module named x (train.py, line 3)"."""
    detail: str = ""
    """The traceback."""
    untold: str = ""
    """Why it could not be told; empty if it could."""
    elsewhere: tuple[str, ...] = ()
    """Files that it imports and that are neither in the version nor installed: not versioned."""
    took_s: Seconds = 0.0


class MachineSilent(Fact, frozen=True, kw_only=True):
    """The connection to the machine's agent is gone. Its ranks may well still train."""

    machine: MachineId
    agent: str


class MachineLost(Fact, frozen=True, kw_only=True):
    """Whoever owns the machines (local cluster, Slurm, Kubernetes) says that this one is gone."""

    machine: MachineId
    witness: str
    """One clause for people, for example "its keeper, pid 4711, is gone"."""


class MachineReleased(Fact, frozen=True, kw_only=True):
    """Nothing of ours is left on the machine: processes and shared memory are gone."""

    machine: MachineId
    action: str


# --- ranks ---------------------------------------------------------------------------------------


class RanksStopped(Fact, frozen=True, kw_only=True):
    """Every rank older than `generation` is proven gone here: the answer to StopRanks."""

    machine: MachineId
    action: str
    generation: Generation
    store_port: int
    """A port that the agent holds reserved on this machine, for rank 0's store."""
    copies: tuple[Copy, ...] = ()
    """The complete checkpoints in this machine's memory."""
    backups: tuple[Copy, ...] = ()
    """As in MachineJoined, and so is the next."""
    local_disk: tuple[Copy, ...] = ()
    finished: Step = NO_STEP
    """Newest step that all ranks here had finished when they were stopped; NO_STEP if unknown."""
    finished_age_s: Seconds = 0.0
    """How long ago that was, when this report was made."""


class RanksSurvived(Fact, frozen=True, kw_only=True):
    """Old ranks could not be proven gone in time: the machine must not be used again."""

    machine: MachineId
    action: str
    generation: Generation
    pids: tuple[int, ...]
    reason: str = ""
    """What they keep, as a clause, if they are gone: then there may be no pids."""


class RanksStarted(Fact, frozen=True, kw_only=True):
    """The machine's ranks of this generation run. The answer to StartRanks."""

    machine: MachineId
    action: str
    generation: Generation


class StartFailed(Fact, frozen=True, kw_only=True):
    """The machine could not start its ranks: no launcher, no port, no memory for the slots."""

    machine: MachineId
    action: str
    generation: Generation
    reason: str


class RankExited(Fact, frozen=True, kw_only=True):
    """A rank's process ended. The agent's core hears it first, and tells the controller's."""

    machine: MachineId
    generation: Generation
    rank: Rank
    exit: ExitStatus
    age_s: Seconds = 0.0
    """How long ago the agent's kernel ended it, when this report was made."""
    error: RankError | None = None
    last_lines: str = ""
    """The end of the rank's output, at most 4 KiB."""


class EvidenceFound(Fact, frozen=True, kw_only=True):
    """The output of a machine's ranks says something about a cause, for the first time."""

    machine: MachineId
    generation: Generation
    findings: tuple[Finding, ...]


class AlertRaised(Fact, frozen=True, kw_only=True):
    """A check of a machine fails, or fails again, or somebody else's monitor says so."""

    machine: MachineId
    alert: Alert


class AlertCleared(Fact, frozen=True, kw_only=True):
    """What an alert said is over."""

    machine: MachineId
    check: str
    item: str = ""
    source: str = "agent"


class MachineProbed(Fact, frozen=True, kw_only=True):
    """A machine tried to reach another one. Answer to ProbeMachine."""

    machine: MachineId
    """Who tried."""
    action: str
    target: MachineId
    reachable: bool | None
    """None: it could not be tried, which says nothing of the target."""
    why: str = ""
    """One clause: what came of it."""


class StepProgress(Fact, frozen=True, kw_only=True):
    """What intake.py makes of all machines' reports, at most once a second."""

    generation: Generation
    finished_by_all: Step
    """Newest step whose optimizer update finished on every rank."""
    finished_by_one: Step
    """Newest step that any rank finished."""
    step_s: Seconds | None = None
    """Recent time per step, if known."""
    age_s: Seconds = 0.0
    """How long ago `finished_by_all` was reached."""
    loss: float | None = None
    phase: RankPhase = RankPhase.TRAINING
    """What ranks say that they do; the longest one if they do several things."""
    phase_s: Seconds = 0.0
    """For how long they have."""
    attached: bool = False
    """Some script called everstep.attach(): it will tell of steps, if it has not yet."""


class GroupsSeen(Fact, frozen=True, kw_only=True):
    """What intake.py makes of the groups that all machines' ranks told of: once per generation."""

    generation: Generation
    seen: SeenGroups


class MetricAbnormal(Fact, frozen=True, kw_only=True):
    """What intake.py makes of training's own numbers: one of them is not as it should be."""

    generation: Generation
    machine: MachineId
    """Whose rank reported it: a place, not a culprit."""
    rank: Rank | None = None
    kind: str
    """A word of diagnosis.abnormal.Kind."""
    metric: str
    step: Step
    """When it was certain."""
    first_bad: Step
    """The first step that shows it: what was saved before it is good."""
    why: str
    """One clause with its numbers."""
    logged: bool = False
    """It was read in the log of a script that is not attached."""


# --- checkpoints ---------------------------------------------------------------------------------


class StepPersisted(Fact, frozen=True, kw_only=True):
    """The machine's shards of this step are on disk, checked and fsynced. Answer to PersistStep."""

    machine: MachineId
    action: str
    step: Step


class PersistFailed(Fact, frozen=True, kw_only=True):
    """The machine could not put its shards of this step on disk; training goes on."""

    machine: MachineId
    action: str
    step: Step
    reason: str


class StepBackedUp(Fact, frozen=True, kw_only=True):
    """The peers hold all of the machine's shards of this step. Answer to BackUpStep."""

    machine: MachineId
    action: str
    step: Step
    sent_bytes: int = 0
    took_s: Seconds = 0.0
    """From the first byte to the last acknowledgement."""
    replicated: tuple[Replicated, ...] = ()
    """What its ranks have of the tensors of which they sent a slice only."""


class BackupFailed(Fact, frozen=True, kw_only=True):
    """The machine could not bring its shards of this step to its peers; training goes on."""

    machine: MachineId
    action: str
    step: Step
    reason: str
    late: bool = False
    """The order came when a rank had let go of the step already."""


class StepPublished(Fact, frozen=True, kw_only=True):
    """The step's manifest is in place: any machine may restore it. Answer to PublishStep."""

    action: str
    step: Step
    generation: Generation
    reason: str = ""
    """Empty, or why it could not be published."""
    stored_bytes: int = 0
    """What all ranks wrote; 0: not known."""


class MachinesRequested(Fact, frozen=True, kw_only=True):
    """The cluster accepted or refused a request for machines. Answer to RequestMachines."""

    action: str
    reason: str = ""
    """Empty, or why it was refused."""


class FaultInjected(Fact, frozen=True, kw_only=True):
    """The fault is about to happen (it may kill the one who says so). Answer to InjectFault."""

    action: str
    fault: Fault
    machine: MachineId | None = None


ControllerEvent = (
    JobSubmitted
    | ControllerStarted
    | StopRequested
    | FaultRequested
    | UpdateRequested
    | RollbackRequested
    | TimerFired
    | MachineJoined
    | MachineReady
    | MachineTested
    | VersionHeld
    | VersionNotHeld
    | VersionTried
    | MachineSilent
    | MachineLost
    | MachineReleased
    | RanksStopped
    | RanksSurvived
    | RanksStarted
    | StartFailed
    | RankExited
    | EvidenceFound
    | AlertRaised
    | AlertCleared
    | MachineProbed
    | StepProgress
    | LossesCompared
    | GroupsSeen
    | MetricAbnormal
    | StepPersisted
    | PersistFailed
    | StepBackedUp
    | BackupFailed
    | StepPublished
    | MachinesRequested
    | FaultInjected
    | StacksRequested
    | StacksTaken
    | StacksSent
    | ActivitySeen
    | StragglerSeen
)


# --- what agents send besides (folded by core/intake.py or shown to people; never journalled) ----


class MachineProgress(Fact, frozen=True, kw_only=True):
    """A machine's slowest and fastest rank: the reduced form of all its heartbeat slots."""

    machine: MachineId
    generation: Generation
    slowest: Step
    fastest: Step
    step_s: Seconds | None = None
    age_s: Seconds = 0.0
    """How long ago the slowest rank finished `slowest`."""
    loss: float | None = None
    phase: RankPhase = RankPhase.TRAINING
    phase_s: Seconds = 0.0
    attached: bool = False
    """A rank here called everstep.attach()."""
    computes: tuple[Computes, ...] = ()
    """Of its ranks, how long they compute in a step; the slowest and the fastest, if many."""


class MachineGroups(Fact, frozen=True, kw_only=True):
    """The parallel groups of a machine's ranks, said after their first step and whenever the agent
    meets a controller.
    """

    machine: MachineId
    generation: Generation
    seen: SeenGroups


class OutputLines(Fact, frozen=True, kw_only=True):
    """New output of one rank, for people. Bounded: what does not fit is counted, not sent."""

    machine: MachineId
    rank: Rank
    generation: Generation
    text: str
    dropped_bytes: int = 0


Report = (
    MachineJoined
    | MachineReady
    | MachineTested
    | VersionHeld
    | VersionNotHeld
    | VersionTried
    | MachineReleased
    | RanksStopped
    | RanksSurvived
    | RanksStarted
    | StartFailed
    | RankExited
    | EvidenceFound
    | AlertRaised
    | AlertCleared
    | MachineProbed
    | LossesCompared
    | StepPersisted
    | PersistFailed
    | StepBackedUp
    | BackupFailed
    | FaultInjected
    | MachineProgress
    | MachineGroups
    | MachineNumbers
    | MachineActivity
    | MachineStacks
    | StacksSent
    | OutputLines
)
"""What an agent may say to a controller."""

Folded = MachineProgress | MachineGroups | MachineNumbers | MachineActivity | MachineStacks
"""What comes from every machine, and becomes an event of all of them (core/intake.py)."""
UNJOURNALLED = (
    MachineProgress,
    MachineGroups,
    MachineNumbers,
    MachineActivity,
    MachineStacks,
    OutputLines,
)
"""Reports that may be lost: the next one says it again, or people miss a line."""
